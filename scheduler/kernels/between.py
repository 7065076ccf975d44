"""What lies between matrix products, by the modules that serve a device.

Invariant: ``elementwise.py`` and ``triton_elementwise.py`` take the same arguments and round alike, so a layer is written
once for both. Routed experts are another matter: on the CPU weights are packed and rows are grouped otherwise.
"""

from importlib import import_module
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from . import TORCH, TRITON, best, elementwise
from .forms import Bend, HeadNorms


class Elementwise(Protocol):
    """See ``elementwise.py``."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        from_one: bool = False,
    ) -> Tensor:
        """The norm of each row, with ``residual`` of ``residual += x``."""
        ...

    def gate_mul(self, gate_up: Tensor, out: Tensor | None = None, *, bend: Bend = "silu") -> Tensor:
        """``bend(gate) * up`` of rows (gate, up)."""
        ...

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
    ) -> Tensor:
        """Head norms, rotation, and the store of keys and values."""
        ...


def elementwise_for(device: torch.device, dtype: torch.dtype) -> Elementwise | None:
    """The module for tensors of ``dtype`` on ``device``. None: torch serves."""
    by = best("elementwise", device, dtype)
    if by == TRITON:
        return cast("Elementwise", import_module(".triton_elementwise", __package__))
    return None if by == TORCH else elementwise


class TritonExperts(Protocol):
    """See ``triton_experts.py``."""

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
    ) -> tuple[Tensor, Tensor]:
        """Ids and weights of the chosen experts."""
        ...

    def sort_rows(self, x: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sorted by expert, where each went, and the end of each expert's."""
        ...

    def combine(self, y: Tensor, places: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
        """Each token's weighted sum."""
        ...


def triton_experts_for(device: torch.device, dtype: torch.dtype) -> TritonExperts | None:
    """The module for tensors of ``dtype`` on ``device``. None: another one, or torch, serves."""
    if best("experts", device, dtype) != TRITON:
        return None
    return cast("TritonExperts", import_module(".triton_experts", __package__))


class Latents(Protocol):
    """What rotates queries and keys of latent attention."""

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
    ) -> None:
        """Rotated queries, and keys, of latent attention."""
        ...


class Rotations(Latents, Protocol):
    """What only Triton's module computes, too: on the CPU angles come from a table."""

    def angles(
        self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of a step's positions."""
        ...


def rotations_for(device: torch.device, dtype: torch.dtype) -> Rotations | None:
    """``triton_rotations.py`` where it serves tensors of ``dtype`` on ``device``. None: torch serves."""
    if best("elementwise", device, dtype) != TRITON:
        return None
    return cast("Rotations", import_module(".triton_rotations", __package__))


def latents_for(device: torch.device, dtype: torch.dtype) -> Latents | None:
    """The module that rotates latents of ``dtype`` on ``device``. None: torch serves."""
    by = best("elementwise", device, dtype)
    return rotations_for(device, dtype) if by == TRITON else None if by == TORCH else elementwise
