"""The library of compiled kernels: finding it, loading it, and what it may use of this machine.

Invariants:
- Nothing raises because kernels are missing: :func:`isa` returns ``torch``, :func:`why_not` says why.
- One OpenMP runtime per process. The library is linked without one; its symbols resolve to the runtime that
  torch has loaded, so torch must be imported first, and one pool of threads serves both.
- Every kernel is told its number of threads, :func:`torch.get_num_threads` of the moment.
- ``CAESURA_KERNELS`` limits use: to ``torch``, or to one of the machine's :data:`ISAS`. Unset or empty it is
  the best that there is.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from ..runtime.dtypes import NAMES

VARIABLE = "CAESURA_KERNELS"


def isas_of(machine: str) -> tuple[str, ...]:
    """Return the instruction sets of a :func:`platform.machine`, in the order of common.h's ``Isa``."""
    if machine in ("aarch64", "arm64"):
        return "torch", "neon", "neonbf16"
    return "torch", "avx2", "avx512", "avx512bf16", "amx"


ISAS = isas_of(platform.machine())
"""Instruction sets of this machine: each includes those before it."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of tensors that kernels take; arithmetic is float32, or, for bfloat16, that of its instructions."""

NO_AVX2 = "this processor has no AVX2 with FMA and F16C"
"""The one reason of :func:`why_not` that is not the installation's."""

_ABI = 30
"""Version of the C interface, equal to native.cpp's; both rise when an argument of a kernel changes."""

POINTER = ctypes.c_void_p
"""A tensor's ``data_ptr()``, or None."""
SIZE = ctypes.c_int64
INT = ctypes.c_int
FLOAT = ctypes.c_float


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LayerForm(ctypes.Structure):
    """``LayerForm`` of ``cpu/operations.h``; structures' sizes are compared when the library is loaded."""

    _fields_ = [
        *_all(SIZE, "intermediate bend window has_states"),
        *_all(SIZE, "experts top_k expert_size expert_bend normalize record_row record_bytes"),
        *_all(SIZE, "first_expert held_experts"),
        *_all(SIZE, "groups top_groups sigmoid best_two"),
        *_all(FLOAT, "route_scale scale softcap reserved"),
    ]


class DeltaArguments(ctypes.Structure):
    """``DeltaArguments`` of ``cpu/operations.h``."""

    _fields_ = [
        *_all(POINTER, "places segments chains"),
        *_all(SIZE, "num_chains width key_heads group key_size value_size kernel"),
    ]


class LogitEdits(ctypes.Structure):
    """``LogitEdits`` of ``cpu/operations.h``."""

    _fields_ = [
        *(("rows", SIZE), ("places", POINTER), ("penalised", SIZE)),
        *_all(POINTER, "repetition frequency presence counters counts"),
        *(("biases", SIZE), ("bias_ids", POINTER), ("bias", POINTER)),
        *(("allowed", SIZE), ("allowed_ids", POINTER), ("restricted", POINTER)),
    ]
    kept: object
    """Owners of the memory at these addresses."""


class Sampling(ctypes.Structure):
    """``Sampling`` of ``cpu/operations.h``."""

    _fields_ = [
        ("logits", POINTER),
        *_all(SIZE, "stride rows vocabulary"),
        *_all(POINTER, "temperature greedy uniforms tokens logprobs raw_logprobs sampled_logprobs"),
        *_all(POINTER, "top_k top_p min_p last_kept given"),
        *(("edits", ctypes.POINTER(LogitEdits)), ("workspace", POINTER)),
    ]


class FurtherLogprobs(ctypes.Structure):
    """``FurtherLogprobs`` of ``cpu/operations.h``."""

    _fields_ = [
        ("logits", POINTER),
        *_all(SIZE, "stride vocabulary count"),
        *(("rows", POINTER), ("temperature", POINTER)),
        *(("top", SIZE), ("top_ids", POINTER), ("top_logprobs", POINTER)),
        *(("others", SIZE), ("ids", POINTER), ("logprobs", POINTER)),
        *_all(POINTER, "last_kept kept workspace"),
    ]


