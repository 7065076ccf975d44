"""What every command does on several replicas (docs/howto/replicas.md lists how the answers are put together).

Invariants:
- What changes weights, pauses or membership has the fleet's lock; status, aborts and waiting never need it. What moves weights, or
  their memory, waits for a replica that is being brought back; pauses, continues and flushes do not.
- A refusal by any replica is the answer, with the names of those that refused; what others have done stays done. All such commands
  can be sent again.
- A replica that has ended, or says nothing, is taken out of routing and not waited for.
"""

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GetMemoryHistoryReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    GetWeightsManifestReqInput,
    InitWeightsUpdateGroupReqInput,
    Message,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    RenewPauseLeaseReqInput,
    Request,
    ResumeMemoryOccupationReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    WeightsCheckerReqInput,
    WeightUpdateOptions,
)
from ..exceptions import EngineError
from .answers import combined_answer, sent_to
from .members import Member
from .process_groups import Groups
from .session import Answers, everywhere

if TYPE_CHECKING:
    from .replicas import ReplicaFleet

Work = Coroutine[Any, Any, Any]
Handler = Callable[[Any, type[Message], Sequence[memoryview]], Work]


class Commands:
    """The commands of a server of several replicas."""

    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self._groups = Groups(fleet)
        self._handlers: dict[type[Request], Handler] = {
            PauseGenerationReqInput: self._pause,
            ContinueGenerationReqInput: self._continue,
            FlushCacheReqInput: self._flush,
            RenewPauseLeaseReqInput: self._all,
            ReleaseMemoryOccupationReqInput: self._release,
            ResumeMemoryOccupationReqInput: self._resume,
            WeightsCheckerReqInput: self._check,
            StartProfileReqInput: self._all,
            StopProfileReqInput: self._all,
            GetStatusReqInput: self._status,
            GetMemoryHistoryReqInput: self._one,
            GetWeightsManifestReqInput: self._one,
            InitWeightsUpdateGroupReqInput: self._join,
            DestroyWeightsUpdateGroupReqInput: self._leave,
            BeginWeightUpdateReqInput: self._begin,
            EndWeightUpdateReqInput: self._end,
        }

    def of(self, request: Request, expects: type[Message], buffers: Sequence[memoryview]) -> Work | None:
        """What carries out ``request``; None: it is no command."""
        handler = self._handlers.get(type(request))
        if handler is None and isinstance(request, WeightUpdateOptions):
            handler = self._update
        if handler is None:
            return None
        work, lease = handler(request, expects, buffers), self._fleet.lease
        of_owner = getattr(request, "owner", None) == self._fleet.owner
        return work if lease is None or not of_owner else lease.renewed_by(work)

    async def abort(self, request: AbortReq, ended: int) -> AbortReqOutput:
        """``ended``: samples that the fleet has ended itself. Images are the engines' own."""
        answers = await self._sent(self._fleet.present, request, AbortReqOutput)
        by_engines = sum(each.aborted for each in answers.replies.values())
        return AbortReqOutput(id=request.id, aborted=max(ended, by_engines))

    async def _all(self, request: Request, expects: type[Message], _: Sequence[memoryview]) -> Any:
        return self._combined(await self._sent(self._fleet.asked, request, expects))

    async def _one(self, request: Request, expects: type[Message], _: Sequence[memoryview]) -> Any:
        return self._combined(await self._sent(self._fleet.asked[:1], request, expects))

    async def _status(
        self, request: GetStatusReqInput, _: type[Message], __: Sequence[memoryview]
    ) -> GetStatusReqOutput:
        reply = await self._fleet.combined(request.owner)
        return msgspec.structs.replace(reply, id=request.id)

    async def _pause(
        self, request: PauseGenerationReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        fleet = self._fleet
        async with fleet.lock:
            answers = await self._sent(fleet.asked, request, expects)
            if answers.replies:
                fleet.paused_by(request)
            return self._combined(answers)

    async def _continue(
        self, request: ContinueGenerationReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        fleet = self._fleet
        async with fleet.lock:
            await fleet.updates.settle()
            answers = await self._sent(fleet.asked, request, expects)
            if answers.replies:
                fleet.continued()
            fleet.dispatcher.admitted()
            return self._combined(answers)

    async def _flush(
        self, request: FlushCacheReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        async with self._fleet.lock:
            await self._fleet.updates.settle()
        answers = await self._sent(self._fleet.asked, request, expects)
        self._fleet.dispatcher.router.forget()
        return self._combined(answers)

    async def _release(
        self, request: ReleaseMemoryOccupationReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        fleet = self._fleet
        async with fleet.weights_lock, fleet.lock:
            fleet.released |= set(request.tags or ("weights", "kv_cache", "cuda_graph"))
            try:
                reply = self._combined(await self._sent(fleet.present, request, expects))
            finally:
                status = await self._known_status()
                fleet.released = set() if status is None else set(status.released_tags)
            if "weights" in fleet.released and status is not None and not status.weights_cpu_backup:
                fleet.awaits_update = True
            return reply

    async def _resume(
        self, request: ResumeMemoryOccupationReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        fleet = self._fleet
        async with fleet.weights_lock, fleet.lock:
            reply = self._combined(await self._sent(fleet.present, request, expects))
            fleet.released = set(reply.released_tags)
            return reply

    async def _check(
        self, request: WeightsCheckerReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        answers = await self._sent(self._fleet.asked, request, expects)
        if request.action == "reset_tensors":
            self._fleet.awaits_update = True
        return self._combined(answers)

    async def _join(
        self, request: InitWeightsUpdateGroupReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        return self._combined(await self._groups.join(request, expects))

    async def _leave(
        self, request: DestroyWeightsUpdateGroupReqInput, expects: type[Message], _: Sequence[memoryview]
    ) -> Any:
        return self._combined(await self._groups.leave(request, expects))

    async def _begin(
        self, request: BeginWeightUpdateReqInput, _: type[Message], __: Sequence[memoryview]
    ) -> Any:
        async with self._fleet.weights_lock, self._fleet.lock:
            return await self._fleet.updates.begin(request)

    async def _update(
        self, request: WeightUpdateOptions, _: type[Message], buffers: Sequence[memoryview]
    ) -> Any:
        async with self._fleet.weights_lock, self._fleet.lock, self._groups.used_by(request):
            return await self._fleet.updates.load(request, buffers)

    async def _end(self, request: EndWeightUpdateReqInput, _: type[Message], __: Sequence[memoryview]) -> Any:
        async with self._fleet.weights_lock, self._fleet.lock:
            return await self._fleet.updates.end(request)

    async def _known_status(self) -> GetStatusReqOutput | None:
        with contextlib.suppress(EngineError):
            return await self._fleet.combined("")
        return None

    async def _sent(self, members: Sequence[Member], request: Request, expects: type[Message]) -> Answers:
        answers = await everywhere(members, sent_to(request, expects), None)
        for member, error in answers.out.items():
            self._fleet.drop(member, error, "it does not answer")
        return answers

    def _combined(self, answers: Answers) -> Any:
        return combined_answer(answers, self._fleet.position, self._fleet.tp)
