"""Token embeddings and the output head, which may share a table.

Invariants:
- A tied head is the same storage with one owner, the embedding; an update moves both.
- Each rank has a range of the vocabulary, the last one the rest. An embedding is exact: the others add zeros.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot
from .sharding import Window, rounded_up, sharded

if TYPE_CHECKING:
    from .lora import LinearAdapters

HEAD, TIED = "lm_head", "model.embed_tokens.weight"
"""The output head's module in adapters, and the weight of a tied one."""


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
        self._window = rounded_up(vocab_size, place.parallel, "vocab_size")
        self._weight = Matrix(f"{name}.weight", self._window.length, hidden_size, place, packed=projects)
        self._parallel = place.parallel
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._adapters: LinearAdapters | None = None
        if projects and place.adapters is not None:
            self._adapters = place.adapters.of(HEAD, {HEAD: [self._window]}, Window.whole(hidden_size), place)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [S, hidden] times this rank's rows of the table to ``out`` and return it."""
        self._weight.product(x, None, out)
        if self._adapters is not None:
            self._adapters.add(x, out)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [T] to [T, hidden]: fresh memory, which the caller may overwrite."""
        rows = self._rows(ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def _rows(self, ids: Tensor) -> Tensor:
        if self._parallel.size == 1:
            return self._weight.gather(ids)
        own = ids - self._window.start
        others = (own < 0) | (own >= self._window.length)
        rows = self._weight.gather(own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0)
        self._parallel.all_reduce(rows)
        return rows

    def slots(self) -> Iterator[WeightSlot]:
        yield sharded(self._weight.slot(f"{self._checkpoint}.weight"), self._window)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight.parameter
