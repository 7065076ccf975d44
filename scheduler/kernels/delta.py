"""The gated delta rule over tokens of several sequences on the CPU, compiled (``cpu/delta.cpp``).

Invariants:
- Results are those of ``layers/gated_delta.py`` but for the order of sums and an exponential's last bit.
- A token's bits depend on that token and the state before it alone: on neither other sequences nor chunking.
- ValueError is raised for whatever the kernel would misread.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.pool import StateShape
from . import TORCH, best, native
from .native import FLOAT, INT, POINTER, SIZE

LARGEST_HEAD = 256

_STEP = native.by_dtype(
    "caesura_delta_step",
    *(POINTER, SIZE, POINTER),  # x, stride of a row, places
    *(POINTER, POINTER, SIZE),  # segments, chains, number of these
    *(SIZE, SIZE, SIZE, SIZE, SIZE),  # key heads, value heads of each, key size, value size, kernel
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
    """[channels, 1, kernel]: filters of the convolution."""
    log_rate: Tensor
    """[value heads], as is the next."""
    rate_bias: Tensor
    norm: Tensor
    """[value size]"""
    eps: float


class DeltaStep:
    def __init__(self, shape: StateShape, places: DeltaPlaces) -> None:
        self._shape, self._width = shape, places.width
        pairs = (places.query, places.key, places.value, places.gate, places.b, places.a)
        self._places = (SIZE * 12)(*(number for pair in pairs for number in pair))
        self._address = ctypes.addressof(self._places)

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
            x: [T, places.width], elements of a row contiguous; ``segments`` is not checked.
            past: [states, kernel - 1, channels], overwritten.
            recurrent: float32 [states, value heads, key size, value size], likewise.
            out: [T, value heads * value size], contiguous.
        """
        shape, filters = self._shape, weights.filters
        if not (segments.fits() and self._fits(x, weights, past, recurrent, out)):
            tensors = (
                *(x, filters, weights.log_rate, weights.rate_bias, weights.norm),
                *(segments.table, segments.chains, past, recurrent, out),
            )
            raise native.misfit("no step of the delta rule", *tensors)
        _STEP[x.dtype](
            *(x.data_ptr(), x.stride(0), self._address),
            *(segments.table.data_ptr(), segments.chains.data_ptr(), len(segments.chains) - 1),
            *(shape.key_heads, shape.value_heads // shape.key_heads),
            *(shape.key_size, shape.value_size, shape.kernel),
            *(filters.data_ptr(), weights.log_rate.data_ptr(), weights.rate_bias.data_ptr()),
            *(weights.norm.data_ptr(), weights.eps),
            *(past.data_ptr(), recurrent.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )

    def _fits(self, x: Tensor, weights: DeltaWeights, past: Tensor, recurrent: Tensor, out: Tensor) -> bool:
        shape, rows, values = self._shape, x.shape[0], self._shape.value_heads * self._shape.value_size
        parts = (
            (weights.filters, (shape.channels, 1, shape.kernel)),
            (weights.log_rate, (shape.value_heads,)),
            (weights.rate_bias, (shape.value_heads,)),
            (weights.norm, (shape.value_size,)),
            (past, (past.shape[0], *shape.past)),
            (out, (rows, values)),
        )
        return (
            x.dtype in native.FLOATS
            and x.shape == (rows, self._width)
            and x.stride(1) == 1
            and all(
                each.dtype == x.dtype and each.shape == size and each.is_contiguous() for each, size in parts
            )
            and (recurrent.dtype, recurrent.shape) == (torch.float32, (past.shape[0], *shape.recurrent))
            and recurrent.is_contiguous()
        )


def delta_for(
    device: torch.device, dtype: torch.dtype, shape: StateShape, places: DeltaPlaces
) -> DeltaStep | None:
    if best("linear_attention", device, dtype) == TORCH or not computable(shape):
        return None
    return DeltaStep(shape, places)


def computable(shape: StateShape) -> bool:
    return max(shape.key_size, shape.value_size) <= LARGEST_HEAD
