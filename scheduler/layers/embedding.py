"""Token embeddings and the output head, which may share a table.

Invariants:
- A tied head is the same storage with one owner, the embedding; an update cannot move one without the other.
- With several ranks each has a range of the vocabulary, the last one the rest. An embedding is the sum of one
  rank's row and the others' zeros, so exact.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot
from .sharding import rounded_up, sharded


class Embedding:
    """A [vocab, hidden] table."""

    def __init__(
        self,
        name: str,
        checkpoint: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        scale: float = 1.0,
        place: Placement,
    ) -> None:
        """Args:
            tied: the table is the output head, too.
            scale: factor of embeddings, rounded to the model's dtype before; the head is not scaled.

        Raises:
            CaesuraError: UNSUPPORTED_MODEL, the vocabulary is too small for every rank to have some of it.
        """
        self._checkpoint, self._parallel = checkpoint, place.parallel
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._window = rounded_up(vocab_size, place.parallel, "vocab_size")
        self._weight = Matrix(f"{name}.weight", self._window.length, hidden_size, place, packed=tied)

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

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [S, hidden] times this rank's rows of the table to ``out`` and return it."""
        return self._weight.product(x, None, out)

    def read(self) -> Tensor:
        return self._weight.read()

    def slots(self) -> Iterator[WeightSlot]:
        yield sharded(self._weight.slot(f"{self._checkpoint}.weight"), self._window)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight.parameter


class OutputHead:
    """Output head with a table [vocab, hidden] of its own."""

    def __init__(
        self, name: str, checkpoint: str, vocab_size: int, hidden_size: int, *, place: Placement
    ) -> None:
        self._checkpoint = checkpoint
        self._window = rounded_up(vocab_size, place.parallel, "vocab_size")
        self._weight = Matrix(f"{name}.weight", self._window.length, hidden_size, place)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """Write [S, hidden] times this rank's rows of the table to ``out`` and return it."""
        return self._weight.product(x, None, out)

    def slots(self) -> Iterator[WeightSlot]:
        yield sharded(self._weight.slot(f"{self._checkpoint}.weight"), self._window)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight.parameter
