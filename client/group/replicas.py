"""``ReplicaFleet``: a fleet whose engines are processes of this host, and whose client takes every command of one engine.

Invariants:
- A replica that dies is out at once; its supervisor restarts it at the same endpoint, and it serves again only with the fleet's
  weights.
- A pause with a lease ends with it whatever becomes of the engines, unless only an update can make the weights valid again.
- A replica that somebody has updated or paused on its own socket is out from the next look on, and brought back like one that has
  lost its weights. Tokens that it has sampled meanwhile are not passed on (``group/flow.py``).
- Nobody is brought back while a weight session is open, while memory is released, or while the weights were lost on purpose: the
  trainer's next update gives them to all.

Runs on one event loop; supervisors report from their threads.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from ...io_struct import GetStatusReqOutput, MemoryTag, PauseGenerationReqInput, new_id
from ..exceptions import EngineDied, EngineError, EngineRestarting, WeightsInvalid
from ..launch.supervisor import Down, Ended, Serving, State
from .channel import FleetClient
from .command_channel import CommandChannel
from .commands import Commands
from .copying import Copies
from .fleet import ASK_S, PAUSE_S, Fleet
from .members import EngineAddress, Member, foreign_commit
from .pause_lease import PauseLease
from .processes import ReplicaProcesses
from .recovery import RELOAD_S
from .reports import MemberStatus
from .session import Answers, everywhere
from .statuses import Counters, combined_status
from .updates import Updates

logger = logging.getLogger(__name__)

STATUS_S = 0.6
"""How long replicas are waited for in a status; one that computes a long step then counts as it was."""
PARTS_S = 5.0
"""How long each replica's own status is waited for."""


