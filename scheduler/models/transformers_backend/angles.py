"""Cosines and sines of a recorded decoder, as a table over positions.

Invariant: a table is computed in blocks of one size, so no bit of a position's row depends on which others share a step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .recording import Value

_BLOCK = 1024
"""Positions that a table grows by."""


class Angles:
    """One rotation's."""

    def __init__(
        self, compute: Callable[..., Any], values: tuple[Value, ...] | list[Value], width: int, half: int
    ) -> None:
        """
        Args:
            compute: of positions [T] and T: cosines and sines, a row of ``width`` elements for each.
            values: which values of the recording these are.
            half: elements of a row that are taken, its first.
        """
        self._compute, self._values = compute, tuple(values)
        self.width, self.half = width, half
        self._table: tuple[Tensor, Tensor] | None = None

    def same(self, other: "Angles") -> bool:
        """Whether both are the same values of one recording."""
        return (self._values, self.half) == (other._values, other.half)

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """Of at least the positions [0, longest), each [P, 1, half], contiguous."""
        table = self._table
        while table is None or longest > table[0].shape[0]:
            start = 0 if table is None else table[0].shape[0]
            found = self._compute(torch.arange(start, start + _BLOCK), _BLOCK)
            block = [each.reshape(_BLOCK, self.width)[:, : self.half].unsqueeze(1) for each in found]
            if table is not None:
                block = [torch.cat(pair) for pair in zip(table, block, strict=True)]
            table = block[0].contiguous(), block[1].contiguous()
        self._table = table
        return table

    def of(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Of each token, int64 [T] below ``longest`` to [T, 1, half] each."""
        cosines, sines = self.table(longest)
        return cosines.index_select(0, positions), sines.index_select(0, positions)
