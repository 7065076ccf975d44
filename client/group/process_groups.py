"""Weight update groups of several replicas.

Invariants:
- Replica ``i`` of ``tp`` ranks has the ranks from ``rank_offset + i * tp`` on, whether it serves or not, and
  ``world_size`` counts all of them: the same numbers in every group.
- A broadcast that one rank does not take reaches nobody. So a group needs all replicas; if one ends or is
  restarted, the group is ended on the others, also while they join or update: that ends every wait.
- An update whose group has ended is over: its earlier calls are only on the replicas that are left.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ... import io_struct as wire
from ..exceptions import EngineError, GroupError, InvalidRequest, SessionOpen
from .members import Member
from .session import Answers, everywhere

if TYPE_CHECKING:
    from .replicas import ReplicaFleet


class ProcessGroups:
    """Process groups that the replicas have joined."""

    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self._joined: dict[str, dict[str, str | None] | None] = {}
        """Processes in each group; None if it was ended here and its trainer does not know."""

    async def join(self, request: wire.InitWeightsUpdateGroupReqInput) -> Answers:
        """Have all replicas join; GroupError if one is not there, or has ended meanwhile."""
        fleet, name = self._fleet, request.group_name
        absent = {member.name: member.reason for member in fleet.members if member.state == "gone"}
        if absent:
            reason = f"a group has all {fleet.size} replicas, and not all are there: {_told(absent)}"
            raise GroupError(reason, members=absent)
        needed = request.rank_offset + fleet.size * fleet.tp
        if needed > request.world_size:
            raise InvalidRequest(
                f"world_size = {request.world_size} must count every rank: {fleet.size} replicas of "
                f"{fleet.tp} from rank_offset = {request.rank_offset} on need at least {needed}",
                field="world_size",
                value=request.world_size,
            )

        positions = fleet.positions()

        async def join(member: Member) -> Any:
            rank = request.rank_offset + positions[member] * fleet.tp
            own = msgspec.structs.replace(request, rank_offset=rank)
            return await member.client.start(own, wire.InitWeightsUpdateGroupReqOutput)

        async with self._ends_with_anyone(name):
            answers = await everywhere(fleet.members, join)
        fleet.dispatcher.drop(answers.out, "it does not answer")
        if not answers.failed and not answers.out:
            self._joined[name] = {each.name: each.client.incarnation for each in fleet.members}
            return answers
        await self._end(name)
        if answers.out:
            lost = {member.name: error.message for member, error in answers.out.items()}
            ended = f"{', '.join(lost)} ended before all had joined the group {name!r} ({_told(lost)})"
            raise GroupError(f"{ended}: have all replicas join again", members=lost)
        return answers

    async def leave(self, request: wire.DestroyWeightsUpdateGroupReqInput) -> Answers:
        """Have all replicas leave; it is no error if only some are in the group, or if it was ended here."""
        name, expects = request.group_name, wire.DestroyWeightsUpdateGroupReqOutput
        known, ended_here = name in self._joined, self._joined.pop(name, ()) is None
        answers = await self._fleet.send(self._fleet.asked, request, expects)
        if ended_here:
            left = {member: expects(id=request.id) for member in answers.failed}
            return Answers(left | answers.replies, out=answers.out)
        if known and answers.replies:
            answers.failed.clear()
        return answers

    @asynccontextmanager
    async def used_by(self, request: wire.ControlRequest) -> AsyncIterator[None]:
        """Guard an update: one over a group needs all that joined, and ends it if it fails."""
        receives = wire.UpdateWeightsFromDistributedReqInput | wire.LoadAdapterReqInput
        name = request.group_name if isinstance(request, receives) else None
        if name is None:
            yield
            return
        try:
            self._require_all(name)
            async with self._ends_with_anyone(name):
                yield
        except SessionOpen:  # the group may belong to that session
            raise
        except EngineError:
            try:
                self._require_all(name)  # tells more than the error that this has caused
            except GroupError:
                if isinstance(request, wire.WeightUpdateOptions):
                    await self._fleet.updates.give_up(request)
                raise
            finally:
                if name in self._joined:
                    self._joined[name] = None
                await self._end(name)
            raise

    @asynccontextmanager
    async def _ends_with_anyone(self, name: str) -> AsyncIterator[None]:
        """End the group on the remaining replicas, which would wait for it, when one ends in this block."""
        ending: list[asyncio.Task[None]] = []

        def end(_: Member) -> None:
            ending.append(asyncio.ensure_future(self._end(name)))

        listeners = self._fleet.dispatcher.on_lost
        listeners.append(end)
        try:
            yield
        finally:
            listeners.remove(end)
            await asyncio.gather(*ending)

    def _require_all(self, name: str) -> None:
        joined = self._joined.get(name)
        if joined is None:
            return  # each engine says that it is in no such group
        lost = {
            member.name: member.reason or "it was restarted"
            for member in self._fleet.members
            if member.state == "gone" or member.client.incarnation != joined.get(member.name)
        } | dict.fromkeys(joined.keys() - self._fleet.dispatcher.members.keys(), "it was removed")
        if lost:
            left = f"{', '.join(lost)} left the group {name!r} ({_told(lost)})"
            raise GroupError(f"{left}: destroy it, and have all replicas join again", members=lost)

    async def _end(self, name: str) -> None:
        await everywhere(self._fleet.present, lambda member: member.client.destroy_weights_update_group(name))


def _told(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
