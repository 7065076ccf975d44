"""The ranks that compute one model together, and the collectives that its layers call (tensor parallelism).

Invariants:
- All ranks call the same collectives in the same order, with tensors of the same shape and dtype, or the same
  counts of rows.
- A sum is taken element by element in the order of ranks, in float32, and rounded once: every rank has the
  same bits, and an element's do not depend on how many other elements there are. Only NCCL chooses the order.
- Nothing waits for ever: a rank that is gone, has given up (:meth:`TensorParallel.abort`) or is later than
  the timeout raises :class:`RankLostError` in all others, from then on at every collective. Tensors that the
  failed collective was to fill hold nothing of use.
- One rank alone is :data:`SINGLE`, whose collectives do nothing; layers do not even call them.

Shaped after Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): a product split by outputs is followed by
one split by inputs, whose partial results are summed.
"""

from collections.abc import Sequence

from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode


class RankLostError(CaesuraError):
    """A collective cannot end: another rank is gone, has given up, or was late."""

    def __init__(self, rank: int, lost: int | None, reason: str) -> None:
        """``lost`` is the missing rank, or None if unknown; ``rank`` is this one."""
        who = "another rank" if lost is None else f"rank {lost}"
        super().__init__(
            ErrorCode.INTERNAL, f"rank {rank} waits for {who}: {reason}", rank=rank, lost=lost, reason=reason
        )
        self.rank, self.lost, self.reason = rank, lost, reason


class TensorParallel:
    """One rank's view of its group, whose collectives raise :class:`RankLostError`; alone they do nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """``rank`` is in ``[0, size)``; rank 0 owns the scheduler."""
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> None:
        """Replace ``x``, contiguous, by the sum of all ranks' ``x``."""

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [T, w] of every rank as [T, size * w], in order; ``out`` [T, n] drops the last columns."""
        return x if out is None else out.copy_(x[:, : out.shape[1]])

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return rows [sum(counts), w] of all ranks, in order; ``x`` [counts[rank], w] are this one's."""
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the sum of all ranks' ``x`` [sum(counts), w] for the rows that are this one's by ``counts``.

        ``x``, contiguous, is overwritten; the result may be a part of it.
        """
        return x

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Send ``counts[rank][target]`` rows of ``x`` [T, w], in order; return those that came, in order."""
        return x

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace ``x``, contiguous, by that of rank ``source``."""

    def barrier(self) -> None:
        """Return when every rank is here."""

    def abort(self) -> None:
        """Give up, and tell whoever waits for this rank, now or later. Never wait; safe in any thread."""

    def lose(self) -> None:
        """Abort as a rank is gone: :meth:`reset` cannot help any more."""
        self.abort()

    def reset(self) -> None:
        """Begin anew after :meth:`abort` on some rank; return when every rank has called this."""

    def close(self) -> None:
        """Leave the group and free what it holds; never waits."""


SINGLE = TensorParallel()
