"""``Fleet``: several engines with the same weights, for coroutines of one event loop.

Invariants:
- All members that serve have the same weights: an engine is admitted, also again, only with the group's.
- Updates, pauses and admissions hold :attr:`Fleet.lock`; what moves weights, but no pause, holds
  :attr:`Fleet.weights_lock` around it.
- A generation is not lost with its member (``flow.py``). All members of an update commit, or none
  (``session.py``).
"""

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from ...io_struct import (
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    MemoryTag,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    RollbackWeightsReqInput,
    WeightUpdateReqOutput,
    new_id,
)
from ..connection.async_channel import LoopSocket
from ..connection.async_client import AsyncGenerationHandle
from ..connection.client_options import GenerateOptions, label, require_known
from ..connection.prompts import Ids, Prompts, Sampling
from ..exceptions import EngineDied, EngineError, InvalidRequest, MemoryReleased
from .dispatcher import DEFAULT_PATIENCE_S, Dispatcher, GenerationClient
from .leases import LeaseRenewal
from .member_adapters import Adapters
from .members import EngineAddress, Member, State
from .recovery import ASK_S, Adopt, agree, catch_up, copy_here, take_over
from .router import routed_by
from .session import (
    PAUSE_S,
    SPARE_S,
    Answers,
    FleetUpdateFailed,
    Session,
    Source,
    Transport,
    Verify,
    WeightSender,
    ask_all,
    everywhere,
    is_staged,
    manifest_of,
    transport_of,
)

if TYPE_CHECKING:
    from ..trainer import NamedTensors, WeightDelta

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
KEEPALIVE_TIMEOUT_S = 30.0
LEASE_S = 60.0
DESCRIPTORS = 1
"""File descriptors of a connection; an engine has a second one while it is paused with a lease."""
OTHER_DESCRIPTORS = 64
CONTROL_SHARE = 0.25
"""Share of an update's deadline that one step before the loading may take: a member that hangs costs no more
of it, so the others have time to load."""
PROBE_S = 2.0
"""Seconds in which a member that is away must answer to be brought back."""
HEALED_AT_ONCE = 16
"""Maximum number of members that are brought back at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUpdate:
    """An update that a fleet has committed."""

    epoch: int
    """The fleet's weights epoch after it."""
    weight_version: str
    """Label of the update."""
    replies: dict[str, WeightUpdateReqOutput]
    """Replies to the commits, by name; epochs in them are the engines' own."""
    fenced: dict[str, str]
    """Members that do not have the new weights and are out of routing, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member as the fleet sees it."""

    name: str
    """Name of the engine, or else its endpoint."""
    state: State
    """``serving``: it receives requests. ``joining``, ``fenced``, ``gone``: it does not."""
    reason: str
    """Why it does not serve; empty if it does."""
    load: int
    """Number of unfinished samples that this fleet has given it."""
    engine: GetStatusReqOutput | None
    """Reply of the engine to a status request, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet and its members."""

    weights_epoch: int
    """Epoch of the fleet's weights; spans of its outputs and ``min_weights_epoch`` count alike."""
    weight_version: str
    """Label of these weights."""
    paused: PauseMode | None
    """Mode of the fleet's pause; None while it runs."""
    live_requests: int
    """Number of requests that have not ended, waiting ones included."""
    moved_requests: int
    """Number of times that a request was continued on another member."""
    members: list[MemberStatus]
    """All engines, in the order in which they were added."""


class FleetOptions(TypedDict, total=False):
    """Keywords of every fleet; all are optional."""

    owner: str | None
    """Owner token of the fleet's pauses. None, the default, means a random one."""
    verify: Verify
    """Values that members compare before a commit, and that an engine that joins is compared by: ``counts``
    by default."""
    patience_s: float | None
    """Seconds that a generation waits for a member that serves: 60 by default, None means without limit."""
    keepalive_timeout: float | None
    """Seconds without a message after which a member with requests counts as gone; 30 by default."""
    look_interval_s: float
    """Seconds between looks at the members, which bring restarted ones back; 1 by default, 0 means never."""
    lease_s: float | None
    """Seconds of the lease of the fleet's pauses, which a thread renews; 60 by default. When it expires
    because this process has died, an engine ends the fleet's session and continues if its weights are valid.
    """
    adopt: Adopt
    """True takes over engines whose former fleet's process has died. ``any``: even if none has complete
    weights; requests then wait for an update."""


