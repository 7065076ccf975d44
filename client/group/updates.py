"""Weight sessions of several replicas: what one engine does with a session, in two phases on all of them.

Invariants:
- Every call loads within one session of the same name on every replica; the label changes on all of them, or on none
  (``group/session.py``). Between the first commit and the last, no replica generates.
- The kinds are an engine's own: ``explicit`` from ``begin`` to ``end``; ``implicit`` for calls without a session while paused, or while
  no replica has valid weights, committed when everything is written, at continue, at a flush or at ``end``; ``single`` otherwise, and
  for a whole checkpoint.
- What all replicas refuse in the same words is the request's fault: it changes nothing, as on one engine. What only some refuse
  aborts the session on all; replicas that had written are fenced then, until they have valid weights again.
- A pause that an update has made ends with it; a pause that was there before stays.

All methods but :meth:`Updates.status` and :meth:`Updates.close` are called with the fleet's lock held.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    EndWeightUpdateReqInput,
    ErrorCode,
    PauseMode,
    SessionStatus,
    StageTimes,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    WeightUpdateOptions,
    WeightUpdateReqOutput,
)
from ..exceptions import (
    EngineError,
    EngineRestarting,
    GroupError,
    InvalidRequest,
    NoSession,
    SessionOpen,
    WeightMismatch,
)
from .answers import combined_answer, one_error, sent_to, uniform
from .coverage import Coverage
from .errors import FleetUpdateFailed
from .fleet import PAUSE_S
from .members import Member
from .recovery import Source
from .session import Answers, FleetSession, everywhere

if TYPE_CHECKING:
    from .replicas import ReplicaFleet

SETTLE_S = 60.0
"""How long replicas may take to open a session, and to say what they have loaded."""
LATE_S = 2.0
"""How much later than the engines' own deadline a session is looked at."""
_NEVER = 1e9
_WHOLE = (UpdateWeightFromDiskReqInput, UpdateWeightsFromCheckpointEngineReqInput)
"""Calls whose sender says that they are complete."""
_STILL_OPEN = {ErrorCode.WEIGHT_MISMATCH, ErrorCode.NOT_IDLE}
"""Refusals of a commit that leave the session open."""


