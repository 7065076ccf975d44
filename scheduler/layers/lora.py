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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import NO_ADAPTER
from ..kernels import experts as grouped
from ..kernels import linear as kernel
from ..memory.residency import nobody
from .experts import ExpertMatrix, ExpertModules, sort_by_expert
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
        if all(map(_length, parts.values())) and packs(columns.length, place):
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
        before = self._changes[slot]
        self._changes[slot] = any(part in factors for part in self._parts)
        if not (before or self._changes[slot]):
            return
        shrink, expands = self._matrices
        given = [(factors.get(part), windows) for part, windows in self._parts.items()]
        a, b = _own(given, self._columns, self._rank)
        shrink.write(slot, a)
        for expand, rows in zip(expands, b, strict=True):
            expand.write(slot, rows)

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


def _own(
    given: Sequence[tuple[Factors | None, Sequence[Window]]], columns: Window, rank: int
) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's part of all modules' A, one below the other, and of each B, scaled."""
    a, b = torch.zeros(len(given) * rank, columns.length), []
    for number, (factors, windows) in enumerate(given):
        b.append(torch.zeros(_length(windows), rank))
        if factors is not None:
            own = factors.a[:, columns.start : columns.stop]
            a[number * rank : number * rank + len(own)] = own
            rows = torch.cat([factors.b[window.start : window.stop] for window in windows])
            b[-1][:, : rows.shape[1]] = rows.float() * factors.scale
    return a, b


@dataclass(frozen=True, slots=True)
class AdaptedPairs:
    """Pairs of a token and an expert, sorted by the token's slot and the expert."""

    order: Tensor
    """int64: the place of each among the pairs that the experts compute."""
    groups: grouped.Groups | None = None
    """Groups for compiled kernels, of pairs with an adapter alone."""
    ends: Tensor | None = None
    """int32: the end of each group otherwise; pairs without an adapter are in groups of slot 0."""
    without: Tensor | None = None
    """bool [pairs, 1]: True for these, as they are sorted."""


class ExpertAdapters:
    """The adapters of one product of routed experts: a factor A and a B of each for every slot and expert."""

    def __init__(
        self,
        slots: "AdapterSlots",
        name: str,
        modules: ExpertModules,
        parts: Sequence[str],
        windows: tuple[Window, Window],
        place: Placement,
        *,
        packed: bool,
    ) -> None:
        """``windows``: rows of each part, and columns."""
        self._slots, self._modules, self._parts = slots, modules, parts
        self._rows, self._columns = windows
        self._rank, count = slots.width, slots.count * len(modules.held)
        shape = len(parts) * self._rank, self._columns.length
        self._shrink = ExpertMatrix(f"{name}.lora_A", count, *shape, place, packed=packed)
        shape = self._rows.length, self._rank
        self._expand = [
            ExpertMatrix(f"{name}.lora_B.{part}", count, *shape, place, packed=packed) for part in parts
        ]
        self._changes = [False] * slots.count

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for expert in range(self._modules.count):
            for part in self._parts:
                yield self._modules.name(expert, part), (self._rows.total, self._columns.total)

    def changed_by(self, slots: Sequence[int]) -> bool:
        return any(self._changes[slot] for slot in slots)

    def write(self, slot: int, factors: Mapping[str, Factors]) -> None:
        before = self._changes[slot]
        self._changes[slot] = any(name in factors for name, _ in self.shapes())
        if not (before or self._changes[slot]):
            return
        for number, expert in enumerate(self._modules.held, slot * len(self._modules.held)):
            names = [self._modules.name(expert, part) for part in self._parts]
            given = [(factors.get(name), [self._rows]) for name in names]
            a, b = _own(given, self._columns, self._rank)
            for matrix, rows in zip((self._shrink, *self._expand), (a, *b), strict=True):
                matrix.slot("", number=number).write(rows, 0)

    def add(self, x: Tensor, out: Tensor, pairs: AdaptedPairs) -> None:
        """Add to ``out`` [pairs, outputs] what adapters change of the product of ``x`` [pairs, inputs]."""
        rows = x.index_select(0, pairs.order)
        shrunk = self._product(self._shrink, rows, pairs)
        if pairs.without is not None:
            shrunk.masked_fill_(pairs.without, 0)
        factors = shrunk.split(self._rank, dim=1)
        changes = [
            self._product(matrix, part.contiguous(), pairs)
            for matrix, part in zip(self._expand, factors, strict=True)
        ]
        out.index_add_(0, pairs.order, torch.cat(changes, dim=1) if len(changes) > 1 else changes[0])

    def _product(self, matrix: ExpertMatrix, x: Tensor, pairs: AdaptedPairs) -> Tensor:
        if pairs.groups is not None:
            return matrix.packed_product(x, pairs.groups, x.new_empty(len(x), matrix.outputs))
        assert pairs.ends is not None, "pairs are sorted for one of both"
        return matrix.plain_product(x, pairs.ends)


