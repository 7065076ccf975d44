"""Token embeddings, and the output head that shares their table.

Invariant: a tied head is the same storage with one owner, this class; an update cannot move one without the other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .linear import matmul_into
from .parameters import Parameter, WeightSlot


class Embedding:
    """A [vocab, hidden] table."""

    def __init__(
        self,
        name: str,
        checkpoint: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._weight = Parameter(f"{name}.weight", (vocab_size, hidden_size), dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] to [T, hidden]: fresh memory, which the caller may overwrite."""
        return functional.embedding(ids, self._weight.data)

    def project(self, x: Tensor, out: Tensor) -> Tensor:
        """As a tied output head: [S, hidden] to ``out`` [S, vocab]; returns ``out``."""
        return matmul_into(x, self._weight.data, None, out)

    def read(self) -> Tensor:
        """The table as [vocab, hidden]."""
        return self._weight.data

    def slots(self) -> Iterator[WeightSlot]:
        """The table's slot."""
        yield self._weight.slot(f"{self._checkpoint}.weight")

    def parameters(self) -> Iterator[Parameter]:
        """The table."""
        yield self._weight
