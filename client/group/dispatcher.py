"""Requests of a group: each goes to a member that serves, waits for one, and moves when its member is lost.

Invariants:
- A generation ends in results, an error of its own, or after ``patience_s`` without a member that serves.
- Only ``lost`` and ``fence`` end the state ``serving``; both move the generations, unless the group is
  ending.
- Images and scores go to the least loaded member and end with it.
- Everything runs on one event loop, that of the members' clients.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from ... import io_struct as wire
from ..connection.async_channel import Channel, Deltas, Result
from ..connection.async_client import AsyncSchedulerClient
from ..connection.client_options import ConnectionOptions
from ..connection.connection import Generation, ImageGeneration, Sink, unencodable
from ..connection.fork import Process
from ..exceptions import (
    DuplicateRid,
    EngineDied,
    EngineError,
    EpochBehind,
    IdConflict,
    InvalidRequest,
    ShuttingDown,
    UnknownAdapter,
    Unsupported,
    error_for,
)
from .flow import Flow
from .members import Member, State
from .router import Router, current_routing_key

if TYPE_CHECKING:
    from .member_adapters import Adapters

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE_S = 60.0


@dataclass(slots=True)
class GroupAdapter:
    """An adapter that a group serves, and how a member gets it."""

    request: wire.LoadAdapterReqInput
    buffers: Sequence[bytes]
    """Tensors that came with the request; none for a folder."""
    epoch: int
    digest: str
    last_used: float = 0.0
    """Monotonic time of the last request."""


class Dispatcher:
    """The members of a group by name, and their generations; the channel of a :class:`GenerationClient`."""

    def __init__(self, *, patience_s: float | None = DEFAULT_PATIENCE_S) -> None:
        """``patience_s``: seconds that a generation waits for a member that serves; None without limit."""
        self.members: dict[str, Member] = {}
        self.adapters: dict[str, GroupAdapter] = {}
        """Adapters by name, which ``member_adapters.py`` loads and unloads."""
        self.epoch = 0
        self.router = Router()
        self.moved = 0
        """Number of times that a request was continued on another member."""
        self.on_lost: list[Callable[[Member], None]] = []
        self.ending = False
        """True when the engines are told to end: nothing moves any more."""
        self.refusal: EngineError | None = None
        """Why requests need not wait while no member serves, or None if they wait."""
        self._patience_s = patience_s
        self.flows: dict[str, Flow] = {}
        self._waiting: dict[str, Flow] = {}
        """Flows that had no member to go to, by rid."""
        self._frames: dict[str, tuple[bytes, Flow]] = {}
        self._images: dict[str, tuple[Member, int]] = {}
        self._process = Process("client")
        self._closed: EngineError | None = None

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members.values() if member.serves]

    @property
    def incarnation(self) -> str | None:
        return None

    @property
    def pending(self) -> int:
        return len(self.flows)

    def require_open(self) -> None:
        """Raise RuntimeError in a forked child, and the error of :meth:`refuse` or of :meth:`close`."""
        self._process.require()
        if self._closed is not None:
            raise error_for(self._closed.code, self._closed.message, self._closed.detail)

    def start_generation(
        self, request: wire.GenerateReqInput, sink: Sink | None = None
    ) -> Generation[Result, Deltas]:
        """Start a generation on the chosen member, or raise DuplicateRid, IdConflict, EpochBehind."""
        self.require_open()
        frame = _encoded(request)
        known = self._frames.get(request.id)
        if known is not None:
            if known[0] != frame:
                raise IdConflict(f"message id {request.id!r} is pending with another body", id=request.id)
            return known[1].generation
        rid = request.rid or request.id
        if rid in self.flows:
            raise DuplicateRid(f"rid {rid!r} is live in this fleet", rid=rid)
        wanted = request.min_weights_epoch
        if wanted is not None and wanted > self.epoch:
            raise EpochBehind(f"the fleet's weights epoch is {self.epoch}, not {wanted}", epoch=self.epoch)
        if request.adapter is not None:
            self.require_adapter(request.adapter).last_used = monotonic()
        waiter: Result = asyncio.get_running_loop().create_future()
        deltas: Deltas | None = asyncio.Queue() if request.stream and sink is None else None
        if request.sampling_params.seed is None:
            params = msgspec.structs.replace(request.sampling_params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling_params=params)
        flow = Flow(self, request, Generation(request, b"", waiter, deltas, sink), key=current_routing_key())
        waiter.add_done_callback(flow.on_end)
        self.flows[rid] = flow
        self._frames[request.id] = (frame, flow)
        self.place(flow)
        return flow.generation

    def require_adapter(self, name: str) -> GroupAdapter:
        """Return an adapter, or raise as an engine does that has none of this name."""
        if name in self.adapters:
            return self.adapters[name]
        if any(member.status is not None and not member.status.max_loras for member in self.serving):
            reason = "this engine serves no adapters: start it with enable_lora"
            raise Unsupported(reason, field="enable_lora")
        loaded = sorted(self.adapters)
        reason = f"no adapter {name!r} is loaded: {', '.join(loaded) or 'none is'}"
        raise UnknownAdapter(reason, adapter=name, loaded=loaded)

    def start_images(
        self, request: wire.GenerateImagesReqInput, buffers: Sequence[bytes]
    ) -> ImageGeneration[Result]:
        self.require_open()
        member = self._least_loaded()
        generation = member.client.channel.start_images(request, buffers)
        self._count(member, generation.waiter, generation.n)
        self._images[generation.rid] = member, generation.n
        generation.waiter.add_done_callback(lambda _: self._images.pop(generation.rid, None))
        return generation

    def start_call(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Abort or fetch requests, or score on the least loaded member; refuse commands to one engine."""
        self.require_open()
        if isinstance(request, wire.AbortReq):
            return _answered(wire.AbortReqOutput(id=request.id, aborted=self._abort(request)))
        if isinstance(request, wire.FetchResultReqInput):
            flow = self.flows.get(request.rid)
            live = 0 if flow is None else flow.generation.n
            return _answered(wire.FetchResultReqOutput(id=request.id, results=[], live=live))
        if isinstance(request, wire.ScoreReqInput):
            member = self._least_loaded()
            answer = member.client.channel.start_call(request, expects, buffers)
            self._count(member, answer, len(request.input_ids))
            return answer
        raise Unsupported(
            f"{type(request).__name__} is a command to one engine: a fleet has methods for all of them "
            "(pause, update, flush_cache, status), and fleet.members[i].client for one"
        )

    def refuse(self, error: EngineError | None) -> None:
        """Raise ``error`` for every new request from now on; None ends that."""
        self._closed = error

    def close(self) -> None:
        """Fail what is pending. The members' clients are their owner's to close. Idempotent."""
        if not self._process.is_here:
            return
        self._closed = EngineDied("this client is closed")
        for flow in list(self.flows.values()):
            flow.fail(EngineDied("the client was closed before the answer came"))

    def place(self, flow: Flow) -> None:
        """Give what waits of ``flow`` to a member, if one serves; if all that do are full, it fails."""
        request = flow.request
        if self.ending:
            flow.fail(ShuttingDown("the engines are shutting down"))
            return
        if request.adapter is not None and request.adapter not in self.adapters:  # unloaded while it moved
            lost = request.adapter
            flow.fail(UnknownAdapter(f"adapter {lost!r} is not loaded any more", adapter=lost))
            return
        fits, refused = flow.fits(), flow.refused_by
        chosen = self.router.choose(
            request.input_ids,
            (lambda member: member.name not in refused and fits(member)) if refused else fits,
            key=flow.key,
            salt=request.cache_salt,
        )
        if chosen is not None:
            if flow.moves:
                self.moved += 1
            flow.dispatch(chosen)
            return
        if refused and self.router.least_loaded(fits) is not None:
            flow.fail(next(reversed(refused.values())))
            return
        self._waiting[flow.generation.rid] = flow
        if self.refusal is not None:
            flow.fail(error_for(self.refusal.code, self.refusal.message, self.refusal.detail))
        elif self._patience_s is not None:
            asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience, flow, flow.moves)

    def place_waiting(self) -> None:
        """Place all that waits: another member serves, or the engines are ending."""
        waiting, self._waiting = self._waiting, {}
        for flow in waiting.values():
            if flow.waits:
                self.place(flow)

    def admit(self, member: Member, epoch: int) -> None:
        """Let ``member`` serve: its own ``epoch`` has the group's weights."""
        member.admit(epoch, self.epoch)
        if self.members.get(member.name) is member:
            self.router.add(member)

    def lost(self, member: Member, error: EngineError) -> None:
        """Take out ``member``, whose process has ended or cannot be reached."""
        if member.state != "gone" and self.members.get(member.name) is member:
            self._take_out(member, "gone", error.message)
            for listener in list(self.on_lost):
                listener(member)

    def fence(self, member: Member, reason: str) -> None:
        """Take ``member`` out of routing: it does not have the group's weights, or does not answer."""
        if member.state != "gone":
            self._take_out(member, "fenced", reason)

    def drop(self, errors: Mapping[Member, EngineError], what: str) -> None:
        """Take out members: one has ended, or is fenced for ``what`` it did not do."""
        for member, error in errors.items():
            if isinstance(error, EngineDied):
                self.lost(member, error)
            else:
                self.fence(member, f"{what}: {error.message}")

    def ended(self, flow: Flow) -> None:
        if self.flows.get(flow.generation.rid) is flow:
            del self.flows[flow.generation.rid]
            self._waiting.pop(flow.generation.rid, None)
            del self._frames[flow.generation.message_id]

    def end(self) -> None:
        """Take what engines answer from now on as final, and fail what waits for one."""
        self.ending = True
        self.place_waiting()

    def _take_out(self, member: Member, state: State, reason: str) -> None:
        level = logging.INFO if self.ending else logging.WARNING
        logger.log(level, "engine %s serves no more (%s): %s", member.name, state, reason)
        member.leave(state, reason)
        self.router.remove(member)
        for flow in dict.fromkeys(attempt.flow for attempt in member.attempts):
            flow.leave(member)

    def _lose_patience(self, flow: Flow, moves: int) -> None:
        if flow.waits and flow.moves == moves:
            reasons = {member.name: member.reason for member in self.members.values()}
            flow.fail(
                EngineDied(f"no engine of the fleet has served for {self._patience_s:g} s", members=reasons)
            )

    def _abort(self, request: wire.AbortReq) -> int:
        every, named = request.abort_all, request.rid
        wanted = {named} if isinstance(named, str) else set(named or ())
        aborted = 0
        for rid, (member, n) in list(self._images.items()):
            if every or rid in wanted:
                aborted += n if request.index is None else 1
                with suppress(EngineError):
                    member.client.channel.start_call(
                        wire.AbortReq(rid=rid, index=request.index), wire.AbortReqOutput
                    )
        flows = [flow for rid, flow in self.flows.items() if every or rid in wanted]
        return aborted + sum(flow.abort(None if every else request.index) for flow in flows)

    def _least_loaded(self) -> Member:
        member = self.router.least_loaded()
        if member is None:
            raise EngineDied("no engine of the fleet serves now")
        return member

    def _count(self, member: Member, answer: Result, work: int) -> None:
        self.router.charge(member, work)
        answer.add_done_callback(lambda _: self.router.charge(member, -work))


