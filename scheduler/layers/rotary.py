"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864), half-rotation convention.

Invariants:
- Angles are fp32 products of position and inverse frequency; cosine and sine are rounded to the model's dtype, and are
  shared by all layers.
- On the CPU they come from a table, computed in blocks of one size as far as positions have gone: a vector library rounds
  the last elements of an array differently, and no bit may depend on which tokens share a step.
- Elsewhere they are computed for the step's positions: nothing that a captured graph could hold on to, or a release lose.

The Llama-3 frequency scaling is that of Meta's llama-models, as in transformers' ``rope_type: llama3``.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .parameters import Placement

_BLOCK = 1024
"""Positions that the table grows by."""


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """What a checkpoint says about its rotary embedding."""

    theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """linear, llama3: divisor of the (low) frequencies."""
    low_freq_factor: float = 1.0
    """llama3"""
    high_freq_factor: float = 4.0
    """llama3"""
    original_max_position_embeddings: int = 8192
    """llama3: context of the pre-training, in tokens."""


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2], in radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeParameters) -> Tensor:
    """Divide long wavelengths by ``factor``, keep short ones, interpolate in between."""
    context = rope.original_max_position_embeddings
    longest, shortest = context / rope.low_freq_factor, context / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, scaled)


class RotaryEmbedding:
    """Cosines and sines of a step's positions."""

    def __init__(self, rope: RopeParameters, head_dim: int, *, place: Placement) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(place.device)
        self._dtype = place.dtype
        self._table: tuple[Tensor, Tensor] | None = None
        if place.device.type == "cpu":
            self._table = self._compute(torch.arange(_BLOCK))

    def forward(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """int64 [T], all below ``longest``, to cosine and sine, each [T, 1, head_dim / 2] in the model's dtype."""
        if self._table is None:
            return self._compute(positions)
        while longest > len(self._table[0]):
            start = len(self._table[0])
            block = self._compute(torch.arange(start, start + _BLOCK))
            self._table = (torch.cat((self._table[0], block[0])), torch.cat((self._table[1], block[1])))
        cosines, sines = self._table
        return cosines.index_select(0, positions), sines.index_select(0, positions)

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.float(), self._inverse_frequencies).unsqueeze(1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of ``x`` [T, heads, head_dim] by its token's angles; fresh memory."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