class DecoderStep(ctypes.Structure):
    """``DecoderStep`` of ``cpu/operations.h``."""

    _fields_ = [
        *_all(SIZE, "tokens hidden heads kv_heads head_size rotated from_one"),
        *_all(SIZE, "scale_columns head_gates"),
        *_all(SIZE, "latent q_rank nope value_size interleaved parts"),
        *_all(POINTER, "token_ids embeddings"),
        *_all(SIZE, "embeddings_packed vocabulary"),
        *_all(POINTER, "residual update x qkv attended gate_up gated narrow numbers"),
        *_all(POINTER, "q q_up queries values"),
        *_all(POINTER, "logits ids weights pair_tokens places hit starts next count"),
        *_all(POINTER, "rows expert_gate_up expert_gated gates"),
        *_all(SIZE, "groups_row angles_row"),
        *_all(POINTER, "positions slots window_slots pages window_pages"),
        *_all(SIZE, "pages_row window_pages_row"),
        *(("tasks", POINTER), ("num_tasks", SIZE)),
        *(("sampled", POINTER), ("num_sampled", SIZE), ("last_norm", POINTER), ("out", POINTER)),
        *_all(POINTER, "head head_scales sampling"),
        *(("scratch", POINTER), ("thread_floats", SIZE)),
        *_all(FLOAT, "eps head_eps scale reserved"),
        ("delta", DeltaArguments),
        ("ranks", POINTER),
        *_all(SIZE, "adapter_rank adapter_rows adapter_count"),
        *_all(POINTER, "adapter_tokens adapter_slots adapter_starts"),
        *_all(POINTER, "adapter_x adapter_shrunk adapter_change"),
    ]


LAYER_POINTERS = 51
"""Pointers of ``LayerTensors`` of ``cpu/operations.h``, in the order of ``decoder_layers.py``."""


@cache
def _library() -> ctypes.CDLL | str:
    limit = os.environ.get(VARIABLE) or ISAS[-1]
    if limit not in ISAS:
        raise ValueError(f"{VARIABLE}={limit}: expected one of {', '.join(ISAS)}")
    if limit == ISAS[0]:
        return f"{VARIABLE}={limit}"
    path = _find()
    if path is None:
        return "the extension was not built (it needs Linux and GCC at installation, on x86-64 or 64-bit ARM)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # another platform's file, or a torch without OpenMP
        return f"{path.name} does not load: {error}"
    if library.caesura_abi() != _ABI:
        return f"{path.name} was built from other sources; install again"
    sizes = {
        "decoder step": ctypes.sizeof(DecoderStep),
        "layer form": ctypes.sizeof(LayerForm),
        "further logprobs": ctypes.sizeof(FurtherLogprobs),
        "logit edits": ctypes.sizeof(LogitEdits),
        "sampling": ctypes.sizeof(Sampling),
        "layer tensors": LAYER_POINTERS * ctypes.sizeof(POINTER),
    }
    for name, ours in sizes.items():
        theirs = library[f"caesura_{name.replace(' ', '_')}_bytes"]()
        if theirs != ours:
            return f"{path.name} takes a {name} of {theirs} bytes, this source makes one of {ours}"
    return library if library.caesura_use_isa(ISAS.index(limit)) else NO_AVX2


def _find() -> Path | None:
    folder = Path(__file__).parent
    return next((file for suffix in EXTENSION_SUFFIXES if (file := folder / f"_cpu{suffix}").exists()), None)


def isa() -> str:
    """Return the instruction set of compiled kernels, or ``torch``; ValueError if the limit is unknown."""
    library = _library()
    return ISAS[0] if isinstance(library, str) else ISAS[library.caesura_isa()]


def why_not() -> str | None:
    """Return why there are no compiled kernels, or None if there are."""
    library = _library()
    return library if isinstance(library, str) else None


@contextmanager
def limited_to(name: str) -> Iterator[bool]:
    """Limit kernels to ``name`` within the block. Yields False, changing nothing, if they cannot."""
    library = _library()
    if isinstance(library, str):
        yield name == ISAS[0]
        return
    before, wanted = library.caesura_isa(), ISAS.index(name)
    try:
        possible = library.caesura_use_isa(wanted) == wanted
        if not possible:
            library.caesura_use_isa(before)
        yield possible
    finally:
        library.caesura_use_isa(before)


def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """Return the library's function ``name``, resolved at its first call, when kernels must be there."""
    native: Callable[..., Any] | None = None

    def call(*values: Any) -> Any:
        nonlocal native
        if native is None:
            library = _library()
            if isinstance(library, str):
                raise RuntimeError(f"no compiled kernels: {library}")
            found = library[name]
            found.argtypes, found.restype = arguments, result
            native = found
        return native(*values)

    return call


@cache
def address(name: str) -> int:
    """Return the address of the library's function ``name``, for other compiled code."""
    library = _library()
    assert not isinstance(library, str), "nothing is packed without kernels"
    return ctypes.cast(library[name], POINTER).value or 0


def by_dtype(name: str, *arguments: Any, result: Any = None) -> dict[torch.dtype, Callable[..., Any]]:
    """Return the library's functions ``{name}_bf16``, ``{name}_f16`` and ``{name}_f32``."""
    return {dtype: function(f"{name}_{NAMES[dtype].lower()}", *arguments, result=result) for dtype in FLOATS}


def misfit(what: str, *tensors: torch.Tensor | None) -> ValueError:
    """Return the error of tensors that a kernel would misread."""
    told = (None if x is None else f"{x.dtype} {tuple(x.shape)} strides {x.stride()}" for x in tensors)
    return ValueError(f"{what}: {', '.join(map(str, told))}")
