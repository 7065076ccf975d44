"""Token embeddings and the output head, which may share a table.

Invariants:
- A tied head is the same storage with one owner, the embedding; an update cannot move one without the other.
- Of several ranks each has a range of the vocabulary, the last one what is left. An embedding is the sum of what its rank has
  and the others' zeros, so exact.
"""

from collections.abc import Iterator

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
        place: Placement,
    ) -> None:
        """``tied``: it is the output head, too.

        Raises:
            CaesuraError: UNSUPPORTED_MODEL, the vocabulary is too small for every rank to have some of it.
        """
        self._checkpoint, self._parallel = checkpoint, place.parallel
        self._window = rounded_up(vocab_size, place.parallel, "vocab_size")
        self._weight = Matrix(f"{name}.weight", self._window.length, hidden_size, place, packed=tied)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] to [T, hidden]: fresh memory, which the caller may overwrite."""
        if self._parallel.size == 1:
            return self._weight.gather(ids)
        own = ids - self._window.start
        others = (own < 0) | (own >= self._window.length)
        x = self._weight.gather(own.masked_fill_(others, 0)).masked_fill_(others.unsqueeze(1), 0)
        self._parallel.all_reduce(x)
        return x

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """As a tied output head: [S, hidden] to ``out`` [S, vocab], of this rank's rows of the table; returns ``out``."""
        return self._weight.product(x, None, out)

    def read(self) -> Tensor:
        """This rank's rows of the table as [rows, hidden]."""
        return self._weight.read()

    def slots(self) -> Iterator[WeightSlot]:
        """The table's slot."""
        yield sharded(self._weight.slot(f"{self._checkpoint}.weight"), self._window)

    def parameters(self) -> Iterator[Parameter]:
        """The table."""
        yield self._weight.parameter


class OutputHead:
    """A head with a table [vocab, hidden] of its own."""

    def __init__(
        self, name: str, checkpoint: str, vocab_size: int, hidden_size: int, *, place: Placement
    ) -> None:
        """``checkpoint`` is its module there."""
        self._checkpoint = checkpoint
        self._window = rounded_up(vocab_size, place.parallel, "vocab_size")
        self._weight = Matrix(f"{name}.weight", self._window.length, hidden_size, place)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """[S, hidden] to ``out`` [S, vocab], of this rank's rows of the table; returns ``out``."""
        return self._weight.product(x, None, out)

    def slots(self) -> Iterator[WeightSlot]:
        """The table's slot."""
        yield sharded(self._weight.slot(f"{self._checkpoint}.weight"), self._window)

    def parameters(self) -> Iterator[Parameter]:
        """The table."""
        yield self._weight.parameter