def _length(rows: Sequence[Window]) -> int:
    return sum(window.length for window in rows)


class AdapterSlots:
    """The adapter slots of one model, which its products find through their placement."""

    def __init__(
        self,
        count: int,
        max_rank: int,
        *,
        experts: bool = False,
        memory: Callable[[], AbstractContextManager[None]] = nobody,
    ) -> None:
        """``experts``: take memory for routed experts, too. Inside of ``memory()`` it is allocated."""
        self.count, self.max_rank, self._with_experts = count, max_rank, experts
        self._memory = memory
        self.width = -(-max_rank // _RANKS) * _RANKS
        """Ranks that a slot has memory for."""
        self.rows: AdapterRows | None = None
        """Adapters of the rows that are computed, or None if none has one; set by the runner."""
        self.products: list[LinearAdapters | ExpertAdapters] = []
        self.experts: dict[str, ExpertModules] = {}
        """Routed experts that have memory for adapters, by the module that holds them."""

    def of(
        self, name: str, parts: Mapping[str, Sequence[Window]], columns: Window, place: Placement
    ) -> LinearAdapters:
        with self._memory():
            made = LinearAdapters(self, name, parts, columns, place)
        self.products.append(made)
        return made

    def of_experts(
        self, name: str, modules: ExpertModules, width: Window, place: Placement, *, packed: bool
    ) -> tuple[ExpertAdapters, ExpertAdapters] | None:
        """Return the adapters of both products of a layer's experts, or None without memory for them."""
        if not self._with_experts:
            return None
        hidden = Window.whole(modules.hidden)
        with self._memory():
            gate_up, down = (
                ExpertAdapters(self, f"{name}.{part}", modules, parts, windows, place, packed=packed)
                for part, parts, windows in (
                    ("gate_up", (modules.names.gate, modules.names.up), (width, hidden)),
                    ("down", (modules.names.down,), (hidden, width)),
                )
            )
        self.products += [gate_up, down]
        self.experts[modules.prefix] = modules
        return gate_up, down

    def pairs(
        self, tokens: Tensor, experts: Tensor, count: int, adapters: Sequence[ExpertAdapters], *, packed: bool
    ) -> AdaptedPairs | None:
        """Sort pairs of int64 ``tokens`` and ``experts``, of ``count``; None if no adapter changes any.

        Unless ``packed``, pairs of higher experts have no adapter.
        """
        if self.rows is None:
            return None
        if not packed:
            slots = self.rows.slots.index_select(0, tokens)
            key = slots.clamp_min(0) * count + experts.clamp_max(count - 1)
            order, _, ends = sort_by_expert(key.unsqueeze(1), self.count * count)
            without = ((slots == NO_ADAPTER) | (experts >= count)).index_select(0, order).unsqueeze(1)
            return AdaptedPairs(order, ends=ends, without=without)
        used = [slot for slot, _ in self.rows.groups]
        if not any(each.changed_by(used) for each in adapters):
            return None
        slots = self.rows.slots.index_select(0, tokens)
        (chosen,) = torch.where(slots != NO_ADAPTER)
        key = slots[chosen] * count + experts[chosen]
        groups = grouped.group(key.unsqueeze(1), self.count * count)
        return AdaptedPairs(chosen[groups.tokens], groups)

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
