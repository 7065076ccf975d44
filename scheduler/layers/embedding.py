"""Token embeddings and the output head, which may share a table.

Invariants:
- A tied head is the same storage with one owner, the embedding; an update moves both. If it is quantised, it
  is a copy that is written with the table.
- Each rank has a range of the vocabulary, the last one the rest. An embedding is exact: the others add zeros.
- Ranks with rows of their own get the embeddings of these alone; a head takes the rows of all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .linear import divided
from .matrix import Matrix, scaled_matrix
from .parameters import Parameter, Place, Placement, WeightSlot
from .scaled_blocks import ScaledMatrix, ScaledSlot
from .sharding import Window, require_borders, rounded_up, sharded

if TYPE_CHECKING:
    from .lora import LinearAdapters

HEAD, TIED = "lm_head", "model.embed_tokens.weight"
"""The output head's module in adapters, and the weight of a tied one."""


class TiedSlot(WeightSlot):
    """A table [vocab, hidden] and its copy, a quantised head."""

    __slots__ = ("_head", "_table")

    def __init__(self, table: WeightSlot, head: ScaledSlot) -> None:
        super().__init__(table.name, table.parameter, table.shape, table.dtype)
        self._table, self._head = table, head

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        # Compared both: one may have been written by an update that failed before the other.
        changed = self._table.update(rows, start, compare=compare)
        return self._head.update(rows.to(self.dtype), start, compare=compare) or changed

    def write(self, rows: Tensor, start: int) -> None:
        self.update(rows, start, compare=False)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._table.read(start, stop)

    def places(self, positions: Tensor) -> Iterator[Place]:
        for place in self._table.places(positions):
            yield place._replace(follows=partial(self._head.changed_blocks, self._table, positions))


class Embedding:
    """A table [vocab, hidden] of embeddings, of the output head or of both; this rank has some rows."""

    def __init__(
        self,
        name: str,
        checkpoint: str,
        vocab_size: int,
        hidden_size: int,
        *,
        projects: bool,
        scale: float = 1.0,
        place: Placement,
    ) -> None:
        """Refuse a vocabulary too small for every rank to have some of it (UNSUPPORTED_MODEL).

        ``projects``: it is a head. ``scale``: factor of embeddings, rounded to the model's dtype before; the
        head is not scaled.
        """
        self._checkpoint = checkpoint
        self._window, self._hidden = rounded_up(vocab_size, place.parallel, "vocab_size"), hidden_size
        self._blocks = blocks = place.blocks.of_head if projects and place.blocks is not None else None
        rows = self._window.length
        self._table: Matrix | None = None
        self._head: Matrix | ScaledMatrix
        if blocks is None or not blocks.converts(HEAD):
            self._head = self._table = Matrix(f"{name}.weight", rows, hidden_size, place, packed=projects)
        else:
            if checkpoint != HEAD:
                self._table = Matrix(f"{name}.weight", rows, hidden_size, place, packed=False)
            require_borders(HEAD, "rows", self._window, blocks.rows)
            if self._table is not None:  # which has the values before
                blocks = replace(blocks, keeps_originals=False)
            self._head = scaled_matrix(f"{HEAD}.weight", [rows], hidden_size, blocks, place)
        self._parallel, self._rank_rows = place.parallel, place.rank_rows
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._adapters: LinearAdapters | None = None
        if projects and place.adapters is not None:
            self._adapters = place.adapters.of(HEAD, {HEAD: [self._window]}, Window.whole(hidden_size), place)

    @property
    def table(self) -> Matrix | None:
        """Rows that a kernel may gather, or None if ranks divide or a factor changes them."""
        return self._table if self._parallel.size == 1 and self._scale == 1.0 else None

    @property
    def head(self) -> Matrix | ScaledMatrix | None:
        """Weight of the whole head, without adapters; None if ranks divide it."""
        return self._head if self._parallel.size == 1 else None

    def is_adapted(self, slots: Sequence[int]) -> bool:
        """Return True if an adapter in one of ``slots`` changes the head."""
        return self._adapters is not None and self._adapters.changed_by(slots)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [S, hidden] times this rank's rows of the table to ``out`` and return it."""
        self._head.product(x, None, out)
        if self._adapters is not None:
            self._adapters.add(x, out)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [T] to [T, hidden], or this rank's rows of it; the caller may overwrite them."""
        rows = self._rows(ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _rows(self, ids: Tensor) -> Tensor:
        assert self._table is not None, "nothing but a head"
        if self._parallel.size == 1:
            return self._table.gather(ids)
        own = (ids if self._rank_rows is None else self._rank_rows.by_rank(ids)) - self._window.start
        others = (own < 0) | (own >= self._window.length)
        rows = self._table.gather(own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0)
        if self._rank_rows is not None:
            return self._rank_rows.reduce_scatter(rows)
        self._parallel.all_reduce(rows)
        return rows

    def slots(self) -> Iterator[WeightSlot]:
        head, table = self._head, self._table
        if table is None:
            slots = head.slots(self._checkpoint, 0, self._window.length)
            yield from divided(slots, self._window, Window.whole(self._hidden), self._blocks)
            return
        slot = table.slot(f"{self._checkpoint}.weight")
        if head is not table:
            quantized = next(head.slots(HEAD, 0, self._window.length))
            assert isinstance(quantized, ScaledSlot), "a head that is not the table is quantised"
            slot = TiedSlot(slot, quantized)
        yield sharded(slot, self._window)

    def parameters(self) -> Iterator[Parameter]:
        if self._table is not None:
            yield self._table.parameter
        if self._head is not self._table:
            yield from self._head.parameters()
