"""Choice of the implementation that serves an operation on a device.

Invariant: torch is always an answer. A user of an operation asks once, when it is constructed, and keeps its
torch code for the answer :data:`TORCH`; nothing else in the engine knows what a machine can do.
"""

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from . import native

logger = logging.getLogger(__name__)

TORCH = native.ISAS[0]
TRITON = "triton"

OPERATIONS = ("linear", "attention", "linear_attention", "elementwise", "experts", "decoder", "sampler")
"""Operations compiled for the CPU, all in :data:`native.FLOATS`."""
_IN_TRITON = ("elementwise", "experts", "sampler")
"""Operations compiled for CUDA; ``attention/backends.py`` chooses attention."""
_TRITON_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def best(operation: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Return what serves ``operation``: one of :data:`native.ISAS`, :data:`TRITON` or :data:`TORCH`.

    Raises:
        ValueError: ``CAESURA_KERNELS`` has an unknown value.
    """
    kind = torch.device(device).type
    if kind == "cpu" and operation in OPERATIONS and dtype in native.FLOATS:
        return native.isa()
    if kind == "cuda" and operation in _IN_TRITON and dtype in _TRITON_FLOATS:
        return TORCH if why_not_triton(torch.device(device)) else TRITON
    return TORCH


def serving(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    return {operation: best(operation, device, dtype) for operation in OPERATIONS}


@cache
def why_not_triton(device: torch.device) -> str | None:
    """Return why Triton's kernels do not serve on ``device``, found by running one there, or None."""
    if os.environ.get(native.VARIABLE) == TORCH:
        return f"{native.VARIABLE}={TORCH}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    reason: str | None = import_module(".triton_elementwise", __package__).why_not(device)
    if reason is not None:
        logger.warning("torch computes instead of kernels in Triton, in more launches: %s", reason)
    return reason
