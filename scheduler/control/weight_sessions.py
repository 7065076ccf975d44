"""The weight session that may be open: who may open, join, commit and end it, and when it expires.

- At most one session is open. A call that is refused here has changed neither the session nor the weights.
- Every call of an explicit session carries its id. An implicit session accepts calls of one sender only, and
  only if transport, process group and label agree with the earlier calls: all HTTP clients are one sender.
- A session whose client is gone expires ``orphan_s`` seconds later, unless a message of it arrives.

    none --begin--> explicit     none --call while paused--> implicit     none --call while running--> single
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..observability.stage_profiler import StageProfiler
from ..weights.changes import UpdateChanges
from ..weights.loader import LoadCounts
from .engine_state import Sender

if TYPE_CHECKING:
    from .adapters import StagedAdapter

logger = logging.getLogger(__name__)

SessionKind = Literal["explicit", "implicit", "single"]
Route = tuple[str, str | None]
"""How tensors arrive: the transport, and the name of the process group if the transport uses one."""


@dataclass(slots=True)
class Session:
    kind: SessionKind
    sender: Sender
    stages: StageProfiler
    opened: float
    """Monotonic time."""
    deadline: float | None
    """Monotonic time of its expiry; None if it has no deadline."""
    begin_id: str | None = None
    """Message id of its ``begin``, which is accepted as its id, too."""
    manifest: frozenset[str] | None = None
    """Names of the tensors that must be written before a commit."""
    id: str = field(default_factory=wire.new_id)
    client: bytes = b""
    """Socket of the last message that belonged to it."""
    orphaned_at: float | None = None
    counts: LoadCounts = field(default_factory=LoadCounts)
    touched: bool = False
    """True once a byte has been written."""
    delta: wire.DeltaBase | None = None
    """Weights that its calls change; nothing of them is written before the commit. None: each call writes."""
    is_swapping: bool = False
    """True while its delta may be in place, and is not committed."""
    component: str | None = None
    version: str | None = None
    model_path: str | None = None
    digest: str | None = None
    wrote_other_component: bool = False
    """True once a call has written a component other than the model's first, which no restart restores."""
    route: Route | None = None
    """Route of the last call; None before the first call."""
    flush: bool = False
    empty: bool = False
    adapters: "dict[str, StagedAdapter]" = field(default_factory=dict)
    """Adapters that its commit publishes, by name. Their slots are free again when it ends otherwise."""
    changes: UpdateChanges | None = None
    """Changes so far, if a report or a bound was asked for."""
    min_changed: float | None = None
    max_rel_norm: float | None = None
    refuse_beyond: bool = False
    abort_all: bool = False
    """True if every request must be aborted before the next byte is written."""

    def __post_init__(self) -> None:
        self.client = self.sender.client

    @property
    def source(self) -> str:
        return "" if self.route is None else self.route[0]

    @property
    def has_only_adapters(self) -> bool:
        """True if its commit changes nothing of the weights, nor their label."""
        writes = self.touched or self.delta is not None
        return bool(self.adapters) and not (writes or self.manifest or self.version)

    def is_named(self, session_id: str | None) -> bool:
        return session_id is not None and session_id in (self.id, self.begin_id)

    def status(self) -> wire.SessionStatus:
        now = monotonic()
        return wire.SessionStatus(
            kind=self.kind,
            session_id=self.id,
            owner=self.sender.owner,
            age_s=now - self.opened,
            deadline_s=None if self.deadline is None else self.deadline - now,
            written_tensors=self.counts.written_tensors,
        )

    def __str__(self) -> str:
        return self.source if self.version is None else f"{self.source}, version {self.version!r}"


