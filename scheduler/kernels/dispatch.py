"""Modules of elementwise and expert kernels, by the device that they serve.

Invariant: ``elementwise.py`` and ``triton_elementwise.py`` take the same arguments and round alike, so a
layer is written once for both. Routed experts differ: on the CPU weights are packed and rows grouped
otherwise.
"""

from importlib import import_module
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from . import TORCH, TRITON, best, elementwise
from .attention_form import Bend, HeadNorms


class Elementwise(Protocol):
    """Functions of ``elementwise.py`` and ``triton_elementwise.py``."""

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
        return cast("Elementwise", import_module(".triton_elementwise", __package__))
    return None if by == TORCH else elementwise


class TritonExperts(Protocol):
    """Functions of ``triton_experts.py``."""

    MAX_PAIRS: int

    def route(
        self,
        logits: Tensor,
        top_k: int,
        *,
        normalize: bool,
        scale: float = 1.0,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        bias: Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: Literal["max", "top2"] = "max",
        record: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def sort_rows(self, x: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]: ...

    def combine(self, y: Tensor, places: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor: ...


def triton_experts_for(device: torch.device, dtype: torch.dtype) -> TritonExperts | None:
    """Return the module for tensors of ``dtype`` on ``device``, or None if others serve."""
    if best("experts", device, dtype) != TRITON:
        return None
    return cast("TritonExperts", import_module(".triton_experts", __package__))


class Latents(Protocol):
    def rotate_latents(
        self,
        q_rope: Tensor,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: tuple[Tensor, float],
        queries: Tensor,
        keys: Tensor,
        *,
        interleaved: bool,
    ) -> None: ...


class Rotations(Latents, Protocol):
    """Functions that only Triton's module has: on the CPU angles come from a table."""

    def angles(
        self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


def rotations_for(device: torch.device, dtype: torch.dtype) -> Rotations | None:
    if best("elementwise", device, dtype) != TRITON:
        return None
    return cast("Rotations", import_module(".triton_rotations", __package__))


def latents_for(device: torch.device, dtype: torch.dtype) -> Latents | None:
    by = best("elementwise", device, dtype)
    return rotations_for(device, dtype) if by == TRITON else None if by == TORCH else elementwise
