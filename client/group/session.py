"""The two-phase weight session of a group: every member loads and verifies, then all commit, or none does.

Invariants:
- No member is told to commit before every member that takes part has loaded and agrees with the rest; none
  generates between the first commit and the last. A session that has failed is open until it is aborted.
- A refusal or failure of a serving member fails the session for all. A member that has ended, is late, or was
  not serving and fails, is out: the rest go on without it.
- The session has one name on all members: the message id of its ``begin`` (docs/reference/lifecycle.md).
- Over ``distributed`` one error is everybody's: a broadcast that one rank does not take reaches nobody. A
  ``chain`` that breaks leaves out those behind the break, if a serving member before it has everything.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import methodcaller
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    EndWeightUpdateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    Message,
    PauseMode,
    Request,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
    new_id,
)
from ...transfer.weight_delta import is_delta
from ..connection.async_channel import Channel
from ..connection.blocking import ControlClient, HeldClient
from ..connection.channel import Result as ThreadResult
from ..connection.client_options import ConnectionOptions, folder_of
from ..exceptions import (
    EngineDied,
    EngineError,
    EngineRestarting,
    GroupError,
    InternalError,
    InvalidRequest,
    ShuttingDown,
    TimedOut,
)
from .members import Member

if TYPE_CHECKING:
    from ..trainer import NamedTensors, WeightUpdateChain, WeightUpdateGroup

MadeT = TypeVar("MadeT", "WeightUpdateGroup", "WeightUpdateChain")

OUT = (EngineDied, EngineRestarting, ShuttingDown, TimedOut)
"""Errors of a member that takes no further part, as opposed to those of a wrong update."""
Transport = Literal["disk", "tensor", "ipc", "distributed", "chain"]
LOOPBACK = "127.0.0.1"
Verify = Literal["counts", "checksums"]
"""``counts`` compares the number of written tensors, ``checksums`` the bytes of every parameter."""
PAUSE_S = 60.0
"""Seconds that a member may take to pause, and to continue."""
LEAST_COMMIT_S, ABORT_S = 30.0, 30.0
"""Seconds that members may take to verify and to commit each, however late it is, and to abort."""
SPARE_S = 60.0
"""Seconds by which the engines' own deadline of a session is later than the group's."""


class FleetUpdateFailed(EngineError):  # noqa: N818  (as the errors of one engine)
    """An update that no member committed: those that had written are poisoned and fenced, the others serve
    on.

    Attributes:
        reasons: the error of each member that had one, by name.
        serving: names of the members that still serve, with the weights of before.
    """

    error_code = EngineError.error_code

    def __init__(self, reasons: Mapping[Member, EngineError]) -> None:
        messages = {member.name: error.message for member, error in reasons.items()}
        told = "; ".join(f"{name}: {message}" for name, message in messages.items())
        super().__init__(f"no engine was updated: {told}", members=messages)
        self.reasons = {member.name: error for member, error in reasons.items()}
        self.still_serve(())
        for error in reasons.values():
            self.code = error.code
            break

    def still_serve(self, members: Iterable[Member]) -> None:
        """Record the members that serve the weights of before."""
        self.serving = self.detail["serving"] = [member.name for member in members]


@dataclass(slots=True)
class Answers:
    replies: dict[Member, Any] = field(default_factory=dict)
    failed: dict[Member, EngineError] = field(default_factory=dict)
    """Refusals and failures of members that are there."""
    out: dict[Member, EngineError] = field(default_factory=dict)
    """Errors of members that have ended, or had not answered in time."""

    def add(self, member: Member, answer: Any) -> None:
        if isinstance(answer, OUT):
            self.out[member] = answer
        elif isinstance(answer, EngineError):
            self.failed[member] = answer
        else:
            self.replies[member] = answer

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with the member's name as a note."""
        for member, error in (self.failed | self.out).items():
            error.add_note(f"engine {member.name}")
            raise error


