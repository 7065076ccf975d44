"""Tensors on the way into a model: what is said of one before it comes, and some rows of it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NamedSpec(Protocol):
    """What :meth:`WeightLoader.check` reads of a tensor: io_struct's TensorSpec, or a checkpoint's."""

    @property
    def name(self) -> str:
        """Checkpoint name."""
        ...

    @property
    def dtype(self) -> str:
        """A key of :data:`~..dtypes.DTYPES`."""
        ...

    @property
    def shape(self) -> list[int]:
        """Elements per dimension."""
        ...


@dataclass(slots=True, frozen=True)
class WeightPiece:
    """Some rows of one checkpoint tensor; ``rows`` is valid until the next piece is asked for."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    start_row: int
    """First row of dimension 0; 0 for a scalar."""
    rows: Tensor
    """[n, *shape[1:]], or the scalar itself."""
