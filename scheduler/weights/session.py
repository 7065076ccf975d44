"""What an update session remembers between its calls; ``updates.py`` opens, advances and ends it."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from ...io_struct import SessionStatus
from ..observability.stage_profiler import StageProfiler
from .loader import LoadCounts

SessionKind = Literal["explicit", "implicit", "single"]


@dataclass(slots=True)
class Session:
    """One update, from its first call to its commit or end."""

    kind: SessionKind
    id: str
    """Drawn by the engine."""
    opened: float
    deadline: float | None
    """On the monotonic clock; None: no deadline."""
    owner: str | None = None
    """The owner token of the message that opened it."""
    manifest: frozenset[str] | None = None
    """Names that must all come; None: unknown."""
    counts: LoadCounts = field(default_factory=LoadCounts)
    stages: StageProfiler = field(default_factory=StageProfiler)
    touched: bool = False
    """A byte has been written."""
    version: str | None = None
    model_path: str | None = None
    """The folder that came last, if one did."""
    digest: str | None = None
    """What tells that folder's files from others (``Checkpoint.digest``)."""
    source: str = ""
    """The transport that came last."""
    flush: bool = False
    empty: bool = False

    def status(self) -> SessionStatus:
        """As of now, for status."""
        now = monotonic()
        return SessionStatus(
            kind=self.kind,
            session_id=self.id,
            owner=self.owner,
            age_s=now - self.opened,
            deadline_s=None if self.deadline is None else self.deadline - now,
            written_tensors=self.counts.written_tensors,
        )

    def __str__(self) -> str:
        """Transport and label."""
        return self.source if self.version is None else f"{self.source}, version {self.version!r}"
