"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864), half-rotation and interleaved conventions.

Invariants:
- Angles are fp32 products of position and inverse frequency; cosine and sine are rounded to the model's
  dtype, and are shared by all layers.
- On the CPU they come from a table, computed in blocks of one size: a vector library rounds the last elements
  of an array differently, and no bit may depend on which tokens share a step.
- Elsewhere they are computed for the step's positions: captured graphs and releases find no state.

Llama-3's scaling is that of Meta's llama-models (``rope_type: llama3``); YaRN: Peng et al., 2023
(arXiv:2309.00071), sections 3.2 to 3.4.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import triton_for
from .parameters import Placement

_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    """linear, llama3, yarn: divisor of the (low) frequencies."""
    low_freq_factor: float = 1.0
    """llama3"""
    high_freq_factor: float = 4.0
    """llama3"""
    original_max_position_embeddings: int = 8192
    """llama3, yarn: context of the pre-training, in tokens."""
    beta_fast: float = 32.0
    """yarn: frequencies with more turns than this over the pre-training's context are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer turns are divided by ``factor``."""
    truncate: bool = True
    """yarn: the dimensions where the division begins and ends are whole numbers."""
    attention_factor: float = 1.0
    """yarn: factor of cosines and sines."""


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """Return fp32 [head_dim / 2], in radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope)
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


def _yarn(frequencies: Tensor, rope: RopeParameters) -> Tensor:
    """Keep frequencies of many turns, divide those of few, and interpolate by dimension."""
    size = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / ((last - first) or 0.001)
    divided = ramp.clamp(0, 1)
    return frequencies / rope.factor * divided + frequencies * (1 - divided)


class RotaryEmbedding:
    def __init__(self, rope: RopeParameters, head_dim: int, *, place: Placement) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(place.device)
        self._factor = rope.attention_factor
        self._dtype = place.dtype
        self._kernels = triton_for("elementwise", place.device, place.dtype)
        self._table: tuple[Tensor, Tensor] | None = None
        if place.device.type == "cpu":
            self._table = self._compute(torch.arange(_BLOCK))

    def forward(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Map int64 [T], all below ``longest``, to cosine and sine, each [T, 1, head_dim / 2]."""
        if self._kernels is not None:
            angles: tuple[Tensor, Tensor] = self._kernels.angles(
                positions, self._inverse_frequencies, self._factor, self._dtype
            )
            return angles
        if self._table is None:
            return self._compute(positions)
        cosines, sines = self.table(longest)
        return cosines.index_select(0, positions), sines.index_select(0, positions)

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of at least [0, longest), each [P, 1, head_dim / 2]; on the CPU."""
        assert self._table is not None
        while longest > len(self._table[0]):
            start = len(self._table[0])
            block = self._compute(torch.arange(start, start + _BLOCK))
            self._table = (torch.cat((self._table[0], block[0])), torch.cat((self._table[1], block[1])))
        return self._table

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.float(), self._inverse_frequencies).unsqueeze(1)
        cosines, sines = (x.mul_(self._factor).to(self._dtype) for x in (angles.cos(), angles.sin()))
        return cosines, sines


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each head of ``x`` [T, heads, head_dim] by its token's angles [T, 1, rotated / 2]; fresh memory.

    A pair is (i, i + rotated / 2), or (2 i, 2 i + 1) if ``interleaved``; the result has the former order,
    which leaves scalar products as they are. Elements behind ``rotated`` stay.
    """
    half = cos.shape[-1]
    turned = x[..., : 2 * half]
    first, second = (
        (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
