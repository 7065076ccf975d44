"""``GroupClient``: the commands of one engine, on several replicas.

Invariants:
- What changes weights, pauses or membership holds the group's lock; status, aborts and waiting never need it.
  Only what moves weights or their memory waits for a replica that is being brought back.
- A refusal by any replica, with its name, is the answer; what others did stays. Commands can be sent again.
- A replica that has ended or does not answer is taken out of routing and not waited for.
- A command runs to its end even if its caller leaves.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ... import io_struct as wire
from ..connection.async_channel import Result
from ..exceptions import EngineError
from .dispatcher import GenerationClient, beside

if TYPE_CHECKING:
    from .replicas import ReplicaFleet

_OF_ONE = wire.FetchResultReqInput | wire.ScoreReqInput | wire.SendWeightsReqInput | wire.ShutdownReqInput
"""Calls that concern one engine."""


class GroupClient(GenerationClient):
    """Replicas as one engine: a message of a command goes to those that it concerns, and has one reply."""

    def __init__(self, group: "ReplicaFleet") -> None:
        super().__init__(group.dispatcher, group.adapters, owner=group.owner)
        self._group = group

    def start(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        if isinstance(request, _OF_ONE):
            return super().start(request, expects, buffers)
        self._dispatcher.require_open()
        self._sign(request)
        work = self._carry_out_on_all(request, expects, buffers)
        lease = self._group.lease
        if lease is not None and isinstance(request, wire.ControlRequest) and request.owner == self.owner:
            work = lease.renewed_by(work)
        return beside(work)

    async def _carry_out_on_all(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview]
    ) -> Any:
        group = self._group
        match request:
            case (
                wire.WeightUpdateOptions()
                | wire.BeginWeightUpdateReqInput()
                | wire.EndWeightUpdateReqInput()
                | wire.RollbackWeightsReqInput()
            ):
                return await group.updates.carry_out(request, buffers)
            case wire.PauseGenerationReqInput():
                async with group.lock:
                    answers = await group.send(group.asked, request, expects)
                    if answers.replies:
                        group.paused_by(request.mode, request.lease_s, request.on_lease_expiry)
                    return group.combine(answers)
            case wire.ContinueGenerationReqInput():
                async with group.lock:
                    await group.updates.settle()
                    answers = await group.send(group.asked, request, expects)
                    if answers.replies:
                        group.continued()
                    group.dispatcher.place_waiting()
                    return group.combine(answers)
            case wire.FlushCacheReqInput():
                async with group.lock:
                    await group.updates.settle()
                answers = await group.send(group.asked, request, expects)
                group.dispatcher.router.forget()
                return group.combine(answers)
            case wire.ReleaseMemoryOccupationReqInput() | wire.ResumeMemoryOccupationReqInput():
                async with group.weights_lock, group.lock:
                    if isinstance(request, wire.ReleaseMemoryOccupationReqInput):
                        return await self._release(request)
                    reply = group.combine(await group.send(group.present, request, expects))
                    group.released = set(reply.released_tags)
                    return reply
            case wire.LoadAdapterReqInput() | wire.UnloadAdapterReqInput():
                return await group.adapters.carry_out(request, buffers, group.groups.used_by(request))
            case wire.InitWeightsUpdateGroupReqInput():
                return group.combine(await group.groups.join(request))
            case wire.DestroyWeightsUpdateGroupReqInput():
                return group.combine(await group.groups.leave(request))
        return await self._ask_all(request, expects)

    async def _ask_all(self, request: wire.Request, expects: type[wire.Message]) -> Any:
        group = self._group
        if isinstance(request, wire.GetStatusReqInput):
            return await group.combined(request.owner)
        if isinstance(request, wire.AbortReq):
            return await self._abort_everywhere(request)
        only_first = isinstance(request, wire.GetMemoryHistoryReqInput | wire.GetWeightsManifestReqInput)
        answers = await group.send(group.asked[: 1 if only_first else None], request, expects)
        if isinstance(request, wire.WeightsCheckerReqInput) and request.action == "reset_tensors":
            group.awaits_update = True
        return group.combine(answers)

    async def _abort_everywhere(self, request: wire.AbortReq) -> wire.AbortReqOutput:
        """Abort generations of this group and of other clients of its engines."""
        group, expects = self._group, wire.AbortReqOutput
        own: wire.AbortReqOutput = await self._dispatcher.start_call(request, expects)
        replies = (await group.send(group.present, request, expects)).replies.values()
        return msgspec.structs.replace(own, aborted=max(own.aborted, sum(each.aborted for each in replies)))

    async def _release(self, request: wire.ReleaseMemoryOccupationReqInput) -> Any:
        group = self._group
        group.released |= set(request.tags or ("weights", "kv_cache", "cuda_graph"))
        status = None
        try:
            replies = await group.send(group.present, request, wire.ReleaseMemoryOccupationReqOutput)
            reply = group.combine(replies)
        finally:
            with suppress(EngineError):
                status = await group.combined("")
            group.released = set() if status is None else set(status.released_tags)
        if "weights" in group.released and status is not None and not status.weights_cpu_backup:
            group.awaits_update = True
        return reply
