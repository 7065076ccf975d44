"""Weight sessions of several replicas, for clients that take them for one engine.

Invariants:
- Every call loads within one explicit session of the same name on every replica; the label changes on all of
  them, or on none (``session.py``). No replica generates between the first commit and the last.
- A client sees the kinds of one engine: ``explicit`` from ``begin`` to ``end``; ``implicit`` for calls
  without a session while paused, or while no replica has valid weights, committed when everything is written,
  at continue, at a flush or at ``end``; ``single`` otherwise, and for a whole checkpoint.
- A refusal by all replicas in the same words is the request's fault: it changes nothing, as on one engine.
  Another refusal aborts the session on all; replicas that had written are fenced.
- A pause that an update has made ends with it; a pause that was there before stays.

All methods but ``carry_out``, ``status`` and ``close`` need the group's lock.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ... import io_struct as wire
from .. import exceptions as errors
from ..connection.async_channel import wait_for
from .combining import one_error, uniform
from .fleet import PAUSE_S
from .members import Member
from .recovery import ASK_S, Source
from .session import Answers, FleetUpdateFailed, Session, Verify, everywhere

if TYPE_CHECKING:
    from .replicas import ReplicaFleet

SETTLE_S = 60.0
"""Seconds that replicas may take to open a session, and to say what they have loaded."""
LATE_S = 2.0
"""Seconds after the engines' own deadline at which a session is looked at."""
_LONGEST_S = 1e9
_WHOLE = (wire.UpdateWeightFromDiskReqInput, wire.UpdateWeightsFromCheckpointEngineReqInput)
"""Calls whose sender says that they are complete."""
_LEAVE_OPEN = {wire.ErrorCode.WEIGHT_MISMATCH, wire.ErrorCode.NOT_IDLE}
"""Refusals of a commit that leave the session open."""


class _Open(Session):
    def __init__(
        self,
        verify: Verify,
        kind: Literal["explicit", "implicit", "single"],
        owner: str | None,
        *,
        session_id: str | None = None,
        route: tuple[Any, ...] = (),
        paused_here: bool = False,
    ) -> None:
        super().__init__(verify=verify, session_id=session_id)
        self.kind, self.owner = kind, owner
        self.route = route
        """Transport, group and label, in which the calls of an implicit session must agree."""
        self.paused_here = paused_here
        """True if the update has paused the replicas."""
        self.began = monotonic()
        self.incarnations: dict[Member, str | None] = {}
        """Processes of the replicas at its begin: a later one does not know the session."""
        self.count = self.calls = self.tensors = 0
        """Replicas at its begin, loading calls, and tensors that these have written."""
        self.source: Source | None = None
        self.missing: set[str] | None = None
        """Tensors of an implicit session that no call has named, or None if unknown. A hint: the commit
        decides, since engines may store other names, and pieces count as whole tensors."""
        self.timer: asyncio.TimerHandle | None = None


