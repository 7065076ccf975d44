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

All methods but ``carry_out`` and ``status`` need the group's lock.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from ... import io_struct as wire
from ...transfer.weight_delta import is_delta
from .. import exceptions as errors
from .combining import one_error, uniform
from .members import Member
from .recovery import ASK_S
from .session import PAUSE_S, Answers, FleetUpdateFailed, Session, Source, everywhere

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


class Updates:
    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self.session: Session | None = None
        """The open session."""

    def status(self) -> wire.SessionStatus | None:
        opened = self.session
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

    async def carry_out(self, request: wire.Request, buffers: Sequence[memoryview]) -> Any:
        """Begin or end a session, roll back, or load weights and commit if the call is the last one."""
        fleet = self._fleet
        async with fleet.weights_lock, fleet.lock:
            if isinstance(request, wire.BeginWeightUpdateReqInput):
                return await self._begin(request)
            if isinstance(request, wire.EndWeightUpdateReqInput):
                return await self._end(request)
            if isinstance(request, wire.RollbackWeightsReqInput):
                return await self._rolled_back(request)
            assert isinstance(request, wire.WeightUpdateOptions)
            async with fleet.groups.used_by(request):
                return await self._load(request, buffers)

    async def give_up(self, request: wire.WeightUpdateOptions) -> None:
        """Abort the session of ``request``, which cannot be carried out, nor can what would follow."""
        with suppress(errors.NoSession, errors.SessionOpen):
            if self._joined(request) is not None:
                await self.abandon()

    def forget(self) -> None:
        """Forget the open session; engines abort it when their client is gone."""
        if self.session is not None and self.session.timer is not None:
            self.session.timer.cancel()
        self.session = None

    async def abandon(self) -> None:
        """Abort the open session, if there is one."""
        if self.session is not None:
            await self.session.abort()
            await self._over(self.session)

    async def settle(self) -> None:
        """Commit an implicit session, before a continue or a flush. Raises as :meth:`carry_out`."""
        if self.session is not None and self.session.kind == "implicit":
            await self._still_open()
            if self.session is not None:
                await self._commit(self.session, None, "")

    async def _rolled_back(self, request: wire.RollbackWeightsReqInput) -> wire.WeightUpdateReqOutput:
        await self._still_open()
        if self.session is not None:
            raise _is_open(self.session)
        return self._combined((await self._fleet.rolled_back(request)).replies, request.id)

    async def _begin(self, request: wire.BeginWeightUpdateReqInput) -> wire.BeginWeightUpdateReqOutput:
        await self._still_open()
        if self.session is not None:
            raise _is_open(self.session)
        fleet = self._fleet
        answers = await everywhere(fleet.asked, fleet.ask, SETTLE_S)
        fleet.notice_continued(answers)
        opened = Session(verify=fleet.verify, kind="explicit", owner=request.owner, id=request.id)
        await self._start(opened, answers, request)
        return wire.BeginWeightUpdateReqOutput(
            id=request.id, session_id=opened.id, weights_epoch=fleet.weights_epoch
        )

    async def _load(
        self, request: wire.WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> wire.WeightUpdateReqOutput:
        request, opened = self._of_members(request), self._joined(request)
        if opened is None:
            opened = await self._opened(request)
        elif request.delta is None and not opened.paused_here and self._fleet.paused_mode is None:
            await self._pause(opened, _pause_mode(request))
        opened.pause_mode = _pause_mode(request)
        if isinstance(request, wire.UpdateWeightsFromDistributedReqInput):
            await self._require_all(opened)
        replies = await self._loaded(opened, request, buffers)
        reply = self._combined(replies, request.id)
        opened.calls += 1
        opened.tensors += reply.written_tensors
        opened.source = Source(_whole_folder(request), updated=True)
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
        opened, forced = self.session, request.force
        if opened is None and forced:
            return await self._aborted_elsewhere(request)
        if opened is None or (not forced and request.session_id not in (None, opened.id)):
            raise _not_open(request.session_id)
        if request.session_id is None and opened.kind == "explicit" and not forced:
            raise _is_open(opened)
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
            digest=status.digest,
            written_tensors=opened.tensors,
            written_bytes=0,
            changed_tensors=0,
            cast_tensors=0,
            skipped_tensors=0,
            flushed=False,
            stages=wire.StageTimes(),
        )

    def _of_members(self, request: wire.WeightUpdateOptions) -> wire.WeightUpdateOptions:
        """Return a delta as members take it: the group's epoch, which is none of theirs, is compared here."""
        if request.delta is None or request.delta.base_epoch is None:
            return request
        epoch = self._fleet.weights_epoch
        if request.delta.base_epoch != epoch:
            raise errors.BaseMismatch(
                f"the delta is of weights epoch {request.delta.base_epoch}, the weights are those of {epoch}",
                base_epoch=request.delta.base_epoch,
                got=epoch,
                weights_epoch=epoch,
            )
        base = msgspec.structs.replace(request.delta, base_epoch=None)
        return msgspec.structs.replace(request, delta=base)

    def _joined(self, request: wire.WeightUpdateOptions) -> Session | None:
        """Return the open session if the call belongs to it, or None if none is open."""
        opened, name = self.session, request.session_id
        if name is not None and (opened is None or name != opened.id):
            raise _not_open(name)
        if opened is None or name is not None:
            return opened
        if opened.kind == "explicit" or opened.route != _route(request):
            raise _is_open(opened)
        return opened

    async def _opened(self, request: wire.WeightUpdateOptions) -> Session:
        """Open a session for ``request``, on replicas that are paused for it unless they are already."""
        fleet = self._fleet
        if not fleet.present:
            raise errors.EngineRestarting("no replica is there now")
        known = await everywhere(fleet.present, fleet.ask, SETTLE_S)
        fleet.notice_continued(known)
        valid = any(status.weights == "valid" for member, status in known.replies.items() if member.serves)
        single = isinstance(request, _WHOLE) or (fleet.paused_mode is None and valid)
        staged = request.delta is not None and fleet.paused_mode is None
        opened = Session(
            verify=fleet.verify,
            kind="single" if single else "implicit",
            owner=request.owner,
            route=_route(request),
            paused_here=fleet.paused_mode is None and not staged,
        )
        # a pause keeps its lease: those that are paused are not paused again
        running = [member for member, status in known.replies.items() if status.generation != "paused"]
        if staged:  # generation goes on until the commit
            running = []
        paused = await fleet.pause_members(fleet.paused_mode or _pause_mode(request), running, PAUSE_S)
        fleet.dispatcher.drop(known.out, "it does not answer")
        held = {member: reply for member, reply in known.replies.items() if member not in running}
        there = Answers(held | paused.replies, known.failed | paused.failed, known.out | paused.out)
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

    async def _start(self, opened: Session, there: Answers, request: wire.BeginWeightUpdateReqInput) -> None:
        if there.failed:
            raise one_error(there.failed, among=len(there.failed) + len(there.replies))
        self.session = opened
        try:
            await opened.begin(
                there, timeout=SETTLE_S, deadline_s=request.deadline_s, manifest=request.manifest
            )
        except FleetUpdateFailed as error:
            raise await self._failed(opened, error) from error
        answers = await everywhere(opened.members, self._fleet.ask, SETTLE_S)
        sessions = [status.session for status in answers.replies.values() if status.session is not None]
        due = [each.deadline_s for each in sessions if each.deadline_s is not None]
        if due:
            left = min(*due, _LONGEST_S) + LATE_S
            opened.timer = asyncio.get_running_loop().call_later(left, self._look)

    async def _pause(self, opened: Session, mode: wire.PauseMode) -> None:
        await self._fleet.pause_members(mode, opened.members, PAUSE_S)
        opened.paused_here = True

    async def _loaded(
        self, opened: Session, request: wire.WeightUpdateOptions, buffers: Sequence[memoryview]
    ) -> dict[Member, Any]:
        own = msgspec.structs.replace(request, session_id=opened.id)
        answers = await self._fleet.send(opened.members, own, wire.WeightUpdateReqOutput, buffers)
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

    async def _require_all(self, opened: Session) -> None:
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

    async def _commit(
        self, opened: Session, label: str | None, message_id: str
    ) -> wire.WeightUpdateReqOutput:
        fleet = self._fleet
        if fleet.paused_mode is None and not opened.paused_here:
            await self._pause(opened, opened.pause_mode)
        try:
            done = await opened.commit(label, SETTLE_S)
        except FleetUpdateFailed as error:
            raise await self._refused_commit(opened, error) from error
        fleet.committed(done, opened.source or Source(fleet.source.folder, updated=True))
        await self._over(opened, committed=True)
        return self._combined(done.replies, message_id)

    async def _refused_commit(self, opened: Session, error: FleetUpdateFailed) -> errors.EngineError:
        """Return the error of a commit; if all refuse because tensors are missing, the session stays open."""
        codes = {reason.code for reason in error.reasons.values()}
        if len(codes) == 1 and codes <= _LEAVE_OPEN and len(error.reasons) == len(opened.members):
            if opened.kind == "single":
                await opened.abort()
            await self._still_open()
            return next(iter(error.reasons.values()))
        return await self._failed(opened, error)

    async def _failed(self, opened: Session, error: FleetUpdateFailed) -> errors.EngineError:
        await opened.abort()
        await self._over(opened)
        error.still_serve(self._fleet.dispatcher.serving)
        by_all = len(error.reasons) == opened.count and uniform(error.reasons)
        return next(iter(error.reasons.values())) if by_all else error

    async def _over(self, opened: Session, *, committed: bool = False) -> None:
        """Forget the session; the engines have emptied their caches at the commit, if that was asked for."""
        if self.session is opened:
            self.forget()
        await self._fleet.over(opened, committed=committed, torch_empty_cache=False)

    async def _still_open(self) -> None:
        """Notice that the engines have ended the session, at its deadline or by an abort of somebody else."""
        opened = self.session
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

        self._fleet.begin_work(look())

    async def _aborted_elsewhere(self, request: wire.EndWeightUpdateReqInput) -> wire.WeightUpdateReqOutput:
        answers = await self._fleet.send(self._fleet.present, request, wire.WeightUpdateReqOutput)
        if answers.replies:
            answers.failed.clear()
        reply: wire.WeightUpdateReqOutput = self._fleet.combine(answers)
        await self._fleet.fence_invalid()
        return reply

    def _combined(self, replies: dict[Member, Any], message_id: str) -> wire.WeightUpdateReqOutput:
        reply: wire.WeightUpdateReqOutput = self._fleet.combine(Answers(replies))
        epoch, label = self._fleet.weights_epoch, self._fleet.weight_version
        return msgspec.structs.replace(reply, id=message_id, weights_epoch=epoch, weight_version=label)


def _whole_folder(request: wire.WeightUpdateOptions) -> str | None:
    """Return the folder from which a member can be brought back to the weights, if there is one."""
    folder = getattr(request, "model_path", None)
    return None if folder is None or is_delta(folder) else folder


def _route(request: wire.WeightUpdateOptions) -> tuple[Any, ...]:
    return type(request), getattr(request, "group_name", None), request.weight_version


def _pause_mode(request: wire.WeightUpdateOptions) -> wire.PauseMode:
    return "retract" if request.flush_cache else "in_place"


def _not_open(name: str | None) -> errors.NoSession:
    return errors.NoSession(f"the weight session{'' if name is None else f' {name}'} is not open")


def _is_open(opened: Session) -> errors.SessionOpen:
    age = monotonic() - opened.began
    return errors.SessionOpen(
        f"a weight session ({opened.kind}) has been open for {age:.1f} s: name it, or end it first",
        kind=opened.kind,
        age_s=age,
        session_id=opened.id,
    )
