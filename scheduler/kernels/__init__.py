"""Choice of the implementation that serves an operation on a device.

Invariant: torch is always an answer (:data:`TORCH`). A user asks once, when it is constructed.
``elementwise.py`` and ``triton_elementwise.py`` take the same arguments and round alike, so a layer is
written once. Routed experts and latents differ: on the CPU weights are packed, and rows grouped otherwise.
"""

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from . import elementwise, native
from .attention_form import Bend, HeadNorms

logger = logging.getLogger(__name__)

TORCH = native.ISAS[0]
TRITON = "triton"

OPERATIONS = ("linear", "attention", "linear_attention", "elementwise", "experts", "decoder", "sampler")
"""Operations compiled for the CPU, all in :data:`native.FLOATS`."""
_IN_TRITON = ("elementwise", "experts", "sampler")
"""Operations compiled for CUDA; ``attention/backends.py`` chooses attention."""
_TRITON_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def best(operation: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Return what serves ``operation``; ValueError if ``CAESURA_KERNELS`` has an unknown value."""
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


class Elementwise(Protocol):
    """Functions that ``elementwise.py`` and ``triton_elementwise.py`` both have, checked against each."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        from_one: bool = False,
    ) -> Tensor: ...

    def gate_mul(self, gate_up: Tensor, out: Tensor | None = None, *, bend: Bend = "silu") -> Tensor: ...

    def rope_store(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        kv_slots: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        out: Tensor,
        norm: HeadNorms | None = None,
    ) -> Tensor: ...


def elementwise_for(device: torch.device, dtype: torch.dtype) -> Elementwise | None:
    """Return the module for tensors of ``dtype`` on ``device``, or None if torch serves."""
    by = best("elementwise", device, dtype)
    if by == TRITON:
        from . import triton_elementwise  # needs Triton

        return triton_elementwise
    return None if by == TORCH else elementwise


def triton_for(operation: str, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module ``triton_{operation}.py`` if it serves, else None."""
    if best(operation, device, dtype) != TRITON:
        return None
    return import_module(f".triton_{operation}", __package__)