async def everywhere(
    members: Sequence[Member],
    act: Callable[[Member], Awaitable[Any]],
    timeout: float | None = None,
    *,
    at_least_one: bool = False,
) -> Answers:
    """Do the same on all members at once; ``at_least_one``: wait longer for the first reply."""
    tasks: dict[asyncio.Future[Any], Member] = {}
    answers = Answers()
    for member in members:
        try:
            tasks[asyncio.ensure_future(act(member))] = member
        except EngineError as unsent:
            answers.add(member, unsent)
    if not tasks:
        return answers
    late = set(tasks)
    try:
        _, late = await asyncio.wait(tasks, timeout=None if timeout is None else max(0.0, timeout))
        while at_least_one and late and all(task.exception() for task in tasks.keys() - late):
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in late:
            task.cancel()
    for task, member in tasks.items():
        if task in late:
            answers.add(member, TimedOut(f"no answer within {timeout:g} s", timeout=timeout))
            continue
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            raise error
        answers.add(member, task.result() if error is None else error)
    return answers


async def ask_all(
    members: Sequence[Member],
    request: Request,
    expects: type[Message],
    timeout: float | None = None,
    buffers: Sequence[memoryview] = (),
) -> Answers:
    """Send all members the same message at once, without a task for each."""
    return await everywhere(members, lambda each: each.client.start(request, expects, buffers), timeout)


class Source(NamedTuple):
    """Origin of a group's weights."""

    folder: str | None = None
    updated: bool = False
    """True if the group has been updated since it was opened; else the engines started with the folder."""


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """An update of a group, from its ``begin`` until all have committed or aborted."""

    verify: Verify
    id: str = field(default_factory=new_id)
    kind: Literal["explicit", "implicit", "single"] = "single"
    owner: str | None = None
    route: tuple[Any, ...] = ()
    """Transport, group and label, in which the calls of an implicit session must agree."""
    paused_here: bool = False
    """True if the update has paused the members."""
    pause_mode: PauseMode = "in_place"
    """Mode of the pause at the commit, if there is none yet."""
    committing: bool = False
    """True once members are told to commit: it then runs to the end, whoever stops waiting."""
    members: list[Member] = field(default_factory=list)
    out: dict[Member, EngineError] = field(default_factory=dict)
    incarnations: dict[Member, str | None] = field(default_factory=dict)
    """Processes of the members at its begin: a later one does not know the session."""
    began: float = field(default_factory=monotonic)
    count: int = 0
    """Number of members at its begin."""
    calls: int = 0
    """Number of loading calls, which have written :attr:`tensors`."""
    tensors: int = 0
    source: Source | None = None
    missing: set[str] | None = None
    """Tensors of an implicit session that no call has named, or None if unknown. A hint: the commit
    decides, since engines may store other names, and pieces count as whole tensors."""
    timer: asyncio.TimerHandle | None = None

    async def begin(
        self,
        paused: Answers,
        *,
        timeout: float,
        deadline_s: float | None,
        manifest: list[TensorSpec] | None = None,
    ) -> None:
        """Open it on the members that have answered ``paused``; raise FleetUpdateFailed if one refuses."""
        request = BeginWeightUpdateReqInput(id=self.id, deadline_s=deadline_s, manifest=manifest)

        async def begin_anew(member: Member) -> Any:
            with suppress(EngineError):  # an earlier update may have left a session open there
                await member.client.end_weight_update(commit=False, force=True)
            return await begin(member)

        def begin(member: Member) -> Awaitable[Any]:
            return member.client.start(request, BeginWeightUpdateReqOutput)

        self.members, self.count = list(paused.replies), len(paused.replies)
        self.settle(paused)
        self.settle(
            await everywhere(
                self.members, lambda each: begin(each) if each.serves else begin_anew(each), timeout
            )
        )
        self.incarnations = {each: each.client.incarnation for each in self.members}

    async def commit(self, label: str | None, timeout: float) -> Answers:
        """Verify, then commit everywhere; FleetUpdateFailed if one differs, or all refuse."""
        limit = max(timeout, LEAST_COMMIT_S)
        self.settle(await self._verified(limit))
        self.committing = True
        request = EndWeightUpdateReqInput(commit=True, session_id=self.id, weight_version=label)
        answers = await ask_all(self.members, request, WeightUpdateReqOutput, limit)
        lost = answers.out | answers.failed
        if not answers.replies:
            raise FleetUpdateFailed(self.out | lost)
        self.out |= lost
        return Answers(answers.replies, out=self.out)

    async def _verified(self, timeout: float) -> Answers:
        """Compare what the members have loaded; one that differs from the first serving member has failed."""
        if self.verify == "checksums":
            question: Request = WeightsCheckerReqInput(action="checksum")
            answers = await ask_all(self.members, question, WeightsCheckerReqOutput, timeout)
            found = {member: reply.total for member, reply in answers.replies.items()}
        else:
            answers = await ask_all(self.members, GetStatusReqInput(), GetStatusReqOutput, timeout)
            found = {
                member: None if reply.session is None else reply.session.written_tensors
                for member, reply in answers.replies.items()
            }
        answers.replies = found
        for member in [each for each in found if self._restarted(each)]:
            answers.out[member] = EngineDied(f"{member.name} was restarted: it does not know the session")
            del found[member]
        expected = found[max(found, key=lambda member: member.serves)] if found else None
        for member in [each for each in found if found[each] != expected or found[each] is None]:
            answers.failed[member] = InternalError(
                f"it has loaded other weights than the others: {self.verify} {found.pop(member)}, "
                f"not {expected}"
            )
        return answers

    def _restarted(self, member: Member) -> bool:
        """Return True if the process that has begun the session there has ended."""
        return member in self.incarnations and member.client.incarnation != self.incarnations[member]

    async def abort(self) -> None:
        request = EndWeightUpdateReqInput(commit=False, session_id=self.id)
        await ask_all(self.members, request, WeightUpdateReqOutput, ABORT_S)

    def settle(self, answers: Answers) -> None:
        """Go on with the members that have replied. Raises as :meth:`begin`."""
        for member in [each for each in answers.failed if self._restarted(each)]:
            refusal = answers.failed.pop(member)
            answers.out[member] = EngineDied(f"{member.name} was restarted: {refusal.message}")
        if any(member.serves for member in self.members):
            for member in [each for each in answers.failed if not each.serves]:
                answers.out[member] = answers.failed.pop(member)
        self.out |= answers.out
        self.members = [member for member in self.members if member not in self.out]
        if answers.failed or not self.members:
            raise FleetUpdateFailed({**answers.failed, **self.out})


