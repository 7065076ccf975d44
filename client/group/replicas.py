"""``ReplicaFleet``: the engines of ``caesura serve --replicas N`` or ``--worker-urls``, to HTTP one engine.

Invariants:
- A dead replica is out at once, one updated or paused on its own socket from the next look on. It serves
  again only with the group's weights.
- A pause with a lease ends with it, unless only an update can make the weights valid again.
- No replica is brought back while a weight session is open, while memory is released, or while the weights
  were lost on purpose: the trainer's next update gives them to all.
- Everything runs on one event loop; supervisors report from their threads.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from ...io_struct import GetStatusReqOutput, MemoryTag, Message, PauseMode, Request, new_id
from ...io_struct.control import LeaseAction
from ..exceptions import Busy, EngineDied, EngineError, EngineRestarting, InvalidRequest, WeightsInvalid
from ..launch.supervisor import Down, Ended, Serving
from ..launch.supervisor import State as ProcessState
from .client import GroupClient
from .combining import Counters, combined_answer, combined_status
from .fleet import LEASE_S, Fleet, MemberStatus
from .leases import PauseLease
from .members import EngineAddress, Member, foreign_commit
from .process_groups import ProcessGroups
from .processes import ReplicaProcesses
from .recovery import ASK_S, RELOAD_S, copy_beside
from .session import PAUSE_S, Answers, ask_all, everywhere
from .updates import Updates

logger = logging.getLogger(__name__)

PARTS_S = 5.0


def _addresses(processes: ReplicaProcesses) -> list[EngineAddress]:
    server_key = processes.keys.get("curve_server_key")
    client_keys = processes.keys.get("curve_client_key_file")
    return [
        EngineAddress(replica.endpoint, server_key, client_keys, replica.name)
        for replica in processes.replicas
    ]


class ReplicaFleet(Fleet):
    """The replicas of one server; ``client`` is used as that of one engine."""

    def __init__(
        self, engines: ReplicaProcesses | Sequence[EngineAddress], *, owner: str, **options: Any
    ) -> None:
        """Take processes that have started here, or engines that run elsewhere and are adopted.

        ``options`` are those of :class:`Fleet`. A trainer's pause has the lease that it asks for. Those of
        updates have one on engines that outlive this process, and none on those that end with it.
        """
        self._processes = engines if isinstance(engines, ReplicaProcesses) else None
        options.setdefault("lease_s", LEASE_S if self._processes is None else None)
        super().__init__(
            _addresses(engines) if isinstance(engines, ReplicaProcesses) else engines,
            owner=owner,
            adopt=self._processes is None,
            **options,
        )
        self.client = GroupClient(self)
        self.updates = Updates(self)
        self.groups = ProcessGroups(self)
        self.tp = 1 if self._processes is None else self._processes.ranks
        self.status_s = 0.6
        """Seconds that a status waits for all replicas; one in a long step then counts as it was."""
        self.released: set[MemoryTag] = set()
        self.lease: PauseLease | None = None
        self._incarnation = new_id()[:16]
        self._began = self._paused_at = monotonic()
        self._pauses = 0
        self._counters = Counters()

    @property
    def size(self) -> int:
        return len(self.dispatcher.members)

    @property
    def restarts(self) -> int:
        return self._counters.restarts

    @property
    def present(self) -> list[Member]:
        """Replicas whose process is there, with valid weights or without."""
        return [member for member in self.members if member.state != "gone"]

    @property
    def asked(self) -> list[Member]:
        """Replicas that receive a command: the serving ones, else every present one."""
        found = self.dispatcher.serving or self.present
        if not found:
            raise EngineRestarting(f"no replica is there now: {self.reasons()}")
        return found

    @property
    def awaits_update(self) -> bool:
        """True after a command that gave up the weights, until an update; requests are refused."""
        return self.dispatcher.refusal is not None

    @awaits_update.setter
    def awaits_update(self, value: bool) -> None:
        reason = "the weights were released or reset: only a complete update makes them valid again"
        self.dispatcher.refusal = WeightsInvalid(reason) if value else None

    @property
    def may_heal(self) -> bool:
        return super().may_heal and not (self.released or self.awaits_update or self.updates.session)

    @property
    def needs_care(self) -> bool:
        return super().needs_care or self.lease is not None or bool(self._changed_by_others())

    async def open(self) -> Self:
        await super().open()
        loop = asyncio.get_running_loop()

        def hear(name: str, state: ProcessState) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._on_state, name, state)

        if self._processes is not None:
            self._processes.follow(hear)
        self.tp = max(1 + len(each.status.ranks) for each in self.members if each.status is not None)
        return self

    def require_addable(self) -> None:
        """Raise Busy in a weight session or a release of memory."""
        if self.released or self.awaits_update or self.updates.session is not None:
            raise Busy("an engine is added when the weight session or the release of memory is over")

    async def remove(self, name: str) -> None:
        """Take out an engine that runs elsewhere; InvalidRequest for one that this process has started."""
        if self._processes is not None and any(name == each.name for each in self._processes.replicas):
            raise InvalidRequest(f"{name} was started by this server, and ends with it", field="name")
        await super().remove(name)

    async def close(self) -> None:
        """Close the connections; the processes are their owner's to end. Idempotent."""
        self.updates.forget()
        await super().close()

    async def end(self) -> None:
        """Stop continuing requests elsewhere and bringing replicas back: the engines are about to end."""
        self.dispatcher.end()
        await self.end_work()

    async def send(
        self,
        members: Sequence[Member],
        request: Request,
        expects: type[Message],
        buffers: Sequence[memoryview] = (),
    ) -> Answers:
        """Send a message to ``members``; those that do not answer are out of routing."""
        answers = await ask_all(members, request, expects, buffers=buffers)
        self.dispatcher.drop(answers.out, "it does not answer")
        return answers

    def combine(self, answers: Answers) -> Any:
        return combined_answer(answers, self.positions(), self.tp)

    def positions(self) -> dict[Member, int]:
        """Return the members' numbers among all."""
        return {member: at for at, member in enumerate(self.members)}

    def reasons(self) -> str:
        """Return why replicas do not serve, by name; empty if all do."""
        return "; ".join(f"{member.name}: {member.reason}" for member in self.members if not member.serves)

    async def heal(self) -> list[str]:
        """Bring back replicas as :meth:`Fleet.heal`, also after a pause that its lease has ended."""
        if self.paused_mode is not None:
            with suppress(EngineError):
                await self.combined("")
            await self._end_lease()
        if self._changed_by_others():
            async with self.lock:  # it may have been a command of this server, half done
                await everywhere(list(self._changed_by_others()), self.ask, ASK_S)
                for member, reason in self._changed_by_others().items():
                    self.dispatcher.fence(member, reason)
        return await super().heal()

    def paused_by(self, mode: PauseMode, lease_s: float | None, action: LeaseAction) -> None:
        """Record a pause of the replicas. The caller holds :attr:`lock`."""
        if self.paused_mode is None:
            self._paused_at = monotonic()
        self._pauses += 1
        self.paused_mode = mode
        self.leases.hold(())  # it is the trainer's from now on, with the lease that this one has
        if lease_s is not None:
            self.lease = PauseLease(lease_s, action)
        if self.updates.session is not None:  # the replicas stay paused after it
            self.updates.session.paused_here = False

    def continued(self) -> None:
        self.paused_mode = self.lease = None
        self.leases.hold(())

    def notice_continued(self, answers: Answers) -> None:
        """Record the end of a pause by its lease, which no command has told; ``answers`` are statuses."""
        running = [status.generation == "running" for each, status in answers.replies.items() if each.serves]
        if self.paused_mode is not None and running and all(running):
            self.continued()

    async def combined(self, owner: str | None) -> GetStatusReqOutput:
        """Return one status of all replicas; ``owner`` is the token of the request.

        After the first answer others have :attr:`status_s` in all; late ones count as they were, but not
        their state.
        """
        members = self.present
        if not members:
            raise EngineRestarting(f"no replica is there now: {self.reasons()}")
        pauses = self._pauses

        async def ask(member: Member) -> GetStatusReqOutput:
            status = await member.client.status(owner=owner)
            self._counters.take(member.name, status)  # in the order in which they come, whoever asks
            return status

        answers = await everywhere(members, ask, self.status_s, at_least_one=True)
        if pauses == self._pauses and not self.lock.locked():  # otherwise they may be older than the pause
            self.notice_continued(answers)
        if not answers.replies:
            raise next(iter((answers.failed | answers.out).values()))
        known = {member: self._counters.last.get(member.name) for member in members} | answers.replies
        serving = self.dispatcher.serving
        current = [member for member in serving if member in answers.replies]
        session = self.updates.status()
        of_group: dict[str, Any] = {} if session is None else {"session": session}
        if not serving and self.paused_mode is not None:  # no engine that is left knows of the pause
            of_group |= {
                "generation": "paused",
                "pause_mode": self.paused_mode,
                "pause_age_s": monotonic() - self._paused_at,
                "pause_owner": None if self.lease is None else self.owner,
                "lease_left_s": None if self.lease is None else self.lease.left_s,
            }
        at = self.positions()
        combined = combined_status(
            {at[member]: status for member, status in known.items() if status is not None and member in at},
            [at[member] for member in current or serving],
            counters=self._counters,
            tp=self.tp,
            incarnation=self._incarnation,
            pid=os.getpid(),
            uptime_s=monotonic() - self._began,
            weight_version=self.weight_version,
            weights_epoch=self.weights_epoch,
            **of_group,
        )
        combined.waiting_requests += sum(flow.waits for flow in self.dispatcher.flows.values())
        return combined

    async def parts(self) -> list[MemberStatus]:
        return (await self.status(timeout=PARTS_S)).members

    def _changed_by_others(self) -> dict[Member, str]:
        found = {}
        for member in self.dispatcher.serving:
            status = member.status
            if status is None:
                continue
            if status.weights_epoch != member.epoch:
                found[member] = foreign_commit(status.weight_version, status.weights_epoch)
            elif self.adapters.lacking(member, status):
                found[member] = "its adapters were changed on its own socket, not by this fleet"
            elif self.may_heal and status.generation != "running":
                found[member] = "it was paused on its own socket, not by this fleet"
        return found

    async def _end_lease(self) -> None:
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
                for flow in list(self.dispatcher.flows.values()):
                    flow.abort()
            elif lease.action == "continue":
                # Half an update ends with its sender: replicas that have some of it are brought back as after
                # any failure.
                await self.updates.abandon()
                if self.awaits_update:
                    logger.error("cannot continue: only an update makes the weights valid; staying paused")
                    return
                await self.continue_members(PAUSE_S, torch_empty_cache=True)
                self.dispatcher.place_waiting()

    async def resume(self, member: Member, released: Sequence[MemoryTag]) -> None:
        """Resume the memory of a replica that has missed the group's resume."""
        await member.client.resume_memory(timeout=RELOAD_S)

    async def copy(self, donor: EngineAddress, target: EngineAddress) -> None:
        await copy_beside(donor, target, self.owner)

    def _on_state(self, name: str, state: ProcessState) -> None:
        member = self.dispatcher.members.get(name)
        if member is None:
            return
        if isinstance(state, Down | Ended):
            if isinstance(state, Down):
                reason = f"{state.reason}; it is being restarted"
            else:
                reason = "it was told to end" if state.error is None else state.error.message
            self.dispatcher.lost(member, EngineDied(f"{name} {reason}"))
            if member.state == "gone":
                member.reason = reason
        elif isinstance(state, Serving) and not member.serves and not self.dispatcher.ending:
            self.begin_work(self._come_back(member))

    async def _come_back(self, member: Member) -> None:
        """Let updates reach a restarted replica, and bring it back, now or later."""
        with suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.ask(member), ASK_S)
            if member.state == "gone":
                member.leave("fenced", "it was restarted, and does not have the weights yet")
        with suppress(EngineError):
            await self.heal()
