"""The weight session that may be open: who may open, join, settle and end it, and when it is abandoned.

Invariants:
- At most one session is open. What is refused here has changed nothing, of the session and of the weights.
- Every piece of an explicit session names it; a name that is not the open session's is ``no_session``, never a session of its own.
- An implicit session takes pieces of one sender only, and only such as agree with those before: HTTP clients share a sender.
- A session whose client is gone lives :attr:`Sessions.orphan_s` longer, unless a message that belongs to it arrives.

    none --begin--> explicit        none --call while paused--> implicit        none --call while running--> single
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from ...io_struct import (
    BeginWeightUpdateReqInput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    SessionStatus,
    WeightUpdateOptions,
    new_id,
)
from ..observability.stage_profiler import StageProfiler
from ..weights.loader import LoadCounts
from .pause_ownership import Sender

logger = logging.getLogger(__name__)

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


class Sessions:
    """Holds the open session; ``weight_updates.py`` writes, commits and abandons."""

    def __init__(self, *, deadline_s: float, orphan_s: float) -> None:
        """``deadline_s``: of sessions that set none."""
        self.orphan_s = orphan_s
        """How long a session whose client is gone waits for another message."""
        self.current: Session | None = None
        self._working = False
        self._deadline_s = deadline_s

    @property
    def is_working(self) -> bool:
        """A call of the session is under way: it does not expire though its client is gone, and the engine is not idle."""
        return self._working

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the work of one call."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    @property
    def is_explicit(self) -> bool:
        """An explicit session is open."""
        return self.current is not None and self.current.kind == "explicit"

    @property
    def client(self) -> bytes | None:
        """Whose socket must be alive: that of the last message of the open session."""
        return None if self.current is None else self.current.client

    @property
    def expires(self) -> float | None:
        """When the open session is abandoned, on the monotonic clock; None: not by itself."""
        session = self.current
        if session is None:
            return None
        orphan = session.orphaned_at
        limits = [] if orphan is None or self._working else [orphan + self.orphan_s]
        return min([*limits, *([] if session.deadline is None else [session.deadline])], default=None)

    def status(self) -> SessionStatus | None:
        """The open session, for status."""
        return None if self.current is None else self.current.status()

    def begin(
        self,
        request: BeginWeightUpdateReqInput,
        sender: Sender,
        manifest: frozenset[str] | None,
        stages: StageProfiler,
    ) -> Session:
        """Open an explicit session; :meth:`require_none` was asked before."""
        deadline = request.deadline_s if request.deadline_s is not None else self._deadline_s
        self.current = Session.opened_now("explicit", sender, deadline, stages)
        self.current.manifest, self.current.begin_id = manifest, request.id
        return self.current

    def require_none(self, sender: Sender) -> None:
        """Raise ``session_open`` if a session is open."""
        if self.current is not None:
            raise _refused(self.current, sender, "a weight session is open already")

    def admitted(self, request: WeightUpdateOptions, sender: Sender, route: Route) -> Session | None:
        """The open session that this call belongs to; None: it may open one of its own.

        Raises:
            CaesuraError: ``no_session``, it names another one; ``session_open``, it does not belong to the one that is open.
        """
        if request.session_id is not None:
            return self._named(request.session_id)
        session = self.current
        if session is None:
            return None
        if session.kind == "explicit":
            raise _refused(session, sender, "an explicit weight session is open: its calls carry session_id")
        if not session.sender.is_same(sender):
            raise _refused(session, sender, "an implicit weight session of another sender is open")
        if session.route is not None and session.route != route:
            came = " of group ".join(filter(None, session.route))
            raise _refused(
                session, sender, f"the open weight session came by {came}: end it, or send its session_id"
            )
        if (
            None not in (session.version, request.weight_version)
            and session.version != request.weight_version
        ):
            raise _refused(
                session,
                sender,
                f"the open weight session is labelled {session.version!r}: end it, or send its session_id",
            )
        return session

    def joined(
        self,
        request: WeightUpdateOptions,
        sender: Sender,
        route: Route,
        *,
        paused: bool,
        stages: StageProfiler,
    ) -> Session:
        """The session of an admitted call, opened if there is none, with what the call asks for."""
        session = self.admitted(request, sender, route)
        if session is None:  # a single call ends by itself; only what somebody must end can be forgotten
            session = Session.opened_now(
                "implicit" if paused else "single", sender, self._deadline_s if paused else None, stages
            )
            self.current = session
        session.route = route
        session.flush |= request.flush_cache
        session.empty |= request.torch_empty_cache
        session.abort_all |= request.abort_all_requests
        session.version = request.weight_version if request.weight_version is not None else session.version
        return session

    def ending(self, request: EndWeightUpdateReqInput, sender: Sender) -> Session:
        """The session that ``request`` may end.

        Raises:
            CaesuraError: ``invalid_request``, a commit by force; ``no_session``; ``session_open``, it is not named or not the sender's.
        """
        if request.force and request.commit:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "force aborts: it needs commit=false", field="force", value=True
            )
        session = self.current
        if request.session_id is not None and not request.force:
            return self._named(request.session_id)
        if session is None or session.kind == "single":
            raise CaesuraError(ErrorCode.NO_SESSION, "no weight session is open")
        if request.force:
            logger.warning("the weight session %s is aborted by force", session.id)
        elif session.kind == "explicit":
            raise _refused(session, sender, "an explicit weight session is open: its end carries session_id")
        elif not session.sender.is_same(sender):
            raise _refused(session, sender, "an implicit weight session of another sender is open")
        return session

    def settling(self, sender: Sender, *, may_settle: bool) -> Session | None:
        """The implicit session that ``sender`` commits by going on; None: none is open.

        Raises:
            CaesuraError: ``session_open``, it is another sender's, who neither owns the pause nor forces (``may_settle``).
        """
        session = self.current
        if session is None or session.kind != "implicit":
            return None
        if not (may_settle or session.sender.is_same(sender)):
            raise _refused(
                session,
                sender,
                "an implicit weight session of another sender is open: it commits, or use force",
            )
        return session

    def protects(self, route: Route, error: BaseException) -> bool:
        """Whether the group of ``route`` serves the open session, and ``error`` refused a call that does not belong to it."""
        refused = isinstance(error, CaesuraError) and error.code in (
            ErrorCode.SESSION_OPEN,
            ErrorCode.NO_SESSION,
        )
        return refused and self.current is not None and self.current.route == route

    def heard(self, request: WeightUpdateOptions | EndWeightUpdateReqInput, sender: Sender) -> None:
        """A message has arrived, though its turn may come later: whoever sent it is there."""
        session = self.current
        if session is None:
            return
        named = session.is_named(request.session_id)
        if named or (
            request.session_id is None and session.kind == "implicit" and session.sender.is_same(sender)
        ):
            session.client, session.orphaned_at = sender.client, None

    def client_gone(self, client: bytes) -> None:
        """The socket ``client`` is closed."""
        session = self.current
        if session is not None and session.client == client and session.orphaned_at is None:
            session.orphaned_at = monotonic()
            logger.warning(
                "the client of the weight session %s is gone: aborting it in %g s", session.id, self.orphan_s
            )

    def _named(self, session_id: str) -> Session:
        if self.current is None or not self.current.is_named(session_id):
            raise CaesuraError(
                ErrorCode.NO_SESSION,
                f"no weight session {session_id!r} is open: it has ended or expired, or was another engine's",
            )
        return self.current


def _refused(session: Session, sender: Sender, reason: str) -> CaesuraError:
    known = {"session_id": session.id} if session.sender.is_same(sender) else {}
    return CaesuraError(
        ErrorCode.SESSION_OPEN, reason, kind=session.kind, age_s=monotonic() - session.opened, **known
    )