def transport_of(
    named_tensors: "NamedTensors | None",
    model_path: str | os.PathLike[str] | None,
    transport: Transport | None,
) -> tuple[Transport, Any]:
    """Return the transport of an update's arguments, and its folder or re-readable tensors."""
    if (named_tensors is None) == (model_path is None):
        raise InvalidRequest("give either named_tensors or model_path", field="named_tensors")
    transport = transport or ("disk" if named_tensors is None else "tensor")
    if (transport == "disk") != (named_tensors is None):
        raise InvalidRequest(
            f"transport = {transport!r} does not fit: disk takes model_path, the others take named_tensors",
            field="transport",
        )
    if model_path is not None:
        return transport, folder_of(model_path)
    if transport == "chain" and is_staged(named_tensors):
        raise InvalidRequest(
            "a chain passes on whole checkpoints: send a WeightDelta by another transport", field="transport"
        )
    from ..trainer import SharedTensors

    rereadable = isinstance(named_tensors, SharedTensors | Mapping)
    return transport, named_tensors if rereadable else list(named_tensors or ())


def is_staged(given: Any) -> bool:
    """Return True if an update of ``given`` is a delta, which engines write at the commit."""
    return is_delta(given) if isinstance(given, str) else hasattr(given, "base_digest")


def manifest_of(named_tensors: Any) -> list[TensorSpec]:
    """Return the specs of tensors: engines that are told them refuse before the first byte."""
    from ..trainer.buckets import manifest

    return manifest(named_tensors)


class _LentChannel:
    """The connection of a member, for threads beside its event loop."""

    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = member.client, loop

    @property
    def incarnation(self) -> str | None:
        return self._client.incarnation

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> ThreadResult:
        answer: ThreadResult = ThreadResult()

        def start() -> None:
            try:
                asked = self._client.start(request, expects, buffers)
            except EngineError as error:
                answer.set_exception(error)
            else:
                asked.add_done_callback(tell)

        def tell(asked: asyncio.Future[Any]) -> None:
            if asked.cancelled() or (error := asked.exception()) is not None:
                answer.set_exception(EngineDied("the call was cancelled") if asked.cancelled() else error)
            else:
                answer.set_result(asked.result())

        self._loop.call_soon_threadsafe(start)
        return answer

    def close(self) -> None:
        """Leave the connection to its owner."""


