"""What an update session remembers between its calls; ``updates.py`` opens, advances and ends it."""

from dataclasses import dataclass, field
from typing import Literal

from ..observability.stage_profiler import StageProfiler
from .loader import LoadCounts

SessionKind = Literal["explicit", "implicit", "single"]


@dataclass(slots=True)
class Session:
    """One update, from its first call to its commit or end."""

    kind: SessionKind
    opened: float
    deadline: float | None
    """On the monotonic clock; None: no deadline."""
    manifest: frozenset[str] | None = None
    """Names that must all come; None: unknown."""
    counts: LoadCounts = field(default_factory=LoadCounts)
    stages: StageProfiler = field(default_factory=StageProfiler)
    touched: bool = False
    """A byte has been written."""
    version: str | None = None
    model_path: str | None = None
    """The folder that came last, if one did."""
    source: str = ""
    """The transport that came last."""
    flush: bool = False
    empty: bool = False

    def __str__(self) -> str:
        """Transport and label."""
        return self.source if self.version is None else f"{self.source}, version {self.version!r}"