def beside(work: Coroutine[Any, Any, Any]) -> Result:
    """Carry out a command, which goes on if nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # counts as seen
    return task


class GenerationClient(AsyncSchedulerClient):
    """Generations, scores and adapters of a group, for whatever takes an :class:`AsyncSchedulerClient`."""

    def __init__(self, dispatcher: Dispatcher, adapters: "Adapters", *, owner: str | None) -> None:
        self._dispatcher = dispatcher
        self._adapters = adapters
        super().__init__("fleet", owner=owner)

    def _opened(self, connection: ConnectionOptions) -> Channel:
        return self._dispatcher

    def start(
        self, request: wire.Request, expects: type[wire.Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        if not isinstance(request, wire.LoadAdapterReqInput | wire.UnloadAdapterReqInput):
            return super().start(request, expects, buffers)
        self._dispatcher.require_open()
        self._sign(request)
        return beside(self._adapters.carry_out(request, buffers, nullcontext()))


def _answered(reply: wire.Message) -> Result:
    future: Result = asyncio.get_running_loop().create_future()
    future.set_result(reply)
    return future


def _encoded(request: wire.GenerateReqInput) -> bytes:
    count = request.sampling_params.n
    if not isinstance(count, int) or count < 1:
        raise InvalidRequest(f"sampling_params.n = {count!r} must be at least 1", field="sampling_params.n")
    try:
        return wire.encode(request)
    except (TypeError, OverflowError, ValueError) as error:
        raise unencodable(request, error) from error