class _LentClient(HeldClient):
    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        self._lent = _LentChannel(member, loop)
        super().__init__(member.address.endpoint, owner=member.client.owner)

    def _opened(self, connection: ConnectionOptions) -> Channel:
        return cast("Channel", self._lent)  # its futures are those that a held client waits for


class _MemberControl(ControlClient):
    """Commands to a member by blocking code, which needs no connection and no thread of its own."""

    def __init__(self, member: Member, loop: asyncio.AbstractEventLoop) -> None:
        self._held = _LentClient(member, loop)
        self.endpoint = member.address.endpoint


class WeightSender:
    """Sends weights. Keeps one process group or chain, made anew if the members change or it fails."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._made: WeightUpdateGroup | WeightUpdateChain | None = None
        self._made_for: tuple[Transport, list[str | None]] | None = None

    async def send(
        self, transport: Transport, given: Any, session: Session, timeout: float, *, flush_cache: bool
    ) -> Answers:
        """Load a folder or named tensors, ``given``, into the session of every member."""
        members = session.members
        options: Any = {"session_id": session.id, "flush_cache": flush_cache}
        if transport == "disk":
            request = UpdateWeightFromDiskReqInput(model_path=given, **options)
            return await ask_all(members, request, WeightUpdateReqOutput, timeout)
        if transport in ("tensor", "ipc"):
            call = methodcaller(f"update_weights_from_{transport}", given, **options)
            return await everywhere(members, lambda each: call(each.client), timeout)
        # the group of a former process reaches nobody
        made_for = transport, [member.client.incarnation for member in members]
        if made_for != self._made_for:
            await asyncio.to_thread(self.close)
            self._made_for = made_for
        loop = asyncio.get_running_loop()
        try:
            answers = await asyncio.to_thread(
                self._by_group, transport, members, loop, timeout, given, options
            )
        except EngineError as error:
            answers = Answers(
                failed={
                    member: GroupError(f"the {transport} update failed: {error.message}")
                    for member in members
                }
            )
        if answers.failed or answers.out:
            await asyncio.to_thread(self.close)
        return answers

    def close(self) -> None:
        """Leave the process group. Blocks, while the members' event loop runs. Idempotent."""
        made, self._made, self._made_for = self._made, None, None
        if made is not None:
            with suppress(EngineError):
                made.close()

    def _create(
        self,
        kind: type[MadeT],
        members: Sequence[Member],
        loop: asyncio.AbstractEventLoop,
        timeout: float,
    ) -> MadeT:
        if not isinstance(self._made, kind):
            self._made = kind.create(
                [_MemberControl(member, loop) for member in members],
                master_address=own_address([member.address.endpoint for member in members]),
                group_name=f"fleet-{self._owner}"[:120],
                timeout_s=min(60.0, max(1.0, timeout)),
            )
        return self._made

    def _by_group(
        self,
        transport: Transport,
        members: Sequence[Member],
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        tensors: Any,
        options: dict[str, Any],
    ) -> Answers:
        from ..trainer import WeightUpdateChain, WeightUpdateGroup

        if transport == "distributed":
            group = self._create(WeightUpdateGroup, members, loop, timeout)
            replies = group.update(tensors, timeout=timeout, **options)
            return Answers(dict(zip(members, replies, strict=True)))
        chain = self._create(WeightUpdateChain, members, loop, timeout)
        answers = Answers()
        for member, answer in zip(members, chain.load(tensors, timeout=timeout, **options), strict=True):
            answers.add(member, answer)
        if any(member.serves for member in answers.replies):
            for member in [each for each, error in answers.failed.items() if isinstance(error, GroupError)]:
                answers.out[member] = answers.failed.pop(member)  # a link before it broke
        return answers


def own_address(endpoints: Sequence[str]) -> str:
    """Return this host's address as the engines at ``endpoints`` reach it."""
    for endpoint in endpoints:
        scheme, _, place = endpoint.partition("://")
        host = place.rpartition(":")[0].strip("[]")
        if scheme != "tcp" or host in (LOOPBACK, "localhost", "::1"):
            continue
        family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    return LOOPBACK
