"""Wall time per named stage of a longer operation, and of the engine as a whole.

Invariants: stages never synchronise a device, so on an accelerator they time the host's part; the time of a
stage that raises counts; stages may nest, and then both count in full. Memory per stage is bounded.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import TracebackType

logger = logging.getLogger(__name__)

RECENT = 64


@dataclass(slots=True)
class StageTotal:
    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def median(self) -> float:
        return median(self.recent) if self.recent else 0.0


class _Stage:
    """One run of a stage. A class, as a generator-based context manager costs several times as much."""

    __slots__ = ("_name", "_profiler", "_started")

    def __init__(self, profiler: "StageProfiler", name: str) -> None:
        self._profiler = profiler
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._profiler.begin(self._name)
        self._started = perf_counter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._profiler.record(self._name, perf_counter() - self._started)


class StageProfiler:
    def __init__(
        self,
        parent: "StageProfiler | None" = None,
        prefix: str = "",
        *,
        log: bool = False,
        describe_memory: Callable[[], str] | None = None,
    ) -> None:
        """``parent`` counts runs as ``prefix`` + name; ``describe_memory`` is logged at DEBUG."""
        self._totals: dict[str, StageTotal] = {}
        self._parent = parent
        self._prefix = prefix
        self._log = log
        self._describe_memory = describe_memory
        self._on_begin: Callable[[str], None] | None = None
        self._on_end: Callable[[str, float], None] | None = self._log_end if log else None

    def stage(self, name: str) -> _Stage:
        return _Stage(self, name)

    def call_at_ends(
        self, call: Callable[[str], None] | None, at_begins: Callable[[str], None] | None = None
    ) -> None:
        """Call ``call`` with the name of each stage that ends, from now on; None: no longer."""
        self._on_begin = at_begins

        def logged(name: str, seconds: float) -> None:
            if self._log:
                self._log_end(name, seconds)
            if call is not None:
                call(name)

        self._on_end = logged if call is not None else self._log_end if self._log else None

    def begin(self, name: str) -> None:
        if self._log:
            logger.info("stage %s begins", name)
        if self._on_begin is not None:
            self._on_begin(name)
        if self._parent is not None:
            self._parent.begin(self._prefix + name)

    def record(self, name: str, seconds: float) -> None:
        total = self._totals.get(name)
        if total is None:
            total = self._totals[name] = StageTotal()
        total.count += 1
        total.seconds += seconds
        total.recent.append(seconds)
        if seconds > total.longest:
            total.longest = seconds
        if self._on_end is not None:
            self._on_end(name, seconds)
        if self._parent is not None:
            self._parent.record(self._prefix + name, seconds)

    def seconds(self, name: str) -> float:
        total = self._totals.get(name)
        return 0.0 if total is None else total.seconds

    def totals(self) -> dict[str, StageTotal]:
        return {
            name: StageTotal(total.count, total.seconds, total.longest, total.recent.copy())
            for name, total in self._totals.items()
        }

    def add(self, other: "StageProfiler") -> None:
        """Add the runs of ``other``; not passed on to the parent, which has counted them already."""
        for name, total in other._totals.items():
            mine = self._totals.setdefault(name, StageTotal())
            mine.count += total.count
            mine.seconds += total.seconds
            mine.longest = max(mine.longest, total.longest)
            mine.recent.extend(total.recent)

    def _log_end(self, name: str, seconds: float) -> None:
        memory = ""
        if self._describe_memory is not None and logger.isEnabledFor(logging.DEBUG):
            memory = f", {self._describe_memory()}"
        logger.info("stage %s ends after %.3f ms%s", name, 1e3 * seconds, memory)