class Fleet:
    """Engines with the same weights, behind the methods of one client. Use it with ``async with``.

    ``members`` are addresses of the engines; all must run when the fleet is opened, or one that is adopted.
    """

    def __init__(self, members: Sequence[EngineAddress | str] = (), **options: Unpack[FleetOptions]) -> None:
        require_known("fleet", options, FleetOptions)
        self._lease_s = lease_s = options.get("lease_s", LEASE_S)
        if lease_s is not None and not lease_s > 0:
            raise InvalidRequest(
                f"lease_s = {lease_s!r} must be a positive number of seconds, or None", field="lease_s"
            )
        self.owner = options.get("owner") or f"fleet-{new_id()[:12]}"
        """Owner token of the fleet's pauses and sessions."""
        self.verify: Verify = options.get("verify", "counts")
        """Values that members compare before a commit."""
        self.weight_version = ""
        """Label of the weights that the fleet serves."""
        self.paused_mode: PauseMode | None = None
        """Mode of the fleet's pause; None while it runs."""
        self.heals = True
        """True if members that are fenced or gone are brought back in the background."""
        self.source = Source()
        """Origin of the fleet's weights."""
        self.lock = asyncio.Lock()
        """Held by what changes weights, pauses or membership."""
        self.weights_lock = asyncio.Lock()
        """Held, around :attr:`lock`, by what moves weights: updates, and what brings a member up to date."""
        self.dispatcher = Dispatcher(patience_s=options.get("patience_s", DEFAULT_PATIENCE_S))
        """The members and the generations that they have."""
        self.adapters = Adapters(self)
        """Loads and unloads adapters on all members, for :attr:`client`."""
        self.client = GenerationClient(self.dispatcher, self.adapters, owner=self.owner)
        """Generations of the fleet, for what takes a client, such as a ``TokenizerManager``."""
        self._addresses = [EngineAddress.of(each) for each in members]
        self._keepalive_timeout = options.get("keepalive_timeout", KEEPALIVE_TIMEOUT_S)
        self._adopt: Adopt = options.get("adopt", False)
        self.leases = LeaseRenewal(self.owner, lease_s)
        """Renewal of the leases of the fleet's own pauses."""
        self._look_interval_s = options.get("look_interval_s", LOOK_INTERVAL_S)
        self._work: set[asyncio.Task[Any]] = set()
        self._sender = WeightSender(self.owner)
        self._socket = LoopSocket()

    @property
    def members(self) -> list[Member]:
        """The engines of the fleet, in the order in which they were added."""
        return list(self.dispatcher.members.values())

    @property
    def weights_epoch(self) -> int:
        """The fleet's count of weights; spans of its outputs and ``min_weights_epoch`` count alike."""
        return self.dispatcher.epoch

    async def open(self) -> Self:
        """Connect to all members and look after them; EngineError if one cannot be reached or differs."""
        self._require_descriptors()
        try:
            async with self.lock:
                joining = [self._add(self._made(address)) for address in self._addresses]
                await (take_over(self, joining, self._adopt) if self._adopt else agree(self, joining))
                await self.adapters.restore()
            if self._adopt:
                await self.heal()
        except BaseException:
            await self.close()
            raise
        if self._look_interval_s > 0:
            self.begin_work(self._look_after())
        return self

    def begin_work(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Do ``work`` in the background, as long as the fleet is open."""
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def end_work(self) -> None:
        """Cancel what is done in the background, and wait for its end."""
        if work := list(self._work):
            for task in work:
                task.cancel()
            await asyncio.wait(work)

    async def close(self) -> None:
        """Close the connections; engines go on. Idempotent."""
        await self.end_work()
        await self.client.close()
        await asyncio.to_thread(self._sender.close)
        for member in self.members:
            await member.client.close()
        await asyncio.to_thread(self.leases.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        input_ids: Prompts,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        routing_key: str | None = None,
        rid: str | Sequence[str] | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Generate as :meth:`AsyncSchedulerClient.generate`; ``min_weights_epoch`` is the fleet's.

        Requests with one ``routing_key`` go to the same member as long as it serves.
        """
        with routed_by(routing_key):
            return await self.client.generate(
                input_ids, sampling_params, rid=rid, message_id=message_id, timeout=timeout, **options
            )

    async def submit(
        self,
        input_ids: Ids,
        sampling_params: Sampling | None = None,
        *,
        routing_key: str | None = None,
        stream: bool = False,
        rid: str | None = None,
        message_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationHandle:
        """Start a generation and return at once, as :meth:`AsyncSchedulerClient.submit`."""
        with routed_by(routing_key):
            return await self.client.submit(
                input_ids, sampling_params, stream=stream, rid=rid, message_id=message_id, **options
            )

    async def abort(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """Abort a generation of this fleet, or all, and return the number of samples that were live."""
        return (await self.client.abort(rid, abort_all=abort_all)).aborted

    async def pause(self, mode: PauseMode = "in_place", *, timeout: float | None = PAUSE_S) -> None:
        """Pause all members; one that does not answer is fenced, one that refuses undoes the pause."""
        async with self.lock:
            answers = await self.pause_members(mode, self.dispatcher.serving, timeout)
            if answers.failed and self.paused_mode is None:
                await self.continue_members(timeout, torch_empty_cache=False)
            Answers(failed=answers.failed).raise_first()
            self.paused_mode = mode

    async def continue_generation(
        self, *, torch_empty_cache: bool = True, timeout: float | None = PAUSE_S
    ) -> None:
        """Continue all members, which by default empty their device caches first."""
        async with self.lock:
            await self.continue_members(timeout, torch_empty_cache=torch_empty_cache)

    @contextlib.asynccontextmanager
    async def paused(
        self,
        mode: PauseMode = "in_place",
        *,
        torch_empty_cache: bool = True,
        timeout: float | None = PAUSE_S,
    ) -> AsyncIterator[None]:
        """Pause all members in this block, and continue them after it."""
        await self.pause(mode, timeout=timeout)
        try:
            yield
        finally:
            await self.continue_generation(torch_empty_cache=torch_empty_cache, timeout=timeout)

    async def flush_cache(self, *, torch_empty_cache: bool = True, timeout: float | None = PAUSE_S) -> None:
        """Flush every member's prefix cache and, by default, its device cache; raises the first refusal."""
        request = FlushCacheReqInput(torch_empty_cache=torch_empty_cache)
        answers = await ask_all(self.dispatcher.serving, request, FlushCacheReqOutput, timeout)
        self.dispatcher.drop(answers.out, "it does not answer")
        self.dispatcher.router.forget()
        answers.raise_first()

    async def update(
        self,
        named_tensors: "NamedTensors | None" = None,
        *,
        model_path: str | os.PathLike[str] | None = None,
        transport: Transport | None = None,
        weight_version: str | int | None = None,
        pause_mode: PauseMode = "in_place",
        torch_empty_cache: bool = True,
        deadline_s: float = 600.0,
    ) -> FleetUpdate:
        """Give all members the same new weights: all commit, or none does, and FleetUpdateFailed has
        ``.reasons``.

        Generation is paused in ``pause_mode`` meanwhile, unless the fleet is paused already.

        Args:
            named_tensors: checkpoint names and tensors, or a ``WeightDelta``, which is sent while generation
                goes on; for all transports but ``disk``.
            model_path: a folder that every engine can read, for ``disk``: a checkpoint, or a delta's.
            transport: None means ``disk`` with a path, and with tensors ``tensor``.
            weight_version: the new label. None means unchanged.
            torch_empty_cache: empty the device caches before members continue that the update has paused.
            deadline_s: seconds until all is loaded, a quarter of them, or 60, for pausing and for beginning
                each; a later member is fenced, and the others go on.
        """
        transport, given = transport_of(named_tensors, model_path, transport)
        version, session = label(weight_version), Session(verify=self.verify)

        async def carry_out() -> FleetUpdate:
            session.paused_here, mode = self.paused_mode is None, self.paused_mode or pause_mode
            flush = mode != "in_place"  # requests that are frozen in place keep their cache
            try:
                present = [member for member in self.members if member.state != "gone"]
                staged, limit = is_staged(given), min(deadline_s * CONTROL_SHARE, PAUSE_S)
                deadline = time.monotonic() + deadline_s
                paused = None if staged else await self.pause_members(mode, present, limit)
                there = paused or await everywhere(present, self.ask, limit)
                specs = manifest_of(given) if transport == "chain" else None
                await session.begin(there, timeout=limit, deadline_s=deadline_s + SPARE_S, manifest=specs)
                left = max(0.0, deadline - time.monotonic())
                session.settle(await self._sender.send(transport, given, session, left, flush_cache=flush))
                if staged:  # generation has gone on until here
                    session.settle(await self.pause_members(mode, session.members, limit))
                done = await session.commit(version, max(0.0, deadline - time.monotonic()))
            except (FleetUpdateFailed, asyncio.CancelledError) as error:
                if not session.committing:
                    await session.abort()
                await self.over(session, torch_empty_cache=torch_empty_cache)
                if isinstance(error, FleetUpdateFailed):
                    error.still_serve(self.dispatcher.serving)
                raise
            self.committed(done, Source(given if transport == "disk" and not staged else None, updated=True))
            await self.over(session, committed=True, torch_empty_cache=torch_empty_cache)
            return self._updated(done)

        async with self.weights_lock, self.lock:
            work = asyncio.ensure_future(carry_out())
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                if not session.committing:
                    work.cancel()
                await asyncio.wait([work])
                raise

    async def rollback(self, delta: "WeightDelta | None" = None, *, flush_cache: bool = True) -> FleetUpdate:
        """Return all members to the weights before ``delta``, or before the last one.

        Raises the first refusal if all refuse; members that cannot while others have are fenced.
        """
        digest = None if delta is None else delta.base_digest
        async with self.weights_lock, self.lock:
            request = RollbackWeightsReqInput(to_digest=digest, flush_cache=flush_cache)
            return self._updated(await self.rolled_back(request))

    async def rolled_back(self, request: RollbackWeightsReqInput) -> Answers:
        """Carry out a rollback on all members; the caller holds :attr:`lock`. Raises as :meth:`rollback`."""
        session = Session(verify=self.verify, paused_here=self.paused_mode is None)
        mode = self.paused_mode or ("retract" if request.flush_cache else "in_place")
        present = [member for member in self.members if member.state != "gone"]
        paused = await self.pause_members(mode, present, PAUSE_S)
        rollback = RollbackWeightsReqInput(to_digest=request.to_digest, flush_cache=request.flush_cache)
        done = await ask_all(list(paused.replies), rollback, WeightUpdateReqOutput, PAUSE_S)
        if done.replies:
            self.committed(done, Source(None, updated=True))
        await self.over(session, committed=bool(done.replies), torch_empty_cache=request.torch_empty_cache)
        if not done.replies:
            done.raise_first()
        return done

    def _updated(self, done: Answers) -> FleetUpdate:
        return FleetUpdate(
            epoch=self.weights_epoch,
            weight_version=self.weight_version,
            replies={member.name: reply for member, reply in done.replies.items()},
            fenced={member.name: member.reason for member in self.members if not member.serves},
        )

    def committed(self, done: Answers, source: Source) -> None:
        """Record the commits ``done``; the caller holds :attr:`lock`, and the members are paused."""
        self.dispatcher.epoch += 1
        self.dispatcher.router.forget()
        self.source = source
        for member, reply in done.replies.items():
            self.dispatcher.admit(member, reply.weights_epoch)
            self.weight_version = reply.weight_version
            if reply.weights != "valid":
                self.dispatcher.fence(member, f"its weights are {reply.weights} after a commit")
        self.dispatcher.drop(done.out, "it did not take part in an update to the end")
        for member in set(self.dispatcher.serving) - set(done.replies):
            self.dispatcher.fence(member, "it did not take part in an update")
        self.dispatcher.refusal = None

    async def over(self, session: Session, *, committed: bool = False, torch_empty_cache: bool) -> None:
        """Fence members without valid weights after ``session``, and continue those that it has paused.

        The caller holds :attr:`lock`.
        """
        if not committed:  # else all that serve have said so in their replies
            await self.fence_invalid()
        await self.adapters.restore()
        if session.paused_here:
            await self.continue_members(PAUSE_S, torch_empty_cache=torch_empty_cache)
        self.dispatcher.place_waiting()

    async def status(self, *, timeout: float = ASK_S) -> FleetStatus:
        """Return the state of the fleet, and every member's own status."""
        answers = await ask_all(self.members, GetStatusReqInput(owner=""), GetStatusReqOutput, timeout)
        return FleetStatus(
            weights_epoch=self.weights_epoch,
            weight_version=self.weight_version,
            paused=self.paused_mode,
            live_requests=self.dispatcher.pending,
            moved_requests=self.dispatcher.moved,
            members=[
                MemberStatus(
                    name=member.name,
                    state=member.state,
                    reason=member.reason,
                    load=member.load,
                    engine=answers.replies.get(member),
                )
                for member in self.members
            ],
        )

    async def add(self, address: EngineAddress | str) -> Member:
        """Add a member; it serves with the fleet's weights, or raises why it cannot."""
        began = time.monotonic()
        self.require_addable()
        member = self._made(EngineAddress.of(address))
        try:
            await self.ask(member)  # before the lock: one that says nothing must not hold up updates
            async with self.weights_lock:
                self.require_addable()
                self._add(member)
                await self._admit(member, await catch_up(self, member))
        except BaseException:
            async with self.lock:
                await self.forget(member)
            raise
        logger.info("engine %s joined: it serves after %.1f s", member.name, time.monotonic() - began)
        return member

    def require_addable(self) -> None:
        """Raise the reason why no engine can be added now."""

    async def remove(self, name: str) -> None:
        """Take a member out of the fleet; its requests continue on others.

        The engine itself goes on, without the session and the pause of the fleet.
        """
        async with self.lock:
            if (member := self.dispatcher.members.get(name)) is None:
                raise InvalidRequest(f"the fleet has no member {name!r}", field="name", value=name)
            served = member.serves
            self.dispatcher.fence(member, "it was removed from the fleet")
            if served:
                await self._release(member)
            await self.forget(member)

    async def _release(self, member: Member) -> None:
        """End what this fleet has begun on ``member``."""
        with contextlib.suppress(EngineError):
            status = await self.ask(member)
            session = status.session
            if session is not None and session.owner == self.owner:
                await member.client.end_weight_update(
                    commit=False, session_id=session.session_id, timeout=ASK_S
                )
            if status.generation != "running" and status.pause_owner == self.owner:
                await member.client.continue_generation(timeout=ASK_S)

    async def heal(self) -> list[str]:
        """Bring back fenced and gone members, several at once; return the names of those that serve again."""
        room, healed = asyncio.Semaphore(HEALED_AT_ONCE), []

        async def heal(member: Member) -> None:
            async with room:
                began = time.monotonic()
                if not self.may_heal:
                    return
                with contextlib.suppress(EngineError, TimeoutError):
                    if await self._admit(member, await catch_up(self, member), healing=True):
                        logger.warning(
                            "engine %s serves again after %.1f s", member.name, time.monotonic() - began
                        )
                        healed.append(member.name)

        away = [member for member in self.members if not member.serves and member.state != "joining"]
        # before the lock: those that say nothing must not hold up updates
        there = await ask_all(away, GetStatusReqInput(owner=""), GetStatusReqOutput, PROBE_S)
        if not there.replies:
            return []
        async with self.weights_lock, asyncio.TaskGroup() as work:
            for member in there.replies:
                if not member.serves:
                    work.create_task(heal(member))
        return healed

    def donor(self) -> Member | None:
        """Return the serving member that sends its weights to the fewest others, or None."""
        return min(self.dispatcher.serving, key=lambda each: (each.copies, each.load), default=None)

    @property
    def may_heal(self) -> bool:
        """True if members may be brought back now."""
        return self.paused_mode is None

    @property
    def needs_care(self) -> bool:
        """True if :meth:`heal` may have something to do."""
        return any(not member.serves for member in self.members)

    async def forget(self, member: Member) -> None:
        """Close the connection to a member that is out of routing. The caller holds :attr:`lock`."""
        if self.dispatcher.members.get(member.name) is member:
            del self.dispatcher.members[member.name]
        await member.client.close()

    async def ask(self, member: Member) -> GetStatusReqOutput:
        """Return the status of ``member``, and remember it."""
        status = await member.client.status(owner="", timeout=ASK_S)
        if member.status is not None and member.status.incarnation != status.incarnation:
            member.restarted()
        member.status = status
        return status

    async def pause_members(
        self, mode: PauseMode, members: Sequence[Member], timeout: float | None
    ) -> Answers:
        """Pause ``members``; those that do not answer are out of routing. The caller holds :attr:`lock`."""
        self.leases.hold(member.address for member in members)
        request = PauseGenerationReqInput(mode=mode, lease_s=self._lease_s)
        answers = await ask_all(members, request, PauseGenerationReqOutput, timeout)
        self.dispatcher.drop(answers.out, "it does not pause")
        return answers

    async def continue_members(self, timeout: float | None, *, torch_empty_cache: bool) -> None:
        """Continue all that serve. The caller holds :attr:`lock`."""
        request = ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache, force=True)
        answers = await ask_all(self.dispatcher.serving, request, ContinueGenerationReqOutput, timeout)
        self.paused_mode = None
        self.leases.hold(())
        self.dispatcher.drop(answers.out | answers.failed, "it does not continue")

    async def fence_invalid(self) -> None:
        """Fence members without valid weights. The caller holds :attr:`lock`."""
        answers = await everywhere(self.dispatcher.serving, self.ask, ASK_S)
        self.dispatcher.drop(answers.out | answers.failed, "it does not answer")
        for member, status in answers.replies.items():
            if status.weights != "valid" or status.weights_epoch != member.epoch:
                self.dispatcher.fence(member, f"its weights are {status.weights} after an update that failed")

    async def resume(self, member: Member, released: Sequence[MemoryTag]) -> None:
        """Bring back the memory that ``member`` has released, or raise MemoryReleased."""
        raise MemoryReleased(f"{member.name} has released {', '.join(released)}")  # its owner resumes it

    async def copy(self, donor: EngineAddress, target: EngineAddress) -> None:
        """Copy weights and label of ``donor``, which serves on, to ``target``."""
        await asyncio.to_thread(copy_here, donor, target, self.owner)

    def _require_descriptors(self) -> None:
        needed = OTHER_DESCRIPTORS + len(self._addresses) * DESCRIPTORS * (1 if self._lease_s is None else 2)
        allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if allowed != resource.RLIM_INFINITY and allowed < needed:
            raise InvalidRequest(
                f"{len(self._addresses)} engines need up to {needed} file descriptors, and this process may "
                f"have {allowed}: run it after `ulimit -n {needed}` (the hard limit is {most})",
                field="members",
            )

    def _made(self, address: EngineAddress) -> Member:
        member = Member(
            address,
            self._socket,
            owner=self.owner,
            keepalive_timeout=self._keepalive_timeout,
            lease_s=self._lease_s,
        )
        self._require_new(member)
        return member

    def _add(self, member: Member) -> Member:
        self._require_new(member)
        self.dispatcher.members[member.name] = member
        return member

    def _require_new(self, member: Member) -> None:
        if member.name in self.dispatcher.members:
            raise InvalidRequest(f"the fleet has a member {member.name!r} already", field="name")

    async def _admit(self, member: Member, reached: GetStatusReqOutput, *, healing: bool = False) -> bool:
        """Admit ``member``, unless it was removed or may not be healed now. Needs :attr:`weights_lock`."""
        async with self.lock:
            if self.dispatcher.members.get(member.name) is not member:
                return False
            member.committed(reached.weights_epoch, self.weights_epoch)  # it is not copied to again
            if healing and not self.may_heal:
                return False
            if self.paused_mode is not None:
                await member.client.pause(self.paused_mode, lease_s=member.lease_s, timeout=ASK_S)
                self.leases.hold(each.address for each in self.members)
            elif reached.generation != "running":
                await member.client.continue_generation(force=True, timeout=ASK_S)
            self.dispatcher.admit(member, reached.weights_epoch)
            self.dispatcher.place_waiting()
            return True

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._look_interval_s)
            question = GetStatusReqInput(owner="")
            answers = await ask_all(self.dispatcher.serving, question, GetStatusReqOutput, ASK_S)
            for member, error in answers.out.items():
                if isinstance(error, EngineDied):
                    self.dispatcher.lost(member, error)
            for member, status in answers.replies.items():
                if member.status is not None and member.status.incarnation != status.incarnation:
                    self.dispatcher.lost(member, EngineDied("another process has its endpoint"))
                elif member.serves:
                    member.status = status
            if self.heals and self.needs_care:
                await self.heal()
