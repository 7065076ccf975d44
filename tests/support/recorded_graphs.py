"""A device module whose streams do nothing and whose graphs record torch operations on the CPU.

A replay runs the recorded operations again over the same memory: what was a number on the host while it was
captured stays that number, and what a buffer holds by then is read anew. That is what makes a wrong capture
give wrong results here, too. As on a device, a graph owns what its operations allocated, and keeps nothing
else alive: a replay that would read memory that somebody has given up fails.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Event:
    """Complete as soon as it is recorded."""

    def record(self) -> None:
        """Do nothing: no work is pending."""

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""


class Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append("wait")

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A view of memory that no recorded operation has allocated."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    read_by: str

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError(f"{self.read_by} reads {self.size} {self.dtype} that nothing keeps alive")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Graph(TorchDispatchMode):
    def __init__(self, owner: "RecordingDevice") -> None:
        super().__init__()
        self._owner = owner
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._own: set[int] = set()
        """Storages that recorded operations have allocated."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        assert pool is self._owner.pool, "one pool for all"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._owner.forbidden:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = {_storage(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        self._own |= made - given
        self._calls.append(tuple(self._kept(part, str(func)) for part in (func, args, kwargs or {}, out)))
        return out

    def _kept(self, part: Any, read_by: str) -> Any:
        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or _storage(leaf) in self._own or not leaf.numel():
                return leaf
            storage = StorageWeakRef(leaf.untyped_storage())
            size, stride = tuple(leaf.shape), tuple(leaf.stride())
            return Outside(storage, leaf.dtype, leaf.storage_offset(), size, stride, read_by)

        return tree_map(kept, part)

    def replay(self) -> None:
        self._owner.replays += 1
        for call in self._calls:
            func, args, kwargs, out = tree_map(_found, call)
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _found(leaf: Any) -> Any:
    return leaf.tensor() if isinstance(leaf, Outside) else leaf


class RecordingDevice:
    """The part of ``torch.cuda`` that a runner uses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        """Waits of one stream for another, and ``enter`` and ``leave`` of the forward stream."""
        self.pool: object = None
        self.replays = 0
        self.captures = 0
        self.forbidden: tuple[Any, ...] = ()
        """Operations that cannot be captured."""
        self._current = Stream(self.log)

    def Stream(self) -> Stream:  # noqa: N802 (torch's name)
        return Stream(self.log)

    def Event(self) -> Event:  # noqa: N802 (torch's name)
        return Event()

    def CUDAGraph(self) -> Graph:  # noqa: N802 (torch's name)
        self.captures += 1
        return Graph(self)

    def graph_pool_handle(self) -> object:
        self.pool = object()
        return self.pool

    def current_stream(self) -> Stream:
        return self._current

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def memory_reserved(self) -> int:
        return 1000 * self.captures

    def memory_allocated(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")


def without_compiled_kernels(monkeypatch: Any) -> None:
    from caesura.scheduler.kernels import native

    monkeypatch.setattr(native, "_library", lambda: "left out by a test")


def record_graphs(monkeypatch: Any) -> RecordingDevice:
    """Let engines decode by graphs, as on a CUDA device that has FlashInfer, and without compiled kernels."""
    from caesura.scheduler.attention import flashinfer, flashinfer_mla
    from caesura.scheduler.execution import build

    from . import fake_flashinfer

    without_compiled_kernels(monkeypatch)
    device = RecordingDevice()
    monkeypatch.setattr(build, "device_module_for", lambda _: device)
    for module in (flashinfer, flashinfer_mla):
        monkeypatch.setattr(module, "why_not", lambda *of: None)
        monkeypatch.setattr(
            module,
            "import_module",
            lambda name: fake_flashinfer if name.startswith("flashinfer") else import_module(name),
        )
    return device


def assert_same(first: Tensor, second: Tensor) -> None:
    """Assert that both are equal but for rounding that depends on the number of rows."""
    torch.testing.assert_close(first, second, atol=2e-5, rtol=1e-4)
