"""Weight update groups of several replicas: which ranks are whose, and who is still in.

Invariants:
- Replica ``i`` with ``tp`` ranks is the ranks from ``rank_offset + i * tp`` on, whether it serves or not, and ``world_size`` counts
  all of them: the same numbers in every group.
- A broadcast that one rank does not take reaches nobody. So a group needs all replicas, and one whose replica has ended or been
  restarted is ended on the others, too, while they join or update as well, which ends their wait and the trainer's.
- An update that finds its group so is over: what came before it in the same session is on those replicas only that are left.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from ...io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    InitWeightsUpdateGroupReqInput,
    Message,
    Request,
    UpdateWeightsFromDistributedReqInput,
)
from ..exceptions import EngineError, GroupError, InvalidRequest, SessionOpen
from .answers import sent_to
from .members import Member
from .session import Answers, everywhere

if TYPE_CHECKING:
    from .replicas import ReplicaFleet


class Groups:
    """The groups that the replicas are in."""

    def __init__(self, fleet: "ReplicaFleet") -> None:
        self._fleet = fleet
        self._incarnations: dict[str, dict[str, str | None]] = {}
        self._ended_here: set[str] = set()
        """Groups that their trainer has not ended yet, which is told to."""

    async def join(self, request: InitWeightsUpdateGroupReqInput, expects: type[Message]) -> Answers:
        """Have all replicas join.

        Raises:
            GroupError: a replica is not there, or has ended meanwhile. InvalidRequest: ``world_size`` is too small for all.
        """
        fleet, tp = self._fleet, self._fleet.tp
        absent = {member.name: member.reason for member in fleet.members if member.state == "gone"}
        if absent:
            raise GroupError(
                f"a group has all {fleet.size} replicas, and not all are there: {_told(absent)}",
                members=absent,
            )
        ranks = fleet.size * tp
        if request.rank_offset + ranks > request.world_size:
            raise InvalidRequest(
                f"world_size = {request.world_size} must count every rank: {fleet.size} replicas of {tp} from rank_offset = "
                f"{request.rank_offset} on need at least {request.rank_offset + ranks}",
                field="world_size",
                value=request.world_size,
            )

        def numbered(member: Member, own: InitWeightsUpdateGroupReqInput) -> InitWeightsUpdateGroupReqInput:
            return msgspec.structs.replace(own, rank_offset=own.rank_offset + fleet.position(member) * tp)

        async with self._ends_with_anyone(request.group_name):
            answers = await everywhere(fleet.members, sent_to(request, expects, change=numbered), None)
        for member, error in answers.out.items():
            fleet.drop(member, error, "it does not answer")
        if not answers.failed and not answers.out:
            self._ended_here.discard(request.group_name)
            self._incarnations[request.group_name] = {
                member.name: member.client.incarnation for member in fleet.members
            }
            return answers
        await self._end(request.group_name)
        if answers.out:
            lost = {member.name: error.message for member, error in answers.out.items()}
            raise GroupError(
                f"{', '.join(lost)} ended before all had joined the group {request.group_name!r} ({_told(lost)}): have all replicas "
                "join again",
                members=lost,
            )
        return answers

    async def leave(self, request: DestroyWeightsUpdateGroupReqInput, expects: type[Message]) -> Answers:
        """Have all replicas leave; one that has been restarted is in no group, which is no error where others are, nor is it one
        that nobody is because the group was ended here."""
        name = request.group_name
        known = self._incarnations.pop(name, None) is not None
        answers = await everywhere(self._fleet.asked, sent_to(request, expects), None)
        if name in self._ended_here:
            self._ended_here.discard(name)
            gone = {member: DestroyWeightsUpdateGroupReqOutput(id=request.id) for member in answers.failed}
            return Answers(replies=gone | answers.replies, out=answers.out)
        if known and answers.replies:
            answers.failed.clear()
        return answers

    @asynccontextmanager
    async def used_by(self, request: Request) -> AsyncIterator[None]:
        """For the time of an update: one over a group needs all who joined, and ends the group everywhere where it fails.

        Raises:
            GroupError: a replica is not in the group any more.
        """
        if not isinstance(request, UpdateWeightsFromDistributedReqInput):
            yield
            return
        name = request.group_name
        try:
            self._require_whole(name)
            async with self._ends_with_anyone(name):
                yield
        except SessionOpen:  # the group may belong to that session
            raise
        except EngineError:
            try:
                self._require_whole(name)  # says more than what the others made of it
            except GroupError:
                await self._fleet.updates.give_up(request)
                raise
            finally:
                if self._incarnations.pop(name, None) is not None:
                    self._ended_here.add(name)
                await self._end(name)
            raise

    @asynccontextmanager
    async def _ends_with_anyone(self, name: str) -> AsyncIterator[None]:
        """In this block the end of a replica ends the group on the others, which else wait for it."""
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

    def _require_whole(self, name: str) -> None:
        joined = self._incarnations.get(name)
        if joined is None:
            return  # each engine says that it is in no such group
        lost = {
            member.name: member.reason or "it was restarted"
            for member in self._fleet.members
            if member.state == "gone" or member.client.incarnation != joined[member.name]
        }
        if lost:
            raise GroupError(
                f"{', '.join(lost)} left the group {name!r} ({_told(lost)}): destroy it, and have all replicas join again",
                members=lost,
            )

    async def _end(self, name: str) -> None:
        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await everywhere(self._fleet.present, sent_to(request, DestroyWeightsUpdateGroupReqOutput), None)


def _told(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