class _RefusedError(Exception):
    """All replicas have refused a call in the same words."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class _Open:
    """The session that is open."""

    session: FleetSession
    kind: Literal["explicit", "implicit", "single"]
    owner: str | None
    route: tuple[Any, ...] = ()
    """What calls of an implicit session must agree in: transport, group and label."""
    paused_here: bool = False
    """The update has paused the replicas, and continues them."""
    began: float = field(default_factory=monotonic)
    count: int = 0
    """Replicas at its begin."""
    incarnations: dict[Member, str | None] = field(default_factory=dict)
    """Those of the replicas at its begin: a later one knows nothing of the session."""
    calls: int = 0
    tensors: int = 0
    source: Source | None = None
    coverage: Coverage | None = None
    timer: asyncio.TimerHandle | None = None


class Updates:
    """The open session of a fleet of replicas, if there is one."""

    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self._open: _Open | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._open is not None

    def status(self) -> SessionStatus | None:
        """The open session, as an engine would tell of it."""
        opened = self._open
        if opened is None:
            return None
        deadline = None if opened.timer is None else opened.timer.when() - LATE_S
        return SessionStatus(
            kind=opened.kind,
            session_id=opened.session.id,
            owner=opened.owner,
            age_s=monotonic() - opened.began,
            deadline_s=None if deadline is None else deadline - asyncio.get_running_loop().time(),
            written_tensors=opened.tensors,
        )

    def close(self) -> None:
        """Forget it; the engines abort it when their client is gone."""
        self._forget()
        if self._looking is not None:
            self._looking.cancel()

    def leave_paused(self) -> None:
        """A pause of somebody's own has come: the update leaves it."""
        if self._open is not None:
            self._open.paused_here = False

    async def begin(self, request: BeginWeightUpdateReqInput) -> BeginWeightUpdateReqOutput:
        """Open an explicit session on all replicas.

        Raises:
            SessionOpen: another one is open. EngineError: a replica refuses.
        """
        await self._still_open()
        if self._open is not None:
            raise self._is_open(self._open)
        opened = _Open(
            FleetSession(verify=self._fleet.verify, session_id=request.id), "explicit", request.owner
        )
        answers = await everywhere(self._fleet.asked, self._fleet.ask, SETTLE_S)
        self._fleet.notice_continued(answers)
        await self._start(opened, answers, request)
        return BeginWeightUpdateReqOutput(
            id=request.id, session_id=opened.session.id, weights_epoch=self._fleet.weights_epoch
        )

    async def load(
        self, request: WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> WeightUpdateReqOutput:
        """One call of an update; commits where it is the last one.

        Raises:
            FleetUpdateFailed: a replica failed: nobody serves the new label. EngineError: what all of them refuse.
        """
        opened = self._joined(request)
        if opened is None:
            await self._still_open()
            opened = self._joined(request) or await self._opened(request)
        elif not opened.paused_here and self._fleet.paused_mode is None:
            await self._pause(opened, "retract" if request.flush_cache else "in_place")
        replies = await self._loaded(opened, request, buffers)
        reply: WeightUpdateReqOutput = self._combined(replies, request.id)
        opened.calls += 1
        opened.tensors += reply.written_tensors
        opened.source = Source(path=getattr(request, "model_path", None), updated=True)
        if opened.kind == "single":
            return await self._commit(opened, None, request.id)
        if opened.coverage is not None and opened.coverage.is_complete_with(request):
            try:
                return await self._commit(opened, None, request.id)
            except WeightMismatch:  # something is missing all the same: the session stays open
                pass
        return msgspec.structs.replace(reply, committed=False, session_id=opened.session.id)

    async def end(self, request: EndWeightUpdateReqInput) -> WeightUpdateReqOutput:
        """Commit or abort the session.

        Raises:
            NoSession, SessionOpen: it is not the open one. FleetUpdateFailed, EngineError: as :meth:`load`.
        """
        if request.force and request.commit:
            raise InvalidRequest("force aborts: it needs commit=false", field="force", value=True)
        opened, forced = self._open, request.force
        if opened is None and forced:
            return await self._aborted_elsewhere(request)
        if opened is None or (not forced and request.session_id not in (None, opened.session.id)):
            name = "" if request.session_id is None else f" {request.session_id}"
            raise NoSession(f"the weight session{name} is not open")
        if request.session_id is None and opened.kind == "explicit" and not forced:
            raise self._is_open(opened)
        if request.commit:
            return await self._commit(opened, request.weight_version, request.id)
        await opened.session.abort()
        await self._over(opened)
        return await self._as_it_is(request.id, written=opened.tensors)

    async def give_up(self, request: WeightUpdateOptions) -> None:
        """``request`` cannot be carried out, nor can what would follow it: the session that it belongs to is aborted."""
        with suppress(NoSession, SessionOpen):
            if self._joined(request) is not None:
                await self.abandon()

    async def abandon(self) -> None:
        """Abort the open session, if there is one."""
        opened = self._open
        if opened is not None:
            await opened.session.abort()
            await self._over(opened)

    async def settle(self) -> None:
        """A continue or a flush commits an implicit session. Raises as :meth:`end`."""
        if self._open is not None and self._open.kind == "implicit":
            await self._still_open()
            if self._open is not None:
                await self._commit(self._open, None, "")

    def _joined(self, request: WeightUpdateOptions) -> _Open | None:
        """The open session, if the call belongs to it; None: none is open."""
        opened, name = self._open, request.session_id
        if name is not None and (opened is None or name != opened.session.id):
            raise NoSession(f"the weight session {name} is not open")
        if opened is None or name is not None:
            return opened
        if opened.kind == "explicit" or opened.route != _route(request):
            raise self._is_open(opened)
        return opened

    def _is_open(self, opened: _Open) -> SessionOpen:
        age = monotonic() - opened.began
        return SessionOpen(
            f"a weight session ({opened.kind}) has been open for {age:.1f} s: name it, or end it first",
            kind=opened.kind,
            age_s=age,
            session_id=opened.session.id,
        )

    async def _opened(self, request: WeightUpdateOptions) -> _Open:
        """A session for a call that names none, on all replicas that are there, paused."""
        fleet = self._fleet
        if not fleet.present:
            raise EngineRestarting("no replica is there now")
        known = await everywhere(fleet.present, fleet.ask, SETTLE_S)
        fleet.notice_continued(known)
        valid = any(status.weights == "valid" for member, status in known.replies.items() if member.serves)
        single = isinstance(request, _WHOLE) or (fleet.paused_mode is None and valid)
        opened = _Open(
            FleetSession(verify=fleet.verify),
            "single" if single else "implicit",
            request.owner,
            route=_route(request),
            paused_here=fleet.paused_mode is None,
        )
        mode: PauseMode = "retract" if request.flush_cache else "in_place"
        there = await self._held(known, fleet.paused_mode or mode)
        await self._start(opened, there, BeginWeightUpdateReqInput(id=opened.session.id))
        if opened.kind == "implicit":
            for member in opened.session.members:  # the first may have ended since
                opened.coverage = opened.coverage or await Coverage.of(member, request.component)
        return opened

    async def _held(self, known: Answers, mode: PauseMode) -> Answers:
        """Pause those of ``known``, whose statuses they are, that are not paused: a pause keeps its lease. All that are there."""
        running = [member for member, status in known.replies.items() if status.generation != "paused"]
        paused = await self._fleet.pause_members(mode, running, PAUSE_S)
        for member, error in known.out.items():
            self._fleet.drop(member, error, "it does not answer")
        held = {member: reply for member, reply in known.replies.items() if member not in running}
        return Answers(
            {**held, **paused.replies}, {**known.failed, **paused.failed}, {**known.out, **paused.out}
        )

    async def _start(self, opened: _Open, there: Answers, request: BeginWeightUpdateReqInput) -> None:
        if there.failed:
            raise one_error(there.failed, among=len(there.failed) + len(there.replies))
        self._open, opened.count = opened, len(there.replies)
        try:
            await opened.session.begin(
                there, timeout=SETTLE_S, deadline_s=request.deadline_s, manifest=request.manifest
            )
        except FleetUpdateFailed as error:
            raise await self._failed(opened, error) from error
        opened.incarnations = {each: each.client.incarnation for each in opened.session.members}
        answers = await everywhere(opened.session.members, self._fleet.ask, SETTLE_S)
        sessions = [status.session for status in answers.replies.values() if status.session is not None]
        due = [each.deadline_s for each in sessions if each.deadline_s is not None]
        if due:
            left = min(*due, _NEVER) + LATE_S
            opened.timer = asyncio.get_running_loop().call_later(left, self._look)

    async def _pause(self, opened: _Open, mode: PauseMode) -> None:
        """Before the first byte, or the commit: no replica generates until the session is over."""
        await self._fleet.pause_members(mode, opened.session.members, PAUSE_S)
        opened.paused_here = True

    async def _loaded(
        self, opened: _Open, request: WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> dict[Member, Any]:
        named = msgspec.structs.replace(request, session_id=opened.session.id)
        if isinstance(request, UpdateWeightsFromDistributedReqInput):
            await self._require_all(opened)

        async def load(members: Sequence[Member], _: str, __: float) -> Mapping[Member, Any]:
            answers = await everywhere(members, sent_to(named, WeightUpdateReqOutput, buffers), None)
            if answers.failed and not answers.replies and not answers.out and uniform(answers.failed):
                raise _RefusedError(next(iter(answers.failed.values())))
            return {**answers.replies, **answers.failed, **answers.out}

        try:
            return await opened.session.load(load, _NEVER)
        except FleetUpdateFailed as error:
            raise await self._failed(opened, error) from error
        except _RefusedError as refusal:
            if opened.calls == 0 and opened.kind != "explicit":
                await opened.session.abort()
            await self._still_open()
            raise refusal.error from None

    async def _require_all(self, opened: _Open) -> None:
        """A group has every replica, so all of them must take what is broadcast, or nobody will get it."""
        began = opened.incarnations
        there = {each for each in opened.session.members if each.client.incarnation == began.get(each)}
        absent = [member.name for member in self._fleet.members if member not in there]
        if absent:
            await self.abandon()
            raise GroupError(
                f"{', '.join(absent)} has no part in the open session, as it was not there or has been restarted. The session is over: "
                "destroy the group, have all replicas join again, and send every tensor again",
                members=absent,
            )

    async def _commit(self, opened: _Open, label: str | None, message_id: str) -> WeightUpdateReqOutput:
        fleet = self._fleet
        if fleet.paused_mode is None and not opened.paused_here:
            await self._pause(opened, "in_place")
        try:
            done = await opened.session.commit(label, SETTLE_S)
        except FleetUpdateFailed as error:
            raise await self._refused_commit(opened, error) from error
        kept = Source(path=fleet.source.folder, updated=True)
        fleet.committed(done, opened.source or kept)
        fleet.awaits_update = False
        for member in fleet.dispatcher.serving:
            if member not in done.replies:
                fleet.dispatcher.fence(member, "it did not take part in an update")
        await self._over(opened)
        reply = self._combined(done.replies, message_id)
        return msgspec.structs.replace(reply, weight_version=fleet.weight_version)

    async def _refused_commit(self, opened: _Open, error: FleetUpdateFailed) -> EngineError:
        """A commit that all refuse for what is missing leaves the session open, but for one without an end of its own."""
        codes = {reason.code for reason in error.reasons.values()}
        if len(codes) == 1 and codes <= _STILL_OPEN and len(error.reasons) == len(opened.session.members):
            if opened.kind == "single":
                await opened.session.abort()
            await self._still_open()
            return next(iter(error.reasons.values()))
        await opened.session.abort()
        return await self._failed(opened, error)

    async def _failed(self, opened: _Open, error: FleetUpdateFailed) -> EngineError:
        """The session was aborted on all; what the caller is told."""
        reasons = error.reasons
        await self._over(opened)
        error.serving = [member.name for member in self._fleet.dispatcher.serving]
        error.detail["serving"] = error.serving
        by_all = len(reasons) == opened.count and uniform(reasons)
        return next(iter(reasons.values())) if by_all else error

    async def _over(self, opened: _Open) -> None:
        """It has been committed or aborted: who has no valid weights is fenced, and the others go on."""
        fleet = self._fleet
        if self._open is opened:
            self._forget()
        await fleet.after_failure()
        if opened.paused_here:
            # The engines have emptied their caches at the commit, if the update asked for that.
            await fleet.continue_members(PAUSE_S, torch_empty_cache=False)
        fleet.dispatcher.admitted()

    async def _still_open(self) -> None:
        """Notice that the engines have ended the session: its deadline has passed, or somebody has aborted it."""
        opened = self._open
        if opened is None:
            return
        answers = await everywhere(opened.session.members, self._fleet.ask, SETTLE_S)
        if not any(
            status.session is not None and status.session.kind == "explicit"
            for status in answers.replies.values()
        ):
            await self._over(opened)

    def _look(self) -> None:
        async def look() -> None:
            async with self._fleet.lock:
                await self._still_open()

        self._looking = asyncio.ensure_future(look())

    def _forget(self) -> None:
        if self._open is not None and self._open.timer is not None:
            self._open.timer.cancel()
        self._open = None

    async def _aborted_elsewhere(self, request: EndWeightUpdateReqInput) -> WeightUpdateReqOutput:
        """No session is open here; one may be open on engines, by somebody who talks to them directly."""
        answers = await everywhere(self._fleet.present, sent_to(request, WeightUpdateReqOutput), None)
        if answers.replies:
            answers.failed.clear()
        reply: WeightUpdateReqOutput = combined_answer(answers, self._fleet.position, self._fleet.tp)
        await self._fleet.after_failure()
        return reply

    async def _as_it_is(self, message_id: str, *, written: int) -> WeightUpdateReqOutput:
        """The reply to an abort."""
        status = await self._fleet.combined("")
        return WeightUpdateReqOutput(
            id=message_id,
            committed=False,
            weights=status.weights,
            weights_epoch=status.weights_epoch,
            weight_version=status.weight_version,
            written_tensors=written,
            written_bytes=0,
            changed_tensors=0,
            cast_tensors=0,
            skipped_tensors=0,
            flushed=False,
            stages=StageTimes(),
        )

    def _combined(self, replies: Mapping[Member, Any], message_id: str) -> WeightUpdateReqOutput:
        answers = Answers(replies=dict(replies))
        reply: WeightUpdateReqOutput = combined_answer(answers, self._fleet.position, self._fleet.tp)
        epoch, label = self._fleet.weights_epoch, self._fleet.weight_version
        return msgspec.structs.replace(reply, id=message_id, weights_epoch=epoch, weight_version=label)


def _route(request: WeightUpdateOptions) -> tuple[Any, ...]:
    return type(request), getattr(request, "group_name", None), request.weight_version
