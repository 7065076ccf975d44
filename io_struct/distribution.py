"""Histograms: counts of values by bucket, as engines report them and front ends export them."""

from bisect import bisect_left
from collections.abc import Sequence

from .base import ReplyRecord


def one_two_five(low: int, high: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, … from ``10**low`` to ``10**high``."""
    steps = [float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 2, 5)]
    return (*steps, 10.0**high)


SECONDS = one_two_five(-3, 3)
"""Upper bounds of the buckets of durations, in seconds."""
EPOCHS = tuple(map(float, range(9)))
"""Upper bounds of the buckets of staleness, in weights epochs."""


class Distribution(ReplyRecord, kw_only=True, frozen=True):
    """Counts of values by bucket, with inclusive upper bounds; the last bucket has none.

    Bounds of durations: 1, 2 and 5 times each power of ten from 1 ms to 1,000 s. Of staleness: 0 to 8 epochs.
    """

    counts: list[int] = []
    """Number of values in each bucket; empty if the engine does not count them."""
    sum: float = 0.0
    """Sum of all values."""


class Histogram:
    """Counts of values by bucket; counting a value costs about a microsecond."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float], counted: Distribution | None = None) -> None:
        """``bounds`` are ascending inclusive upper bounds; ``counted`` has one count more."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1) if counted is None else list(counted.counts)
        self._sum = 0.0 if counted is None else counted.sum

    @property
    def total(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def distribution(self) -> Distribution:
        return Distribution(counts=list(self._counts), sum=self._sum)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return pairs of upper bound and cumulative count, and the sum of all values."""
        found, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        return found, self._sum

    def quantile(self, share: float) -> float | None:
        """Return the value below which ``share`` of all lie, interpolated in its bucket; None without any."""
        wanted, below, low = share * self.total, 0, 0.0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            if count and below + count >= wanted:
                return low + (bound - low) * (wanted - below) / count
            below, low = below + count, bound
        return low if self.total else None
