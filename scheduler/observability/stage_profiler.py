"""Wall time per named stage of a longer operation.

Invariants: stages never synchronise a device, so on an accelerator they time the host's part; the time of a stage that
raises counts; stages may nest, and then both count in full (seconds are not exclusive).
"""

from dataclasses import dataclass
from time import perf_counter
from types import TracebackType


@dataclass(slots=True)
class StageTotal:
    """How often a stage ran and how long in sum, in seconds."""

    count: int = 0
    seconds: float = 0.0


class _Stage:
    """One run of a stage. A class, as a generator-based context manager costs several times as much."""

    __slots__ = ("_started", "_total")

    def __init__(self, total: StageTotal) -> None:
        self._total = total
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = perf_counter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._total.seconds += perf_counter() - self._started
        self._total.count += 1


class StageProfiler:
    """Accumulates stages; one per operation, or one for ever with :meth:`reset` in between."""

    def __init__(self) -> None:
        self._totals: dict[str, StageTotal] = {}

    def stage(self, name: str) -> _Stage:
        """``with profiler.stage("copy"): …``"""
        total = self._totals.get(name)
        if total is None:
            total = self._totals[name] = StageTotal()
        return _Stage(total)

    def seconds(self, name: str) -> float:
        """Time spent in ``name``; 0.0 if it never ran."""
        total = self._totals.get(name)
        return 0.0 if total is None else total.seconds

    def totals(self) -> dict[str, StageTotal]:
        """Every stage in the order of its first run, as a copy."""
        return {name: StageTotal(total.count, total.seconds) for name, total in self._totals.items()}

    def add(self, other: "StageProfiler") -> None:
        """Count what ``other`` has measured, too."""
        for name, total in other._totals.items():
            mine = self._totals.setdefault(name, StageTotal())
            mine.count += total.count
            mine.seconds += total.seconds

    def reset(self) -> None:
        """Forget everything."""
        self._totals.clear()
