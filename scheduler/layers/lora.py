"""Low-rank adapters beside the products with weights (LoRA: Hu et al., 2021, arXiv:2106.09685).

Invariants:
- ``y += x @ A.T @ B.T`` for the rows of each adapter, B scaled; rows without one have the base's bits. Where
  products are packed, a row's bits do not depend on the rows beside it.
- Memory of every slot is allocated once, for the largest rank; a smaller one is padded with zeros.
- A slot is written while no step reads it; whoever publishes it decides from when on one does.
- With several ranks, each has the rows of B or the columns of A that belong to its part of the weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import linear as kernel
from ..memory.residency import nobody
from .matrix import Stored, packs
from .parameters import Placement
from .sharding import Window

if TYPE_CHECKING:
    from ..execution.forward import AdapterRows


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's factors of an adapter, on the host in the checkpoint's layout."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank)."""


class _SlotMatrix(Stored):
    """One matrix [outputs, inputs] of each slot, and its products."""

    def __init__(self, name: str, outputs: int, inputs: int, slots: int, place: Placement) -> None:
        super().__init__(name, outputs, inputs, place, packed=packs(inputs, place), count=slots)
        self._products: list[kernel.Product] = []
        if self.packed is not None:
            height = len(self.packed) // slots
            parts = self.packed.split(height)
            self._products = [kernel.Product(part, outputs, inputs, None, place.dtype) for part in parts]

    def write(self, slot: int, rows: Tensor) -> None:
        self.slot("", number=slot).write(rows, 0)

    def product(self, slot: int, x: Tensor) -> Tensor:
        if self._products:
            return self._products[slot](x)
        return functional.linear(x, self.parameter.data[slot])


class LinearAdapters:
    """The adapters of one product, whose modules share an input: a factor A of all of them, a B of each."""

    def __init__(
        self,
        slots: "AdapterSlots",
        name: str,
        parts: Mapping[str, Sequence[Window]],
        columns: Window,
        place: Placement,
    ) -> None:
        self._slots, self._columns, self._parts = slots, columns, parts
        count, self._rank = slots.count, slots.width
        self._shrink = _SlotMatrix(f"{name}.lora_A", len(parts) * self._rank, columns.length, count, place)
        self._expand = [
            _SlotMatrix(f"{name}.lora_B.{part}", _length(rows), self._rank, count, place)
            for part, rows in parts.items()
        ]
        self._changes = [False] * count

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each module with the (outputs, inputs) of its whole weight."""
        for part, rows in self._parts.items():
            yield part, (rows[0].total, self._columns.total)

    def changed_by(self, slots: Sequence[int]) -> bool:
        return any(self._changes[slot] for slot in slots)

    @property
    def packed(self) -> list[Tensor] | None:
        """Packed A and each packed B, of all slots; None if one is stored otherwise."""
        matrices = (self._shrink, *self._expand)
        found = [each.packed for each in matrices if each.packed is not None]
        return found if len(found) == len(matrices) else None

    def write(self, slot: int, factors: Mapping[str, Factors]) -> None:
        before, rank = self._changes[slot], self._rank
        self._changes[slot] = any(part in factors for part in self._parts)
        if not (before or self._changes[slot]):
            return
        a = torch.zeros(len(self._parts) * rank, self._columns.length)
        for number, ((part, windows), expand) in enumerate(
            zip(self._parts.items(), self._expand, strict=True)
        ):
            b = torch.zeros(_length(windows), rank)
            if part in factors:
                given = factors[part]
                own = given.a[:, self._columns.start : self._columns.stop]
                a[number * rank : number * rank + len(own)] = own
                rows = torch.cat([given.b[window.start : window.stop] for window in windows])
                b[:, : rows.shape[1]] = rows.float() * given.scale
            expand.write(slot, b)
        self._shrink.write(slot, a)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the adapters' part of the product of ``x`` [T, inputs] to ``out`` [T, outputs]."""
        for slot, tokens in self._slots.rows:
            if not self._changes[slot]:
                continue
            shrunk = self._shrink.product(slot, x if tokens is None else x.index_select(0, tokens))
            factors = shrunk.split(self._rank, dim=1)
            change = torch.cat(
                [expand.product(slot, factor) for expand, factor in zip(self._expand, factors, strict=True)],
                dim=1,
            )
            if tokens is None:
                out.add_(change)
            else:
                out.index_add_(0, tokens, change)


def _length(rows: Sequence[Window]) -> int:
    return sum(window.length for window in rows)


class AdapterSlots:
    """The adapter slots of one model, which its products find through their placement."""

    def __init__(self, count: int, max_rank: int) -> None:
        self.count, self.max_rank = count, max_rank
        self.width = -(-max_rank // _RANKS) * _RANKS
        """Ranks that a slot has memory for."""
        self.rows: AdapterRows = ()
        """Adapters of the step that is computed; set by the runner."""
        self.products: list[LinearAdapters] = []

    def of(
        self, name: str, parts: Mapping[str, Sequence[Window]], columns: Window, place: Placement
    ) -> LinearAdapters:
        with nobody():  # kept when the memory of the weights is released
            self.products.append(LinearAdapters(self, name, parts, columns, place))
        return self.products[-1]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each module that an adapter can change, by its checkpoint name."""
        return {part: shape for product in self.products for part, shape in product.shapes()}

    def write(self, slot: int, factors: Mapping[str, Factors]) -> Iterator[None]:
        """Write an adapter into a slot that no step reads, yielding between products."""
        for product in self.products:
            product.write(slot, factors)
            yield


_RANKS = 16
"""Ranks of which every dtype's rows are whole words of products (``kernels/linear.py``)."""
