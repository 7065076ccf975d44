"""Token embeddings, and the output head that shares their table.

Invariant: a tied head is the same storage with one owner, this class; an update cannot move one without the other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot


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
        """
        Args:
            tied: it is the output head, too.
            scale: multiplies what is looked up, rounded to the model's dtype before; the head is as it is.
        """
        self._checkpoint = checkpoint
        self._scale = float(torch.tensor(scale, dtype=place.dtype))
        self._weight = Matrix(f"{name}.weight", vocab_size, hidden_size, place, packed=tied)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] to [T, hidden]: fresh memory, which the caller may overwrite."""
        rows = self._weight.gather(ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """As a tied output head: [S, hidden] to ``out`` [S, vocab]; returns ``out``."""
        return self._weight.product(x, None, out)

    def read(self) -> Tensor:
        """The table as [vocab, hidden]."""
        return self._weight.read()

    def slots(self) -> Iterator[WeightSlot]:
        """The table's slot."""
        yield self._weight.slot(f"{self._checkpoint}.weight")

    def parameters(self) -> Iterator[Parameter]:
        """The table."""
        yield self._weight.parameter