class Updates:
    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self._open: _Open | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def status(self) -> wire.SessionStatus | None:
        opened = self._open
        if opened is None:
            return None
        due = None if opened.timer is None else opened.timer.when() - LATE_S
        return wire.SessionStatus(
            kind=opened.kind,
            session_id=opened.id,
            owner=opened.owner,
            age_s=monotonic() - opened.began,
            deadline_s=None if due is None else due - asyncio.get_running_loop().time(),
            written_tensors=opened.tensors,
        )

    def close(self) -> None:
        """Forget the session; the engines abort it when their client is gone."""
        self._forget()
        if self._looking is not None:
            self._looking.cancel()

    def leave_paused(self) -> None:
        """Leave the replicas paused after the open update: another owner has paused them."""
        if self._open is not None:
            self._open.paused_here = False

    async def carry_out(self, request: wire.Request, buffers: Sequence[memoryview]) -> Any:
        """Begin or end a session, or load weights and commit if the call is the last one."""
        fleet = self._fleet
        async with fleet.weights_lock, fleet.lock:
            if isinstance(request, wire.BeginWeightUpdateReqInput):
                return await self._begin(request)
            if isinstance(request, wire.EndWeightUpdateReqInput):
                return await self._end(request)
            assert isinstance(request, wire.WeightUpdateOptions)
            async with fleet.groups.used_by(request):
                return await self._load(request, buffers)

    async def give_up(self, request: wire.WeightUpdateOptions) -> None:
        """Abort the session of ``request``, which cannot be carried out, nor can what would follow."""
        with suppress(errors.NoSession, errors.SessionOpen):
            if self._joined(request) is not None:
                await self.abandon()

    async def abandon(self) -> None:
        if self._open is not None:
            await self._open.abort()
            await self._over(self._open)

    async def settle(self) -> None:
        """Commit an implicit session, before a continue or a flush. Raises as :meth:`carry_out`."""
        if self._open is not None and self._open.kind == "implicit":
            await self._still_open()
            if self._open is not None:
                await self._commit(self._open, None, "")

    async def _begin(self, request: wire.BeginWeightUpdateReqInput) -> wire.BeginWeightUpdateReqOutput:
        await self._still_open()
        if self._open is not None:
            raise self._is_open(self._open)
        fleet = self._fleet
        answers = await everywhere(fleet.asked, fleet.ask, SETTLE_S)
        fleet.notice_continued(answers)
        opened = _Open(fleet.verify, "explicit", request.owner, session_id=request.id)
        await self._start(opened, answers, request)
        return wire.BeginWeightUpdateReqOutput(
            id=request.id, session_id=opened.id, weights_epoch=fleet.weights_epoch
        )

    async def _load(
        self, request: wire.WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> wire.WeightUpdateReqOutput:
        opened = self._joined(request)
        if opened is None:
            opened = await self._opened(request)
        elif not opened.paused_here and self._fleet.paused_mode is None:
            await self._pause(opened, "retract" if request.flush_cache else "in_place")
        if isinstance(request, wire.UpdateWeightsFromDistributedReqInput):
            await self._require_all(opened)
        replies = await self._loaded(opened, request, buffers)
        reply = self._combined(replies, request.id)
        opened.calls += 1
        opened.tensors += reply.written_tensors
        opened.source = Source(getattr(request, "model_path", None), updated=True)
        if opened.kind == "single":
            return await self._commit(opened, None, request.id)
        if opened.missing is not None:
            opened.missing -= {spec.name for spec in getattr(request, "specs", ())}
            if not opened.missing:
                with suppress(errors.WeightMismatch):  # something is missing all the same: it stays open
                    return await self._commit(opened, None, request.id)
        return msgspec.structs.replace(reply, committed=False, session_id=opened.id)

    async def _end(self, request: wire.EndWeightUpdateReqInput) -> wire.WeightUpdateReqOutput:
        if request.force and request.commit:
            raise errors.InvalidRequest("force aborts: it needs commit=false", field="force", value=True)
        opened, forced = self._open, request.force
        if opened is None and forced:
            return await self._aborted_elsewhere(request.id)
        if opened is None or (not forced and request.session_id not in (None, opened.id)):
            name = "" if request.session_id is None else f" {request.session_id}"
            raise errors.NoSession(f"the weight session{name} is not open")
        if request.session_id is None and opened.kind == "explicit" and not forced:
            raise self._is_open(opened)
        if request.commit:
            return await self._commit(opened, request.weight_version, request.id)
        await self.abandon()
        status = await self._fleet.combined("")
        return wire.WeightUpdateReqOutput(
            id=request.id,
            committed=False,
            weights=status.weights,
            weights_epoch=status.weights_epoch,
            weight_version=status.weight_version,
            written_tensors=opened.tensors,
            written_bytes=0,
            changed_tensors=0,
            cast_tensors=0,
            skipped_tensors=0,
            flushed=False,
            stages=wire.StageTimes(),
        )

    def _joined(self, request: wire.WeightUpdateOptions) -> _Open | None:
        """Return the open session if the call belongs to it, or None if none is open."""
        opened, name = self._open, request.session_id
        if name is not None and (opened is None or name != opened.id):
            raise errors.NoSession(f"the weight session {name} is not open")
        if opened is None or name is not None:
            return opened
        if opened.kind == "explicit" or opened.route != _route(request):
            raise self._is_open(opened)
        return opened

    def _is_open(self, opened: _Open) -> errors.SessionOpen:
        age = monotonic() - opened.began
        return errors.SessionOpen(
            f"a weight session ({opened.kind}) has been open for {age:.1f} s: name it, or end it first",
            kind=opened.kind,
            age_s=age,
            session_id=opened.id,
        )

    async def _opened(self, request: wire.WeightUpdateOptions) -> _Open:
        fleet = self._fleet
        if not fleet.present:
            raise errors.EngineRestarting("no replica is there now")
        known = await everywhere(fleet.present, fleet.ask, SETTLE_S)
        fleet.notice_continued(known)
        valid = any(status.weights == "valid" for member, status in known.replies.items() if member.serves)
        single = isinstance(request, _WHOLE) or (fleet.paused_mode is None and valid)
        opened = _Open(
            fleet.verify,
            "single" if single else "implicit",
            request.owner,
            route=_route(request),
            paused_here=fleet.paused_mode is None,
        )
        mode: wire.PauseMode = "retract" if request.flush_cache else "in_place"
        there = await self._held(known, fleet.paused_mode or mode)
        await self._start(opened, there, wire.BeginWeightUpdateReqInput(id=opened.id))
        if not single:
            for member in opened.members:  # the first may have ended since
                with suppress(errors.EngineError):
                    manifest = await member.client.weights_manifest(
                        component=request.component, timeout=ASK_S
                    )
                    opened.missing = {tensor.name for tensor in manifest.tensors}
                    break
        return opened

    async def _held(self, known: Answers, mode: wire.PauseMode) -> Answers:
        """Pause the replicas of ``known``, statuses, that are not paused yet: a pause keeps its lease."""
        running = [member for member, status in known.replies.items() if status.generation != "paused"]
        paused = await self._fleet.pause_members(mode, running, PAUSE_S)
        self._fleet.dispatcher.drop(known.out, "it does not answer")
        held = {member: reply for member, reply in known.replies.items() if member not in running}
        return Answers(held | paused.replies, known.failed | paused.failed, known.out | paused.out)

    async def _start(self, opened: _Open, there: Answers, request: wire.BeginWeightUpdateReqInput) -> None:
        if there.failed:
            raise one_error(there.failed, among=len(there.failed) + len(there.replies))
        self._open, opened.count = opened, len(there.replies)
        try:
            await opened.begin(
                there, timeout=SETTLE_S, deadline_s=request.deadline_s, manifest=request.manifest
            )
        except FleetUpdateFailed as error:
            raise await self._failed(opened, error) from error
        opened.incarnations = {each: each.client.incarnation for each in opened.members}
        answers = await everywhere(opened.members, self._fleet.ask, SETTLE_S)
        sessions = [status.session for status in answers.replies.values() if status.session is not None]
        due = [each.deadline_s for each in sessions if each.deadline_s is not None]
        if due:
            left = min(*due, _LONGEST_S) + LATE_S
            opened.timer = asyncio.get_running_loop().call_later(left, self._look)

    async def _pause(self, opened: _Open, mode: wire.PauseMode) -> None:
        await self._fleet.pause_members(mode, opened.members, PAUSE_S)
        opened.paused_here = True

    async def _loaded(
        self, opened: _Open, request: wire.WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> dict[Member, Any]:
        async def load(member: Member) -> Any:
            own = msgspec.structs.replace(request, session_id=opened.id)
            return await wait_for(member.client.start(own, wire.WeightUpdateReqOutput, buffers), own.id, None)

        answers = await everywhere(opened.members, load)
        refused = answers.failed
        if refused and not answers.replies and not answers.out and uniform(refused):
            if opened.calls == 0 and opened.kind != "explicit":
                await opened.abort()
            await self._still_open()
            raise next(iter(refused.values()))
        try:
            opened.settle(answers)
        except FleetUpdateFailed as error:
            raise await self._failed(opened, error) from error
        return answers.replies

    async def _require_all(self, opened: _Open) -> None:
        began = opened.incarnations
        there = {each for each in opened.members if each.client.incarnation == began.get(each)}
        absent = [member.name for member in self._fleet.members if member not in there]
        if absent:
            await self.abandon()
            raise errors.GroupError(
                f"{', '.join(absent)} has no part in the open session, as it was not there or has been "
                "restarted. The session is over: destroy the group, have all replicas join again, and send "
                "every tensor again",
                members=absent,
            )

    async def _commit(self, opened: _Open, label: str | None, message_id: str) -> wire.WeightUpdateReqOutput:
        fleet = self._fleet
        if fleet.paused_mode is None and not opened.paused_here:
            await self._pause(opened, "in_place")
        try:
            done = await opened.commit(label, SETTLE_S)
        except FleetUpdateFailed as error:
            raise await self._refused_commit(opened, error) from error
        fleet.committed(done, opened.source or Source(fleet.source.folder, updated=True))
        fleet.awaits_update = False
        for member in fleet.dispatcher.serving:
            if member not in done.replies:
                fleet.dispatcher.fence(member, "it did not take part in an update")
        await self._over(opened)
        return self._combined(done.replies, message_id)

    async def _refused_commit(self, opened: _Open, error: FleetUpdateFailed) -> errors.EngineError:
        """Return the error of a commit; if all refuse because tensors are missing, the session stays open."""
        codes = {reason.code for reason in error.reasons.values()}
        if len(codes) == 1 and codes <= _LEAVE_OPEN and len(error.reasons) == len(opened.members):
            if opened.kind == "single":
                await opened.abort()
            await self._still_open()
            return next(iter(error.reasons.values()))
        return await self._failed(opened, error)

    async def _failed(self, opened: _Open, error: FleetUpdateFailed) -> errors.EngineError:
        await opened.abort()
        await self._over(opened)
        error.still_serve(self._fleet.dispatcher.serving)
        by_all = len(error.reasons) == opened.count and uniform(error.reasons)
        return next(iter(error.reasons.values())) if by_all else error

    async def _over(self, opened: _Open) -> None:
        """Fence replicas without valid weights, and continue the others if the session has paused them."""
        fleet = self._fleet
        if self._open is opened:
            self._forget()
        await fleet.after_failure()
        if opened.paused_here:
            # The engines have emptied their caches at the commit, if the update asked for that.
            await fleet.continue_members(PAUSE_S, torch_empty_cache=False)
        fleet.dispatcher.place_waiting()

    async def _still_open(self) -> None:
        """Notice that the engines have ended the session, at its deadline or by an abort of somebody else."""
        opened = self._open
        if opened is None:
            return
        answers = await everywhere(opened.members, self._fleet.ask, SETTLE_S)
        sessions = [status.session for status in answers.replies.values()]
        if not any(each is not None and each.kind == "explicit" for each in sessions):
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

    async def _aborted_elsewhere(self, message_id: str) -> wire.WeightUpdateReqOutput:
        answers = await everywhere(
            self._fleet.present,
            lambda member: member.client.end_weight_update(commit=False, force=True, message_id=message_id),
            None,
        )
        if answers.replies:
            answers.failed.clear()
        reply: wire.WeightUpdateReqOutput = self._fleet.combine(answers)
        await self._fleet.after_failure()
        return reply

    def _combined(self, replies: dict[Member, Any], message_id: str) -> wire.WeightUpdateReqOutput:
        reply: wire.WeightUpdateReqOutput = self._fleet.combine(Answers(replies))
        epoch, label = self._fleet.weights_epoch, self._fleet.weight_version
        return msgspec.structs.replace(reply, id=message_id, weights_epoch=epoch, weight_version=label)


def _route(request: wire.WeightUpdateOptions) -> tuple[Any, ...]:
    return type(request), getattr(request, "group_name", None), request.weight_version