class Sessions:
    """Holds the open session; ``weight_updates.py`` writes, commits and aborts it."""

    def __init__(self, *, deadline_s: float, orphan_s: float) -> None:
        """``deadline_s`` is for sessions that set none; ``orphan_s`` for those whose client is gone."""
        self.orphan_s = orphan_s
        self.current: Session | None = None
        self.is_working = False
        """True during a call of the session: it does not expire as an orphan, and the engine is not idle."""
        self._deadline_s = deadline_s

    @contextmanager
    def working(self) -> Iterator[None]:
        self.is_working = True
        try:
            yield
        finally:
            self.is_working = False

    @property
    def is_explicit(self) -> bool:
        return self.current is not None and self.current.kind == "explicit"

    @property
    def client(self) -> bytes | None:
        """Socket of the open session's last message, whose client must stay alive."""
        return None if self.current is None else self.current.client

    @property
    def expires(self) -> float | None:
        """Monotonic time when the open session expires; None if it does not."""
        session = self.current
        if session is None:
            return None
        orphan = session.orphaned_at
        limits = [] if orphan is None or self.is_working else [orphan + self.orphan_s]
        return min([*limits, *([] if session.deadline is None else [session.deadline])], default=None)

    def status(self) -> wire.SessionStatus | None:
        return None if self.current is None else self.current.status()

    def begin(
        self,
        request: wire.BeginWeightUpdateReqInput,
        sender: Sender,
        manifest: frozenset[str] | None,
        stages: StageProfiler,
    ) -> Session:
        """Open an explicit session. The caller has called :meth:`require_none`."""
        deadline_s = request.deadline_s if request.deadline_s is not None else self._deadline_s
        session = self._open("explicit", sender, deadline_s, stages)
        session.manifest, session.begin_id = manifest, request.id
        return session

    def require_none(self, sender: Sender) -> None:
        if self.current is not None:
            raise _refused(self.current, sender, "a weight session is open already")

    def require_open(self, session: Session) -> None:
        if self.current is not session:
            raise CaesuraError(ErrorCode.DEADLINE_EXCEEDED, "the session expired during the update")

    def named(self, session_id: str) -> Session:
        """Return the open session of that name; raises ``no_session``."""
        if self.current is None or not self.current.is_named(session_id):
            raise CaesuraError(
                ErrorCode.NO_SESSION,
                f"no weight session {session_id!r} is open: it has ended or expired, or was another engine's",
            )
        return self.current

    def find(self, request: wire.WeightUpdateOptions, sender: Sender, route: Route) -> Session | None:
        """Return the open session that a call belongs to; raises ``no_session`` or ``session_open``."""
        if request.session_id is not None:
            return self.named(request.session_id)
        session, reason = self.current, ""
        if session is None:
            return None
        if session.kind == "explicit":
            reason = "an explicit weight session is open: its calls carry session_id"
        elif not session.sender.is_same(sender):
            reason = "an implicit weight session of another sender is open"
        elif session.route is not None and session.route != route:
            came = " of group ".join(filter(None, session.route))
            reason = f"the open weight session came by {came}: end it, or send its session_id"
        elif (
            None not in (session.version, request.weight_version)
            and session.version != request.weight_version
        ):
            reason = (
                f"the open weight session is labelled {session.version!r}: end it, or send its session_id"
            )
        if reason:
            raise _refused(session, sender, reason)
        return session

    def join(
        self,
        found: Session | None,
        request: wire.WeightUpdateOptions,
        sender: Sender,
        route: Route,
        *,
        paused: bool,
        stages: StageProfiler,
    ) -> Session:
        """Return the session ``found``, or open one if it is None; the call's options are added to it."""
        if found is None:  # a single call needs no deadline, since it ends by itself
            deadline_s = self._deadline_s if paused else None
            found = self._open("implicit" if paused else "single", sender, deadline_s, stages)
        found.route, found.component = route, request.component
        found.flush |= request.flush_cache
        found.empty |= request.torch_empty_cache
        found.abort_all |= request.abort_all_requests
        found.version = request.weight_version if request.weight_version is not None else found.version
        return found

    def to_end(self, request: wire.EndWeightUpdateReqInput, sender: Sender) -> Session:
        """Return the session that ``request`` may end; raises ``no_session`` or ``session_open``."""
        if request.force and request.commit:
            reason = "force aborts: it needs commit=false"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="force", value=True)
        session = self.current
        if request.session_id is not None and not request.force:
            return self.named(request.session_id)
        if session is None or session.kind == "single":
            raise CaesuraError(ErrorCode.NO_SESSION, "no weight session is open")
        if request.force:
            logger.warning("the weight session %s is aborted by force", session.id)
        elif session.kind == "explicit":
            raise _refused(session, sender, "an explicit weight session is open: its end carries session_id")
        elif not session.sender.is_same(sender):
            raise _refused(session, sender, "an implicit weight session of another sender is open")
        return session

    def to_commit(self, sender: Sender, *, may_commit: bool) -> Session | None:
        """Return the implicit session that ``sender`` commits, another's only with ``may_commit``."""
        session = self.current
        if session is None or session.kind != "implicit":
            return None
        if not (may_commit or session.sender.is_same(sender)):
            reason = (
                "an implicit weight session of another sender is open: that sender must commit it, or use "
                "force"
            )
            raise _refused(session, sender, reason)
        return session

    def protects(self, route: Route, error: BaseException) -> bool:
        """Return True if ``error`` refused a foreign call while ``route`` serves the open session."""
        codes = ErrorCode.SESSION_OPEN, ErrorCode.NO_SESSION
        refused = isinstance(error, CaesuraError) and error.code in codes
        return refused and self.current is not None and self.current.route == route

    def note_message(
        self,
        request: wire.WeightUpdateOptions | wire.EndWeightUpdateReqInput | wire.LoadAdapterReqInput,
        sender: Sender,
    ) -> None:
        """Record that a message was received; if it belongs to the open session, its client is alive."""
        session = self.current
        if session is None:
            return
        implicit = session.kind == "implicit" and session.sender.is_same(sender)
        if session.is_named(request.session_id) or (request.session_id is None and implicit):
            session.client, session.orphaned_at = sender.client, None

    def client_gone(self, client: bytes) -> None:
        """Start the orphan timeout if the open session's client is ``client``, whose socket is closed."""
        session = self.current
        if session is not None and session.client == client and session.orphaned_at is None:
            session.orphaned_at = monotonic()
            logger.warning(
                "the client of the weight session %s is gone: aborting it in %g s", session.id, self.orphan_s
            )

    def _open(
        self, kind: SessionKind, sender: Sender, deadline_s: float | None, stages: StageProfiler
    ) -> Session:
        now = monotonic()
        deadline = None if deadline_s is None else now + deadline_s
        self.current = Session(kind, sender, stages, now, deadline)
        return self.current


def _refused(session: Session, sender: Sender, reason: str) -> CaesuraError:
    known = {"session_id": session.id} if session.sender.is_same(sender) else {}
    return CaesuraError(
        ErrorCode.SESSION_OPEN, reason, kind=session.kind, age_s=monotonic() - session.opened, **known
    )
