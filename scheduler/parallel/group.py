"""The ranks that compute one model together, and the collectives that its layers call (tensor parallelism).

Invariants:
- All ranks call the same collectives in the same order, with tensors of the same shape and dtype.
- A sum is taken element by element in the order of ranks, in float32, and rounded once: every rank has the same bits, and an
  element's do not depend on how many others there are. Only a group on NCCL leaves the order to its library.
- Nothing waits for ever: a rank that is gone, that has given up (:meth:`TensorParallel.abort`) or that is later than the group's
  timeout raises :class:`RankLostError` in all others, and from then on at every collective.
- One rank alone is :data:`SINGLE`, whose collectives do nothing; layers do not even call them.

Shaped after Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): a product split by outputs is followed by one split by
inputs, whose partial results are summed.
"""

from typing import Protocol

from torch import Tensor

from ..kernels.collectives import Collective
from ..kernels.collectives import RankLostError as RankLostError


class TensorParallel(Protocol):
    """One rank's view of its group."""

    @property
    def rank(self) -> int:
        """In ``[0, size)``; rank 0 owns the scheduler."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def compiled(self) -> Collective | None:
        """What compiled kernels sum with inside a call of theirs. None: they cannot, and layers are computed part by part."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x``, contiguous, by the sum of all ranks' ``x``.

        Raises:
            RankLostError: ``x`` holds nothing of use then.
        """
        ...

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, w] of each rank to [T, size * w], in the order of ranks.

        Args:
            out: [T, n] with n <= size * w, contiguous, where the first n columns go; what is cut off is padding of the last
                ranks. None: fresh memory for all of it.

        Returns:
            ``out``.

        Raises:
            RankLostError: ``out`` holds nothing of use then.
        """
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace ``x``, contiguous, by that of rank ``source``.

        Raises:
            RankLostError: ``x`` holds nothing of use then.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank is here.

        Raises:
            RankLostError: one does not come.
        """
        ...

    def abort(self) -> None:
        """This rank does not go on, and whoever waits for it, now or later, is told so; never waits. May be called in any thread."""
        ...

    def reset(self) -> None:
        """After :meth:`abort` on some rank, all ranks call this to begin anew; returns when every rank is here.

        Raises:
            RankLostError: one is gone.
        """
        ...

    def close(self) -> None:
        """Leave the group and free what it holds; never waits. Nothing else is called afterwards."""
        ...


class _Single:
    """One rank alone."""

    rank, size = 0, 1
    compiled: Collective | None = None

    def all_reduce(self, x: Tensor) -> None:
        """``x`` is the sum."""

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` is all there is."""
        return x if out is None else out.copy_(x[:, : out.shape[1]])

    def broadcast(self, x: Tensor, source: int) -> None:
        """``x`` is there."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def abort(self) -> None:
        """Nobody waits."""

    def reset(self) -> None:
        """Nothing to begin anew."""

    def close(self) -> None:
        """Nothing is held."""


SINGLE: TensorParallel = _Single()
"""A group of one rank."""


class LastOf(_Single):
    """The last of so many ranks before there are any, for a model that is divided and never computed."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = size - 1, size
