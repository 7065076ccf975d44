"""``GroupClient``: the commands of one engine, on several replicas.

Invariants:
- What changes weights, pauses or membership holds the group's lock; status, aborts and waiting never need it.
  Only what moves weights or their memory waits for a replica that is being brought back.
- A refusal by any replica, with its name, is the answer; what others did stays. Commands can be sent again.
- A replica that has ended or does not answer is taken out of routing and not waited for.
- A command runs to its end even if its caller leaves.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from ... import io_struct as wire
from ...io_struct.control import LeaseAction
from ...io_struct.weights import DEFAULT_GROUP_NAME
from ..connection.async_channel import Result, wait_for
from ..connection.async_client import AsyncSchedulerClient
from ..connection.client_options import seconds, tags_of
from ..exceptions import EngineError
from .dispatcher import GenerationClient

if TYPE_CHECKING:
    from .replicas import ReplicaFleet

MethodT = TypeVar("MethodT", bound=Callable[..., Coroutine[Any, Any, Any]])


def _command(method: MethodT) -> MethodT:
    """Give a method a ``timeout`` for the wait, not the command, and have it renew the owner's lease."""

    @functools.wraps(method)
    async def run(self: "GroupClient", *args: Any, timeout: float | None = None, **options: Any) -> Any:
        self._dispatcher.require_open()
        task = self._begun(method(self, *args, **options), options.get("owner"))
        name = options.get("message_id") or method.__name__
        return await wait_for(task, name, seconds("timeout", timeout))

    return cast("MethodT", run)


def _on_all(method: str, count: int | None = None) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def run(self: "GroupClient", *args: Any, **options: Any) -> Any:
        return await self._group.call(self._group.asked[:count], method, *args, **options)

    return _command(functools.wraps(getattr(AsyncSchedulerClient, method))(run))


class GroupClient(GenerationClient):
    """Replicas as one engine. ``options`` of its methods are keywords of :class:`AsyncSchedulerClient`."""

    def __init__(self, group: "ReplicaFleet") -> None:
        super().__init__(group.dispatcher, owner=group.owner)
        self._group = group

    start_profile = _on_all("start_profile")
    stop_profile = _on_all("stop_profile")
    memory_history = _on_all("memory_history", 1)
    weights_manifest = _on_all("weights_manifest", 1)
    _renew = _on_all("renew_pause_lease")

    async def renew_pause_lease(self, owner: str | None = None, **options: Any) -> Any:
        return await self._renew(owner=owner, **options)

    def start(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Start a call of a weight session on all replicas, or a request on one of them."""
        if not isinstance(
            request, wire.BeginWeightUpdateReqInput | wire.EndWeightUpdateReqInput | wire.WeightUpdateOptions
        ):
            return super().start(request, expects, buffers)
        self._dispatcher.require_open()
        self._sign(request)
        return self._begun(self._group.updates.carry_out(request, buffers), request.owner)

    @_command
    async def pause(
        self,
        mode: wire.PauseMode = "abort",
        *,
        lease_s: float | None = None,
        on_lease_expiry: LeaseAction = "continue",
        **options: Any,
    ) -> Any:
        group = self._group
        options |= {"lease_s": lease_s, "on_lease_expiry": on_lease_expiry}
        async with group.lock:
            answers = await group.send(group.asked, "pause", mode, **options)
            if answers.replies:
                group.paused_by(mode, lease_s, on_lease_expiry)
            return group.combine(answers)

    @_command
    async def continue_generation(self, **options: Any) -> Any:
        """Continue the replicas that serve, after committing an implicit session."""
        group = self._group
        async with group.lock:
            await group.updates.settle()
            answers = await group.send(group.asked, "continue_generation", **options)
            if answers.replies:
                group.continued()
            group.dispatcher.place_waiting()
            return group.combine(answers)

    @_command
    async def flush_cache(self, **options: Any) -> Any:
        """Flush the prefix caches, after committing an implicit session."""
        group = self._group
        async with group.lock:
            await group.updates.settle()
        answers = await group.send(group.asked, "flush_cache", **options)
        group.dispatcher.router.forget()
        return group.combine(answers)

    @_command
    async def release_memory(
        self, tags: wire.MemoryTag | Sequence[wire.MemoryTag] | None = None, **options: Any
    ) -> Any:
        group = self._group
        async with group.weights_lock, group.lock:
            group.released |= set(tags_of(tags) or ("weights", "kv_cache", "cuda_graph"))
            status = None
            try:
                reply = await group.call(group.present, "release_memory", tags, **options)
            finally:
                with contextlib.suppress(EngineError):
                    status = await group.combined("")
                group.released = set() if status is None else set(status.released_tags)
            if "weights" in group.released and status is not None and not status.weights_cpu_backup:
                group.awaits_update = True
            return reply

    @_command
    async def resume_memory(
        self, tags: wire.MemoryTag | Sequence[wire.MemoryTag] | None = None, **options: Any
    ) -> Any:
        group = self._group
        async with group.weights_lock, group.lock:
            reply = await group.call(group.present, "resume_memory", tags, **options)
            group.released = set(reply.released_tags)
            return reply

    @_command
    async def check_weights(self, action: wire.CheckerAction = "checksum", **options: Any) -> Any:
        """Check the weights, which must be the same on all replicas."""
        answers = await self._group.send(self._group.asked, "check_weights", action, **options)
        if action == "reset_tensors":
            self._group.awaits_update = True
        return self._group.combine(answers)

    @_command
    async def init_weights_update_group(self, master_address: str, master_port: int, **options: Any) -> Any:
        """Have all replicas join a process group, each with its own ranks."""
        return self._group.combine(await self._group.groups.join(master_address, master_port, **options))

    @_command
    async def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP_NAME, **options: Any) -> Any:
        return self._group.combine(await self._group.groups.leave(group_name, **options))

    @_command
    async def status(self, *, owner: str | None = None, **_: Any) -> wire.GetStatusReqOutput:
        return await self._group.combined(self.owner if owner is None else owner)

    async def abort(
        self,
        rid: str | None = None,
        *,
        abort_all: bool = False,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> wire.AbortReqOutput:
        """Abort a generation or all, those of other clients of the engines included."""
        own = await super().abort(rid, abort_all=abort_all, message_id=message_id)
        work = self._group.send(self._group.present, "abort", rid, abort_all=abort_all)
        answers = await wait_for(self._begun(work, owner=""), own.id, timeout)
        by_engines = sum(each.aborted for each in answers.replies.values())
        return msgspec.structs.replace(own, aborted=max(own.aborted, by_engines))

    def _begun(self, work: Coroutine[Any, Any, Any], owner: str | None) -> Result:
        lease = self._group.lease
        of_owner = owner is None or owner == self._group.owner
        task = asyncio.ensure_future(work if lease is None or not of_owner else lease.renewed_by(work))
        task.add_done_callback(_seen)
        return task


def _seen(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()
