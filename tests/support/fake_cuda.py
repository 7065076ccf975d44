"""CUDA without CUDA: tensors that say they are on ``cuda:0`` and hold nothing, and a record of what is done
with them.

Invariants:
- An operation that touches no tensor of the device, and makes none, runs as it always does: what the engine
  computes on the host are its real values. Every other operation runs on fake tensors, which have a device, a
  dtype and a shape.
- A value that the host reads from the device is 0, and the record says that the host waited. So a step that
  waits runs on, and all its waits are found at once.
- Views and allocations launch nothing. Every other operation of the device counts as one launch, and so does
  every call of a Triton kernel or of a library's stand-in (:meth:`Tracer.launch`). Some of torch's operations
  launch several kernels.

torch needs a device guard even for fake tensors. A build for CUDA has one; for others :func:`register_guard`
compiles one that does nothing.
"""

import ctypes
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caesura import scheduler
from caesura.scheduler.memory.device_module import Accelerator

DEVICE = torch.device("cuda:0")
_PRODUCT = os.path.join(scheduler.__path__[0], "")
_LAUNCHER = "triton_launch.py"
"""File whose callers launch kernels."""

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


def register_guard(folder: Path) -> None:
    """Compile a device guard for CUDA in ``folder`` and load it; skips where there is no compiler."""
    if torch.backends.cuda.is_built():
        return
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    root = Path(torch.__file__).parent
    headers = f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-w", *headers, source, f"-L{root / 'lib'}", "-lc10"]
    try:
        subprocess.run([*command, "-o", library], check=True)
    except FileNotFoundError:
        pytest.skip("no g++ to build a device guard for CUDA with")
    ctypes.CDLL(str(library))


