"""The gated delta rule over tokens of several sequences on the CPU, compiled (``cpu/delta.cpp``).

Invariants:
- Results are those of ``layers/gated_delta.py`` but for the order of sums and an exponential's last bit.
- A token's bits depend on that token and the state before it alone: on neither other sequences nor chunking.
- ValueError is raised for whatever the kernel would misread.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.pool import StateShape
from . import TORCH, best, native
from .native import FLOAT, INT, POINTER, SIZE, DeltaArguments

LARGEST_HEAD = 256

_STEP = native.by_dtype(
    "caesura_delta_step",
    *(POINTER, POINTER),  # sizes and states, x
    *(POINTER, POINTER, POINTER, POINTER, FLOAT),  # filters, rates, their biases, norm
    *(POINTER, POINTER, POINTER, INT),  # past, recurrent, out, threads
)

NO_STATE = -1


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens of a step and the states that they begin and end in; a sequence's segments are consecutive."""

    table: Tensor
    """Int64 [segments, 5]: first token, tokens, rows of states (NO_STATE: none): begin, end, end's copy."""
    chains: Tensor
    """int64 [sequences + 1]: the first segment of each sequence, then their number."""

    def fits(self) -> bool:
        count = self.table.shape[0]
        return (
            self.table.dtype == self.chains.dtype == torch.int64
            and self.table.shape == (count, 5)
            and self.table.is_contiguous()
            and self.chains.dim() == 1
            and len(self.chains) > 0
            and self.chains.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class PlannedStates:
    """States of a planned step, for a kernel that computes whole layers."""

    segments: Segments
    layer: Callable[[int], tuple[Tensor, Tensor]]
    """Return past and recurrent states of a layer, counted among those with states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPlaces:
    """Places of the first key head in a layer's first product, and the stride to the next.

    Value heads of a key head are neighbours in ``value``, ``gate``, ``b`` and ``a``.
    """

    width: int
    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    gate: tuple[int, int]
    b: tuple[int, int]
    a: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaWeights:
    """A layer's parameters besides its products."""

    filters: Tensor
    """[kernel, channels]: filters of the convolution."""
    log_rate: Tensor
    """[value heads], as is the next."""
    rate_bias: Tensor
    norm: Tensor
    """[value size]"""
    eps: float


class DeltaStep:
    def __init__(self, shape: StateShape, places: DeltaPlaces) -> None:
        self.shape, self.width = shape, places.width
        pairs = (places.query, places.key, places.value, places.gate, places.b, places.a)
        self._places = (SIZE * 12)(*(number for pair in pairs for number in pair))

    @property
    def values(self) -> int:
        return self.shape.value_heads * self.shape.value_size

    def arguments(self, segments: Segments) -> DeltaArguments:
        """Return the kernel's argument, which refers to this object and ``segments``, unchecked."""
        shape = self.shape
        return DeltaArguments(
            places=ctypes.addressof(self._places),
            segments=segments.table.data_ptr(),
            chains=segments.chains.data_ptr(),
            num_chains=len(segments.chains) - 1,
            width=self.width,
            key_heads=shape.key_heads,
            group=shape.value_heads // shape.key_heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            kernel=shape.kernel,
        )

    def takes(self, past: Tensor, recurrent: Tensor, dtype: torch.dtype) -> bool:
        """Return True if these are states of a layer that computes in ``dtype``."""
        return (
            (past.dtype, past.shape[1:]) == (dtype, self.shape.past)
            and (recurrent.dtype, recurrent.shape) == (torch.float32, (len(past), *self.shape.recurrent))
            and past.is_contiguous()
            and recurrent.is_contiguous()
        )

    def run(
        self,
        x: Tensor,
        weights: DeltaWeights,
        segments: Segments,
        past: Tensor,
        recurrent: Tensor,
        out: Tensor,
    ) -> None:
        """Advance each sequence's state, and write what its tokens' queries find, normalised and gated.

        Args:
            x: [T, places.width], contiguous; rows in ``segments`` are not checked.
            past: [states, kernel - 1, channels], overwritten.
            recurrent: float32 [states, value heads, key size, value size], likewise.
            out: [T, value heads * value size], contiguous.
        """
        filters = weights.filters
        if not (segments.fits() and self._fits(x, weights, past, recurrent, out)):
            tensors = (
                *(x, filters, weights.log_rate, weights.rate_bias, weights.norm),
                *(segments.table, segments.chains, past, recurrent, out),
            )
            raise native.misfit("no step of the delta rule", *tensors)
        _STEP[x.dtype](
            *(ctypes.byref(self.arguments(segments)), x.data_ptr()),
            *(filters.data_ptr(), weights.log_rate.data_ptr(), weights.rate_bias.data_ptr()),
            *(weights.norm.data_ptr(), weights.eps),
            *(past.data_ptr(), recurrent.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )

    def _fits(self, x: Tensor, weights: DeltaWeights, past: Tensor, recurrent: Tensor, out: Tensor) -> bool:
        shape, rows = self.shape, x.shape[0]
        parts = (
            (weights.filters, (shape.kernel, shape.channels)),
            (weights.log_rate, (shape.value_heads,)),
            (weights.rate_bias, (shape.value_heads,)),
            (weights.norm, (shape.value_size,)),
            (out, (rows, self.values)),
            (x, (rows, self.width)),
        )
        return (
            x.dtype in native.FLOATS
            and all(
                each.dtype == x.dtype and each.shape == size and each.is_contiguous() for each, size in parts
            )
            and self.takes(past, recurrent, x.dtype)
        )


def delta_for(
    device: torch.device, dtype: torch.dtype, shape: StateShape, places: DeltaPlaces
) -> DeltaStep | None:
    if best("linear_attention", device, dtype) == TORCH or not computable(shape):
        return None
    return DeltaStep(shape, places)


def computable(shape: StateShape) -> bool:
    return max(shape.key_size, shape.value_size) <= LARGEST_HEAD
