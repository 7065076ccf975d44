"""The adapters of a group: every member that serves gets a version, or none does.

Invariants:
- A load is a session of its own on every member (``session.py``) whose commit changes no weights: nothing is
  paused, and every member has checked and staged the version before the first one publishes it.
- The group counts the versions: an ``adapter_epoch`` names the same version on all members.
- A name that the group does not know is refused, whatever its members have. A request goes to members that
  have its adapter, in no older version than has sampled its tokens.
- A member gets the adapters before it serves: from their folders, if these still have the same tensors, or
  from the copies that the group keeps of tensors in messages. What can be had from neither is missing there.

Methods that change something need the group's ``weights_lock``, but for ``carry_out``, which takes it.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ... import io_struct as wire
from ...transfer.shared_memory import map_memory
from ..connection.async_channel import wait_for
from ..exceptions import CheckpointError, EngineError, EngineRestarting, GroupError, UnknownAdapter
from .combining import uniform
from .dispatcher import GroupAdapter
from .members import Member
from .session import ABORT_S, OUT, SPARE_S, Answers, FleetUpdateFailed, Session, everywhere

if TYPE_CHECKING:
    from .fleet import Fleet

logger = logging.getLogger(__name__)

LOAD_S = 600.0
"""Seconds until every member has staged a version, or until one that comes back has loaded it."""
Command = wire.LoadAdapterReqInput | wire.UnloadAdapterReqInput


class Adapters:
    """Commands on the adapters of a fleet's members; ``dispatcher.adapters`` are those that it serves."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._loaded = fleet.dispatcher.adapters
        self._epoch = 0

    async def carry_out(
        self,
        request: Command,
        buffers: Sequence[memoryview],
        guard: AbstractAsyncContextManager[None],
    ) -> Any:
        """Load or unload, within ``guard``; raises FleetUpdateFailed, or what all members refuse it with."""
        fleet = self._fleet
        async with fleet.weights_lock, fleet.lock, guard:
            if isinstance(request, wire.UnloadAdapterReqInput):
                return await self._unload(request)
            if request.handle is not None:  # the memory may change after the reply
                buffers = [memoryview(map_memory(request.handle))]
                request = msgspec.structs.replace(request, handle=None)
            return await self._load(request, buffers)

    async def _load(
        self, request: wire.LoadAdapterReqInput, buffers: Sequence[memoryview]
    ) -> wire.LoadAdapterReqOutput:
        dispatcher, session = self._fleet.dispatcher, Session(verify="counts", owner=request.owner)
        if not dispatcher.serving:
            raise EngineRestarting("no engine serves now: adapters are loaded into those that do")
        away = [member.name for member in self._fleet.members if not member.serves]
        if request.group_name is not None and away:
            raise GroupError(f"a broadcast needs all engines, and {', '.join(away)} does not serve")
        self._epoch += 1
        own = msgspec.structs.replace(
            request, session_id=session.id, adapter_epoch=self._epoch, evict=self._evicted(request.name)
        )
        try:
            await session.begin(
                Answers(dict.fromkeys(dispatcher.serving)), timeout=ABORT_S, deadline_s=LOAD_S + SPARE_S
            )
            staged = await everywhere(session.members, lambda member: _sent(member, own, buffers), LOAD_S)
            session.settle(staged)
            done = await session.commit(None, ABORT_S)
        except FleetUpdateFailed as error:
            await session.abort()
            dispatcher.drop(session.out, "it did not load an adapter in time")
            error.still_serve(dispatcher.serving)
            by_all = len(error.reasons) == session.count and uniform(error.reasons)
            raise next(iter(error.reasons.values())) if by_all else error from None
        replies: list[wire.LoadAdapterReqOutput] = [staged.replies[member] for member in done.replies]
        evicted = sorted({name for reply in replies for name in reply.evicted})
        for name in evicted:
            self._forget(name)
        copies = [bytes(each) for each in buffers]
        self._loaded[request.name] = GroupAdapter(request, copies, self._epoch, replies[0].digest)
        for member in done.replies:
            member.adapters[request.name] = self._epoch
        dispatcher.drop(done.out, "it did not take part in the load of an adapter to the end")
        dispatcher.place_waiting()
        switched = sum(each.switched for each in done.replies.values())
        return msgspec.structs.replace(replies[0], evicted=evicted, switched=switched)

    async def _unload(self, request: wire.UnloadAdapterReqInput) -> wire.UnloadAdapterReqOutput:
        dispatcher = self._fleet.dispatcher
        dispatcher.require_adapter(request.name)
        self._forget(request.name)
        answers = await everywhere(dispatcher.serving, lambda member: _sent(member, request), ABORT_S)
        refused = {
            member: error
            for member, error in answers.failed.items()
            if not isinstance(error, UnknownAdapter)  # somebody else has unloaded it there
        }
        dispatcher.drop(answers.out | refused, "it does not unload an adapter")
        running = sum(reply.running for reply in answers.replies.values())
        return wire.UnloadAdapterReqOutput(id=request.id, running=running)

    def adopt(self, statuses: Mapping[Member, wire.GetStatusReqOutput]) -> None:
        """Take the adapters that members have, each in its newest version."""
        for status in statuses.values():
            for each in status.adapters:
                self._epoch = max(self._epoch, each.adapter_epoch)
                known = self._loaded.get(each.name)
                if not each.replaced and (known is None or known.epoch < each.adapter_epoch):
                    request = wire.LoadAdapterReqInput(
                        name=each.name, path=each.path or None, pinned=each.pinned
                    )
                    self._loaded[each.name] = GroupAdapter(request, [], each.adapter_epoch, each.digest)
        for member, status in statuses.items():
            member.adapters = self._had(status)

    async def restore(self) -> None:
        """Give members that serve what they lack, as one does that an update has admitted."""
        for member in self._fleet.dispatcher.serving:
            if self._loaded.keys() - member.adapters.keys():
                try:
                    await self.give(member, await self._fleet.ask(member))
                except EngineError as error:
                    self._fleet.dispatcher.drop({member: error}, "it cannot be given adapters")

    async def give(self, member: Member, status: wire.GetStatusReqOutput) -> None:
        """Have ``member`` load what it lacks and unload the rest; raises EngineError if it ends."""
        member.adapters = self._had(status)
        for each in status.adapters:
            if not each.replaced and each.name not in self._loaded:
                with suppress(UnknownAdapter):
                    await member.client.unload_adapter(each.name, timeout=ABORT_S)
        for name, known in list(self._loaded.items()):
            if name in member.adapters:
                continue
            try:
                await self._load_again(member, known)
                member.adapters[name] = known.epoch
            except OUT:
                raise
            except EngineError as error:
                member.adapters[name] = 0
                logger.warning("engine %s serves without adapter %r: %s", member.name, name, error.message)
                if not any(each.adapters.get(name) for each in self._fleet.members if each.state != "gone"):
                    logger.error("adapter %r is lost: no engine has it any more", name)
                    self._forget(name)

    async def _load_again(self, member: Member, known: GroupAdapter) -> None:
        request, path = known.request, known.request.path
        if path is None and not known.buffers:
            raise UnknownAdapter("its tensors came in a way that leaves no copy", adapter=request.name)
        own = msgspec.structs.replace(request, id=wire.new_id(), adapter_epoch=known.epoch, replace=True)
        reply = await _sent(member, own, [memoryview(each) for each in known.buffers], LOAD_S)
        if reply.digest != known.digest:
            await member.client.unload_adapter(request.name, timeout=ABORT_S)
            raise CheckpointError(f"{path} has other tensors now than were loaded from it", path=path)

    def lacking(self, member: Member, status: wire.GetStatusReqOutput) -> bool:
        """Return True if ``status`` shows that ``member`` has lost adapters that it had."""
        has = self._had(status)
        return any(has.get(name) != epoch for name, epoch in member.adapters.items() if epoch)

    def _had(self, status: wire.GetStatusReqOutput) -> dict[str, int]:
        """Return the adapters of a member that are the group's, with their epochs."""
        return {
            each.name: each.adapter_epoch
            for each in status.adapters
            if not each.replaced
            and (known := self._loaded.get(each.name)) is not None
            and (known.epoch, known.digest) == (each.adapter_epoch, each.digest)
        }

    def _evicted(self, name: str) -> list[str]:
        """Return the adapter that was not used for longest, if all members' slots are taken and it may go."""
        dispatcher = self._fleet.dispatcher
        statuses = (member.status for member in dispatcher.serving)
        room = min(status.max_loaded_loras for status in statuses if status is not None)
        if name in self._loaded or len(self._loaded) < room:
            return []
        used = {flow.request.adapter for flow in dispatcher.flows.values()}
        idle = {
            name: each.last_used
            for name, each in self._loaded.items()
            if not (each.request.pinned or name in used)
        }
        return [min(idle, key=idle.__getitem__)] if idle else []

    def _forget(self, name: str) -> None:
        self._loaded.pop(name, None)
        for member in self._fleet.members:
            member.adapters.pop(name, None)


async def _sent(
    member: Member, request: Command, buffers: Sequence[memoryview] = (), timeout: float | None = None
) -> Any:
    loads = isinstance(request, wire.LoadAdapterReqInput)
    expects = wire.LoadAdapterReqOutput if loads else wire.UnloadAdapterReqOutput
    return await wait_for(member.client.start(request, expects, buffers), request.id, timeout)