# Operations by the name of their schema, without the overload.
_WAITS = frozenset(
    {
        "_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
        "unique_dim",
    }
)  # fmt: skip
"""Operations that give the host a value, or a size that depends on values."""
_NO_LAUNCH = frozenset(
    {
        "_has_same_storage_numel", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach",
        "detach_", "diagonal", "empty",
        "empty_like", "empty_strided", "expand", "is_pinned", "is_same_size", "lift_fresh", "new_empty",
        "new_empty_strided",
        "permute", "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t",
        "transpose", "unbind",
        "unfold", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
"""Views and allocations."""
_FUSED = frozenset({"_fused_rms_norm", "scaled_dot_product_attention"})
"""One kernel on a device, made of other operations on fake tensors."""
_COPIES = frozenset({"copy_", "_to_copy"})


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    """``launch``; ``wait``; ``mixed``, of devices; ``h2d`` or ``d2h``, a copy that waits for nothing."""
    name: str
    """Name of the operation or the kernel."""
    phase: str
    where: str
    """The product's line."""
    elements: int = 0
    """Elements of the largest tensor that is read or written."""
    nbytes: int = 0
    """Bytes that are read and written."""


@dataclass(slots=True)
class Record:
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str, *phases: str) -> list[Event]:
        """Return the events of one kind, in these phases (none given: in all)."""
        return [
            event for event in self.events if event.kind == kind and (not phases or event.phase in phases)
        ]

    def count(self, kind: str, *phases: str) -> int:
        return len(self.of(kind, *phases))

    def told(self, kind: str, *phases: str) -> str:
        """Return the events, one a line with how often, for a message."""
        told = Counter(f"{event.phase}: {event.name} at {event.where}" for event in self.of(kind, *phases))
        return "\n".join(f"{count} x {line}" for line, count in told.items())


class Tracer(TorchDispatchMode):
    """Runs what is inside on fake tensors, and records what touches the device.

    Attributes:
        record: of what ran since :meth:`begin`.
        phase: what the next events belong to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.phase = ""
        self.capturing = False
        self.capture_phase = "capture"
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        self._fake.__enter__()  # below this mode, which is asked first
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._fake.__exit__(*failure)

    def begin(self, phase: str) -> None:
        self.record, self.phase = Record(), phase

    def launch(self, name: str, *arguments: Any) -> None:
        """Record one call of a kernel that is no operation of torch."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(tensor.device != DEVICE for tensor in tensors):
            self._note("mixed", name, tensors)
        self._note("launch", name, tensors)

    def waited(self, name: str) -> None:
        """Record that the host waits for the device, other than by an operation of torch."""
        self._waits(name, [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a fake tensor for its device
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not any(_is_fake(leaf) for leaf in leaves):
            return self._on_host(func, args, kwargs)
        if name not in _FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return func.decompose(*args, **kwargs)
        if name in _COPIES:
            return self._copy(func, name, args, kwargs)
        self._check_devices(name, given)
        if name in _WAITS or _is_masked(name, args):
            return self._waited(func, name, args, kwargs, given)
        return self._launched(func, name, args, kwargs, given)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)  # there is no driver to ask
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _launched(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        out = func(*args, **kwargs)
        if name not in _NO_LAUNCH:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self._note("launch", name, [*given, *made])
        return out

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        to = target.device if target is not None else torch.device(kwargs.get("device") or source.device)
        non_blocking = bool(
            kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        )
        if to.type == source.device.type:
            return self._launched(func, name, args, kwargs, [x for x in args if isinstance(x, Tensor)])
        if target is not None and source.dim() == 0 and source.device.type == "cpu":
            return self._launched(func, "fill", args, kwargs, [target])
        kind = "d2h" if to.type == "cpu" else "h2d"
        if not non_blocking or self.capturing:
            self._waits(f"{kind} copy", [source])
        self._note(kind, name, [source])
        if kind == "h2d":
            return func(*args, **kwargs)
        if target is not None:
            return target
        with unset_fake_temporarily():
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _waited(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        self._waits(name, given)
        self._note("launch", name, given)
        if name in ("_local_scalar_dense", "item"):
            return 0.0 if given[0].is_floating_point() else given[0].dtype != torch.bool and 0
        if name in ("equal", "is_nonzero"):
            return False
        if name == "nonzero":
            return torch.empty((0, given[0].dim()), dtype=torch.int64, device=DEVICE)
        if name == "index":
            return _nothing_of(*args)
        if name in ("index_put_", "index_put", "_index_put_impl_"):
            return args[0]
        if name == "masked_select":
            return torch.empty(0, dtype=given[0].dtype, device=DEVICE)
        return func(*args, **kwargs)

    def _waits(self, name: str, tensors: list[Tensor]) -> None:
        self._note("wait", name, tensors)
        if self.capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")

    def _check_devices(self, name: str, given: list[Tensor]) -> None:
        if len({tensor.device.type for tensor in given if tensor.dim()}) > 1:
            self._note("mixed", name, given)

    def _note(self, kind: str, name: str, tensors: list[Tensor]) -> None:
        sizes = [(prod(tensor.shape), tensor.element_size()) for tensor in tensors]
        elements = max((count for count, _ in sizes), default=0)
        nbytes = sum(count * size for count, size in sizes)
        self.record.events.append(Event(kind, name, self.phase, _where(), elements, nbytes))


def _is_fake(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == DEVICE.type)


def _is_masked(name: str, args: Any) -> bool:
    if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _nothing_of(values: Tensor, indices: list[Tensor | None]) -> Tensor:
    dims = sum(
        1 if index is None or index.dtype not in (torch.bool, torch.uint8) else index.dim()
        for index in indices
    )
    return torch.empty((0, *values.shape[dims:]), dtype=values.dtype, device=values.device)


def _where() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PRODUCT) and not name.endswith(_LAUNCHER):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the scheduler"


class _Event:
    def record(self) -> None:
        """Do nothing: no work is pending."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: a wait for an event is a wait for what stands before it."""


class _Stream:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def wait_stream(self, other: "_Stream") -> None:
        """Do nothing: the wait is the device's."""

    def synchronize(self) -> None:
        self._tracer.waited("Stream.synchronize")


class FakeGraph:
    """Interface of ``torch.cuda.CUDAGraph``."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._before = ""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._before, self._tracer.phase = self._tracer.phase, self._tracer.capture_phase
        self._tracer.capturing = True

    def capture_end(self) -> None:
        self._tracer.phase, self._tracer.capturing = self._before, False

    def replay(self) -> None:
        self._tracer.launch("graph")


def _device_module(tracer: Tracer) -> SimpleNamespace:
    """Return the part of ``torch.cuda`` that the scheduler uses, on a Hopper device."""
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    return SimpleNamespace(
        Event=_Event,
        Stream=lambda device=None: _Stream(tracer),
        CUDAGraph=lambda: FakeGraph(tracer),
        graph_pool_handle=object,
        current_device=lambda: 0,
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: "fake",
        get_device_properties=lambda device=None: properties,
        mem_get_info=lambda device=None: (100 << 30, 140 << 30),
    )


def _accelerator(tracer: Tracer) -> dict[str, Callable[..., object]]:
    """Return the functions of ``torch.accelerator`` that the scheduler uses."""
    return {
        "current_accelerator": lambda check_available=False: DEVICE,
        "current_stream": lambda device: _Stream(tracer),
        "set_stream": lambda stream: None,
        "synchronize": lambda device: tracer.waited("synchronize"),
        "empty_cache": lambda: None,
        "get_memory_info": lambda device: (100 << 30, 140 << 30),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
    }


@contextmanager
def fake_cuda() -> Iterator[Tracer]:
    """Make ``cuda:0`` a fake device, and record its use; a guard has been registered."""
    tracer = Tracer()
    device = _device_module(tracer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device_=None: device)
        for name, function in _accelerator(tracer).items():
            patch.setattr(torch.accelerator, name, function)
        patch.setattr(Accelerator, "Stream", lambda self: _Stream(tracer))
        patch.setattr(Accelerator, "Event", lambda self: _Event())
        for name in ("get_device_capability", "get_device_name", "get_device_properties", "current_device"):
            patch.setattr(torch.cuda, name, getattr(device, name))
        if find_spec("triton") is not None:
            _trace_triton(tracer, patch)
        with tracer, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield tracer


def _trace_triton(tracer: Tracer, patch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tracer.launch(kernel.__name__, args, kwargs)

    patch.setattr(JITFunction, "run", run)