class ReplicaFleet(Fleet):
    """The replicas of one server; ``client`` is used as that of one engine."""

    def __init__(self, processes: ReplicaProcesses, *, owner: str, **options: Any) -> None:
        """``processes`` must have started; ``options`` are those of :class:`Fleet`."""
        server_key, client_key = processes.keys
        super().__init__(
            [
                EngineAddress(replica.supervisor.endpoint, server_key, client_key, name=replica.name)
                for replica in processes.replicas
            ],
            owner=owner,
            lease_s=None,  # the engines end with this process; a trainer's pause may have its own
            **options,
        )
        self.tp = processes.ranks
        """Ranks of each replica."""
        self.released: set[MemoryTag] = set()
        """Tags that have been released and not resumed."""
        self.pauses = 0
        """Pauses so far."""
        self.lease: PauseLease | None = None
        """That of the pause."""
        self.updates = Updates(self)
        self.client = FleetClient(CommandChannel(self.dispatcher, Commands(self)), owner=self.owner)
        self._processes = processes
        self._copies = Copies()
        self._incarnation = new_id()[:16]
        self._began = self._paused_at = monotonic()
        self._counters = Counters()
        self._returning: set[asyncio.Task[Any]] = set()

    @property
    def size(self) -> int:
        """How many replicas there are, serving or not."""
        return len(self._processes.replicas)

    @property
    def restarts(self) -> int:
        """Number of engine processes that took the place of another."""
        return self._counters.restarts

    @property
    def present(self) -> list[Member]:
        """The replicas whose process is there, with valid weights or without."""
        return [member for member in self.members if member.state != "gone"]

    @property
    def asked(self) -> list[Member]:
        """Whom a command concerns: those that serve, or where none does all that are there.

        Raises:
            EngineRestarting: there is none.
        """
        found = self.dispatcher.serving or self.present
        if not found:
            raise EngineRestarting(f"no replica is there now: {self.reasons()}")
        return found

    @property
    def awaits_update(self) -> bool:
        """Whether the weights were given up by a command, so that only an update makes them valid again: meanwhile requests are
        refused, as by one engine, and nobody is brought back."""
        return self.dispatcher.refusal is not None

    @awaits_update.setter
    def awaits_update(self, value: bool) -> None:
        reason = "the weights were released or reset: only a complete update makes them valid again"
        self.dispatcher.refusal = WeightsInvalid(reason) if value else None

    @property
    def may_heal(self) -> bool:
        """Whether :meth:`heal` does anything now."""
        return super().may_heal and not (self.released or self.awaits_update or self.updates.is_open)

    @property
    def needs_care(self) -> bool:
        """Whether :meth:`heal` may have something to do."""
        return super().needs_care or self.lease is not None or bool(self._changed_by_others())

    async def heal(self) -> list[str]:
        """As :meth:`Fleet.heal`, also after a pause that its lease has ended."""
        if self.paused_mode is not None:
            with suppress(EngineError):
                await self.combined("")
            await self._end_lease()
        if self._changed_by_others():
            async with self.lock:  # what was seen may have been a command of this server, half done
                await everywhere(list(self._changed_by_others()), self.ask, ASK_S)
                for member, reason in self._changed_by_others().items():
                    self.dispatcher.fence(member, reason)
        return await super().heal()

    def _changed_by_others(self) -> dict[Member, str]:
        """Replicas that serve though somebody has updated or paused them, as far as their last status tells, with the reason."""
        found = {}
        for member in self.dispatcher.serving:
            status = member.status
            if status is None:
                continue
            if status.weights_epoch != member.epoch:
                found[member] = foreign_commit(status.weight_version, status.weights_epoch)
            elif self.may_heal and status.generation != "running":
                found[member] = "it was paused on its own socket, not by this fleet"
        return found

    def paused_by(self, request: PauseGenerationReqInput) -> None:
        """Replicas have been paused; its caller holds :attr:`lock`."""
        if self.paused_mode is None:
            self._paused_at = monotonic()
        self.pauses += 1
        self.paused_mode = request.mode
        if request.lease_s is not None:
            self.lease = PauseLease(request.lease_s, request.on_lease_expiry)
        self.updates.leave_paused()

    def continued(self) -> None:
        """The pause is over."""
        self.paused_mode = self.lease = None

    async def _end_lease(self) -> None:
        """What the pause asked for, where its lease is over and no replica that serves counts one itself."""
        if self.lease is None or self.lease.left_s > 0:
            return
        async with self.lock:
            lease = self.lease
            if lease is None or lease.left_s > 0:
                return
            answers = await everywhere(self.dispatcher.serving, self.ask, ASK_S)
            if any(status.lease_left_s is not None for status in answers.replies.values()):
                return
            self.lease = None
            logger.warning("the pause's lease expired after %.1f s: %s", lease.seconds, lease.action)
            if lease.action == "abort":
                self.dispatcher.abort(self.dispatcher.flows.values())
            elif lease.action == "continue":
                await self._continue_without_owner()

    async def _continue_without_owner(self) -> None:
        """Half an update ends with its sender: who has written some of it is brought back as after any that failed."""
        await self.updates.abandon()
        if self.awaits_update:
            logger.error("cannot continue: only an update makes the weights valid again; staying paused")
            return
        await self.continue_members(PAUSE_S, torch_empty_cache=True)  # as an engine whose lease expires
        self.dispatcher.admitted()

    def position(self, member: Member) -> int:
        """Number of the replica."""
        return self.members.index(member)

    async def open(self) -> Self:
        """Connect to all replicas. Raises as :meth:`Fleet.open`."""
        await super().open()
        loop = asyncio.get_running_loop()

        def hear(name: str, state: State) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._on_state, name, state)

        self._processes.follow(hear)
        return self

    async def close(self) -> None:
        """Close the connections; the processes are their owner's to end. Idempotent."""
        for task in list(self._returning):
            task.cancel()
        self.updates.close()
        self._copies.end()
        await super().close()

    def end(self) -> None:
        """The engines are about to be told to end: nothing is continued elsewhere any more."""
        self.heals = False
        self._copies.end()
        self.dispatcher.end()

    async def combined(self, owner: str | None) -> GetStatusReqOutput:
        """One status of all replicas; ``owner`` is that of the request. Once one has answered, the others are waited for no longer
        than :data:`STATUS_S` in all: their requests, tokens and bytes count as they were, their state does not count.

        Raises:
            EngineRestarting: no replica is there. EngineError: all that were there have ended.
        """
        members = self.present
        if not members:
            raise EngineRestarting(f"no replica is there now: {self.reasons()}")
        pauses = self.pauses
        answers = await self._statuses(members, owner)
        if (
            pauses == self.pauses and not self.lock.locked()
        ):  # else these statuses may be older than the pause
            self.notice_continued(answers)
        if not answers.replies:
            raise next(iter((answers.failed | answers.out).values()))
        known = {member: self._counters.last(member.name) for member in members} | answers.replies
        found = {self.position(member): status for member, status in known.items() if status is not None}
        session = self.updates.status()
        of_fleet: dict[str, Any] = {} if session is None else {"session": session}
        waits = sum(flow.waits for flow in self.dispatcher.flows.values())
        serving = self.dispatcher.serving
        if not serving:
            of_fleet |= self._pause_of_nobody()
        told = [
            member for member in serving if member in answers.replies
        ]  # what others were, they may not be
        combined = combined_status(
            found,
            [self.position(member) for member in told or serving],
            counters=self._counters,
            tp=self.tp,
            incarnation=self._incarnation,
            pid=os.getpid(),
            uptime_s=monotonic() - self._began,
            weight_version=self.weight_version,
            weights_epoch=self.weights_epoch,
            **of_fleet,
        )
        combined.waiting_requests += waits
        return combined

    def _pause_of_nobody(self) -> dict[str, Any]:
        """The pause as fields of a status, where all replicas that knew of it have gone."""
        if self.paused_mode is None:
            return {}
        return {
            "generation": "paused",
            "pause_mode": self.paused_mode,
            "pause_age_s": monotonic() - self._paused_at,
            "pause_owner": None if self.lease is None else self.owner,
            "lease_left_s": None if self.lease is None else self.lease.left_s,
        }

    async def _statuses(self, members: Sequence[Member], owner: str | None) -> Answers:
        """The answers that have come in time, or the first one."""
        answers = Answers()

        async def ask(member: Member) -> GetStatusReqOutput:
            status = await member.client.status(owner=owner)
            self._counters.take(member.name, status)  # in the order in which they come, whoever asks
            return status

        tasks = {asyncio.ensure_future(ask(member)): member for member in members}
        waiting = set(tasks)
        try:
            done, waiting = await asyncio.wait(waiting, timeout=STATUS_S)
            while waiting and all(task.exception() is not None for task in done):
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= more
        finally:
            for task in waiting:
                task.cancel()
        for task in done:
            error = task.exception()
            if error is not None and not isinstance(error, EngineError):
                raise error
            answers.sort(tasks[task], task.result() if error is None else error)
        return answers

    async def parts(self) -> list[MemberStatus]:
        """Every replica's own status, in their order; None of one that does not answer within :data:`PARTS_S`."""
        return (await self.status(timeout=PARTS_S)).members

    def notice_continued(self, answers: Answers) -> None:
        """A pause may have ended by its lease, which no command has told."""
        running = [
            status.generation == "running" for member, status in answers.replies.items() if member.serves
        ]
        if self.paused_mode is not None and running and all(running):
            self.continued()

    async def _caught_up(self, member: Member) -> GetStatusReqOutput:
        """One that has missed the resume of all resumes first: nobody is brought back while memory is released."""
        status = await asyncio.wait_for(self.ask(member), ASK_S)
        if status.released_tags:
            await member.client.resume_memory(timeout=RELOAD_S)
        return await super()._caught_up(member)

    def _copy(self, donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
        self._copies.copy(donor, target, owner)

    def _on_state(self, name: str, state: State) -> None:
        """What has become of a replica's process."""
        member = self.dispatcher.members.get(name)
        if member is None:
            return
        if isinstance(state, Down):
            self._out(member, f"{state.reason}; it is being restarted")
        elif isinstance(state, Ended):
            self._out(member, "it was told to end" if state.error is None else state.error.message)
        elif isinstance(state, Serving) and not member.serves and not self.dispatcher.ending:
            task = asyncio.ensure_future(self._come_back(member))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    def _out(self, member: Member, reason: str) -> None:
        self.dispatcher.lost(member, EngineDied(f"{member.name} {reason}"))
        if member.state == "gone":
            member.reason = reason

    async def _come_back(self, member: Member) -> None:
        """Its process is there again: updates reach it. Where it may not join now, the fleet tries again from time to time."""
        with suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.ask(member), ASK_S)
            if member.state == "gone":
                member.leave("fenced", "it was restarted, and does not have the weights yet")
        with suppress(EngineError):
            if member.name in await self.heal():
                logger.warning("%s serves again", member.name)

    def reasons(self) -> str:
        """Why replicas do not serve, by name; empty if all do."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self.members if not member.serves)
