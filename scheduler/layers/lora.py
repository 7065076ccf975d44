"""Low-rank adapters beside the products with weights (LoRA: Hu et al., 2021, arXiv:2106.09685).

Invariants:
- ``y += x @ A.T @ B.T`` for the rows of each adapter, B scaled; rows without one have the base's bits. Where
  products are packed, a row's bits do not depend on the rows beside it.
- Elsewhere every row is multiplied by the factors of all slots, and those of other slots count as zeros: what
  is launched depends on the number of rows alone, so graphs capture it.
- Memory of every slot is allocated once, for the largest rank; a smaller one is padded with zeros.
- A slot is written while no step reads it; whoever publishes it decides from when on one does.
- With several ranks, each has the rows of B or the columns of A that belong to its part of the weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import NO_ADAPTER
from ..kernels import linear as kernel
from ..memory.residency import nobody
from .matrix import Stored, packs
from .parameters import Parameter, Placement
from .sharding import Window


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's factors of an adapter, on the host in the checkpoint's layout."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank)."""


class AdapterRows:
    """The adapter slots of a product's rows: int64 [T], or NO_ADAPTER where a row has none."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots

    @cached_property
    def groups(self) -> list[tuple[int, Tensor | None]]:
        """Each slot with the indices (int64) of its rows, None if they are all; on the host."""
        of_rows = self.slots.numpy()
        used = np.unique(of_rows).tolist()
        if len(used) == 1 and used[0] != NO_ADAPTER:
            return [(used[0], None)]
        rows = ((slot, np.flatnonzero(of_rows == slot)) for slot in used if slot != NO_ADAPTER)
        return [(slot, torch.from_numpy(index)) for slot, index in rows]

    def chosen(self, count: int) -> Tensor:
        """Return [T, count, 1]: True for the slot of each row."""
        numbers = torch.arange(count, device=self.slots.device)
        return (self.slots.unsqueeze(1) == numbers).unsqueeze(2)


class _PackedMatrix(Stored):
    """One packed matrix [outputs, inputs] of each slot, and its products."""

    def __init__(self, name: str, outputs: int, inputs: int, slots: int, place: Placement) -> None:
        super().__init__(name, outputs, inputs, place, packed=True, count=slots)
        parts = self.parameter.data.chunk(slots)
        self.products = [kernel.Product(part, outputs, inputs, None, place.dtype) for part in parts]

    def write(self, slot: int, rows: Tensor) -> None:
        self.slot("", number=slot).write(rows, 0)


class _PlainMatrix:
    """One matrix of each slot, above each other or, as ``beside``, one beside the other."""

    def __init__(
        self, name: str, outputs: int, inputs: int, slots: int, place: Placement, *, beside: bool
    ) -> None:
        shape = (outputs, slots * inputs) if beside else (slots * outputs, inputs)
        self.data = Parameter(name, shape, place.dtype, place.device).data
        self._parts = self.data.chunk(slots, dim=int(beside))

    def write(self, slot: int, rows: Tensor) -> None:
        self._parts[slot].copy_(rows)


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
        a = f"{name}.lora_A", len(parts) * self._rank, columns.length, count, place
        b = [
            (f"{name}.lora_B.{part}", _length(rows), self._rank, count, place) for part, rows in parts.items()
        ]
        self._packed: tuple[_PackedMatrix, list[_PackedMatrix]] | None = None
        self._plain: tuple[_PlainMatrix, list[_PlainMatrix]] | None = None
        if packs(columns.length, place):
            self._packed = _PackedMatrix(*a), [_PackedMatrix(*each) for each in b]
        else:
            self._plain = _PlainMatrix(*a, beside=False), [_PlainMatrix(*each, beside=True) for each in b]
        self._changes = [False] * count

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each module with the (outputs, inputs) of its whole weight."""
        for part, rows in self._parts.items():
            yield part, (rows[0].total, self._columns.total)

    def changed_by(self, slots: Sequence[int]) -> bool:
        return any(self._changes[slot] for slot in slots)

    @property
    def packed(self) -> list[Tensor] | None:
        """Packed A and each packed B, of all slots; None if they are stored otherwise."""
        if self._packed is None:
            return None
        shrink, expand = self._packed
        return [each.parameter.data for each in (shrink, *expand)]

    @property
    def _matrices(self) -> tuple[_PackedMatrix | _PlainMatrix, Sequence[_PackedMatrix | _PlainMatrix]]:
        if self._packed is not None:
            return self._packed
        assert self._plain is not None, "they are stored one way or the other"
        return self._plain

    def write(self, slot: int, factors: Mapping[str, Factors]) -> None:
        before, rank = self._changes[slot], self._rank
        self._changes[slot] = any(part in factors for part in self._parts)
        if not (before or self._changes[slot]):
            return
        a = torch.zeros(len(self._parts) * rank, self._columns.length)
        shrink, expands = self._matrices
        parts = zip(self._parts.items(), expands, strict=True)
        for number, ((part, windows), expand) in enumerate(parts):
            b = torch.zeros(_length(windows), rank)
            if part in factors:
                given = factors[part]
                own = given.a[:, self._columns.start : self._columns.stop]
                a[number * rank : number * rank + len(own)] = own
                rows = torch.cat([given.b[window.start : window.stop] for window in windows])
                b[:, : rows.shape[1]] = rows.float() * given.scale
            expand.write(slot, b)
        shrink.write(slot, a)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the adapters' part of the product of ``x`` [T, inputs] to ``out`` [T, outputs]."""
        rows = self._slots.rows
        if rows is None:
            return
        if self._packed is not None:
            self._add_packed(rows, x, out, *self._packed)
        elif self._plain is not None:
            shrink, expand = self._plain
            chosen, sizes = rows.chosen(self._slots.count), (self._slots.count, len(expand), self._rank)
            shrunk = (x @ shrink.data.t()).unflatten(1, sizes).masked_fill(~chosen.unsqueeze(3), 0)
            parts = out.split([len(each.data) for each in expand], dim=1)
            for part, factors, each in zip(parts, shrunk.unbind(2), expand, strict=True):
                part.addmm_(factors.flatten(1), each.data.t())

    def _add_packed(
        self, rows: AdapterRows, x: Tensor, out: Tensor, shrink: _PackedMatrix, expand: list[_PackedMatrix]
    ) -> None:
        for slot, tokens in rows.groups:
            if not self._changes[slot]:
                continue
            shrunk = shrink.products[slot](x if tokens is None else x.index_select(0, tokens))
            factors = shrunk.split(self._rank, dim=1)
            changes = [each.products[slot](part) for each, part in zip(expand, factors, strict=True)]
            change = torch.cat(changes, dim=1) if len(changes) > 1 else changes[0]
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
        self.rows: AdapterRows | None = None
        """Adapters of the rows that are computed, or None if none has one; set by the runner."""
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
