"""Token embeddings and the output head, which may share a table.

Invariants:
- A tied head is the same storage with one owner, the embedding; an update moves both. If it is quantised, it
  is a copy that is written with the table.
- Each rank has a range of the vocabulary, the last one the rest. An embedding is exact: the others add zeros.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .linear import divided
from .matrix import Matrix, scaled_matrix
from .parameters import Parameter, Placement, WeightSlot
from .sharding import Window, require_borders, rounded_up, sharded

if TYPE_CHECKING:
    from .lora import LinearAdapters
    from .scaled_blocks import ScaledMatrix

HEAD, TIED = "lm_head", "model.embed_tokens.weight"
"""The output head's module in adapters, and the weight of a tied one."""


class TiedSlot(WeightSlot):
    """A table [vocab, hidden] and its copy, a quantised head."""

    __slots__ = ("_head", "_table")

    def __init__(self, table: WeightSlot, head: WeightSlot) -> None:
        super().__init__(table.name, table.parameter, table.shape, table.dtype)
        self._table, self._head = table, head

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        changed = self._table.update(rows, start, compare=compare)
        if changed or not rows.any():  # memory begins as zeros, and a head's scales of zeros are ones
            self._head.write(rows.to(self.dtype), start)
        return changed

    def write(self, rows: Tensor, start: int) -> None:
        self.update(rows, start, compare=False)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._table.read(start, stop)


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
        self._blocks = blocks = place.blocks if projects else None
        rows = self._window.length
        self._table: Matrix | None = None
        self._head: Matrix | ScaledMatrix
        if blocks is None or not blocks.converts(HEAD):
            self._head = self._table = Matrix(f"{name}.weight", rows, hidden_size, place, packed=projects)
        else:
            if checkpoint != HEAD:
                self._table = Matrix(f"{name}.weight", rows, hidden_size, place, packed=False)
            require_borders(HEAD, "rows", self._window, blocks.rows)
            self._head = scaled_matrix(f"{HEAD}.weight", [rows], hidden_size, blocks, place)
        self._parallel = place.parallel
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._adapters: LinearAdapters | None = None
        if projects and place.adapters is not None:
            self._adapters = place.adapters.of(HEAD, {HEAD: [self._window]}, Window.whole(hidden_size), place)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [S, hidden] times this rank's rows of the table to ``out`` and return it."""
        self._head.product(x, None, out)
        if self._adapters is not None:
            self._adapters.add(x, out)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [T] to [T, hidden]: fresh memory, which the caller may overwrite."""
        rows = self._rows(ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _rows(self, ids: Tensor) -> Tensor:
        assert self._table is not None, "nothing but a head"
        if self._parallel.size == 1:
            return self._table.gather(ids)
        own = ids - self._window.start
        others = (own < 0) | (own >= self._window.length)
        rows = self._table.gather(own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0)
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
            slot = TiedSlot(slot, next(head.slots(HEAD, 0, self._window.length)))
        yield sharded(slot, self._window)

    def parameters(self) -> Iterator[Parameter]:
        if self._table is not None:
            yield self._table.parameter
        if self._head is not self._table:
            yield from self._head.parameters()
