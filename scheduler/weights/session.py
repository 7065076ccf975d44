"""What an update session remembers between its calls; ``sessions.py`` opens it, ``updates.py`` advances and ends it."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from ...io_struct import SessionStatus, new_id
from ..observability.stage_profiler import StageProfiler
from ..ownership import Sender
from .loader import LoadCounts

SessionKind = Literal["explicit", "implicit", "single"]
Route = tuple[str, str | None]
"""How tensors come: the transport, and its group where it has some."""


@dataclass(slots=True)
class Session:
    """One update, from its first call to its commit or end."""

    kind: SessionKind
    id: str
    """Drawn by the engine."""
    opened: float
    deadline: float | None
    """On the monotonic clock; None: no deadline."""
    sender: Sender
    """Of the message that opened it."""
    client: bytes
    """Socket of the last message that belonged to it."""
    stages: StageProfiler
    begin_id: str | None = None
    """Of the message that began it, which names it as well; None: none did."""
    orphaned_at: float | None = None
    """When its client was found to be gone, on the monotonic clock; None: it is there, for all that is known."""
    manifest: frozenset[str] | None = None
    """Names that must all come; None: unknown."""
    counts: LoadCounts = field(default_factory=LoadCounts)
    touched: bool = False
    """A byte has been written."""
    version: str | None = None
    model_path: str | None = None
    """The folder that came last, if one did."""
    digest: str | None = None
    """What tells that folder's files from others (``Checkpoint.digest``)."""
    route: Route | None = None
    """Of the call that came last; None: nothing came."""
    flush: bool = False
    empty: bool = False
    abort_all: bool = False
    """Every request ends before the next byte is written."""

    @classmethod
    def opened_now(
        cls, kind: SessionKind, sender: Sender, deadline_s: float | None, stages: StageProfiler
    ) -> "Session":
        """A new one; ``deadline_s`` from now, None: without."""
        now = monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        return cls(kind, new_id(), now, deadline, sender, sender.client, stages)

    @property
    def source(self) -> str:
        """The transport that came last; empty: nothing came."""
        return "" if self.route is None else self.route[0]

    def is_named(self, session_id: str | None) -> bool:
        """Whether ``session_id`` means this session."""
        return session_id is not None and session_id in (self.id, self.begin_id)

    def status(self) -> SessionStatus:
        """As of now, for status."""
        now = monotonic()
        return SessionStatus(
            kind=self.kind,
            session_id=self.id,
            owner=self.sender.owner,
            age_s=now - self.opened,
            deadline_s=None if self.deadline is None else self.deadline - now,
            written_tensors=self.counts.written_tensors,
        )

    def __str__(self) -> str:
        """Transport and label."""
        return self.source if self.version is None else f"{self.source}, version {self.version!r}"
