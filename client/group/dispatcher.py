"""Generations of a fleet: each goes to a member that serves, waits while none does, and moves when its member is lost.

Invariants:
- A generation ends in its results, in an error of its own, or after ``patience_s`` without any member that serves.
- ``lost`` and ``fence`` are the only ways out of the state ``serving``; both move what the member had, unless the fleet is ending.

Runs on one event loop, that of the members' clients.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ...io_struct import GenerateReqInput, encode
from ..connection.async_channel import Deltas, Result
from ..connection.connection import Generation, Sink
from ..exceptions import (
    DuplicateRid,
    EngineDied,
    EngineError,
    EpochBehind,
    IdConflict,
    InvalidRequest,
    ShuttingDown,
    error_for,
)
from .flow import Flow
from .members import Member, State
from .router import Router, current_routing_key

logger = logging.getLogger(__name__)

DEFAULT_PATIENCE_S = 60.0


class Dispatcher:
    """The members of a fleet, and the generations that they have."""

    def __init__(self, *, patience_s: float | None = DEFAULT_PATIENCE_S) -> None:
        """``patience_s``: how long a generation waits for a member that serves; None: without limit."""
        self.members: dict[str, Member] = {}
        """By name."""
        self.epoch = 0
        """The fleet's weights epoch: that of its last update."""
        self.router = Router()
        self.moved = 0
        """Samples that were continued on another member."""
        self.on_lost: list[Callable[[Member], None]] = []
        """Called when a member is gone."""
        self.ending = False
        """Nothing moves any more: what an engine ends because it ends has ended."""
        self.refusal: EngineError | None = None
        """Why it is of no use to wait while no member serves. None: it may be."""
        self._patience_s = patience_s
        self._flows: dict[str, Flow] = {}
        self._frames: dict[str, tuple[bytes, Flow]] = {}

    @property
    def serving(self) -> list[Member]:
        """The members that are given requests."""
        return [member for member in self.members.values() if member.serves]

    @property
    def flows(self) -> Mapping[str, Flow]:
        """The generations in flight, by rid."""
        return self._flows

    def start(self, request: GenerateReqInput, sink: Sink | None = None) -> Generation[Result, Deltas]:
        """Start a generation on a member; as :meth:`~..wire.async_channel.LoopChannel.start_generation`.

        Raises:
            InvalidRequest: the request is none; DuplicateRid and IdConflict: it is another one than one in flight.
            EpochBehind: the fleet's epoch is lower than ``min_weights_epoch``.
        """
        frame = _encoded(request)
        known = self._frames.get(request.id)
        if known is not None:
            if known[0] != frame:
                raise IdConflict(f"message id {request.id!r} is pending with another body", id=request.id)
            return known[1].generation
        rid = request.rid or request.id
        if rid in self._flows:
            raise DuplicateRid(f"rid {rid!r} is live in this fleet", rid=rid)
        wanted = request.min_weights_epoch
        if wanted is not None and wanted > self.epoch:
            raise EpochBehind(f"the fleet's weights epoch is {self.epoch}, not {wanted}", epoch=self.epoch)
        loop = asyncio.get_running_loop()
        waiter: Result = loop.create_future()
        deltas: Deltas | None = asyncio.Queue() if request.stream and sink is None else None
        if request.sampling_params.seed is None:
            params = msgspec.structs.replace(request.sampling_params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling_params=params)
        flow = Flow(self, request, Generation(request, b"", waiter, deltas, sink), key=current_routing_key())
        waiter.add_done_callback(flow.on_end)
        self._flows[rid] = flow
        self._frames[request.id] = (frame, flow)
        self.place(flow)
        return flow.generation

    def place(self, flow: Flow) -> None:
        """Give what waits of ``flow`` to a member. Without one it waits on; if all that serve are full, it fails."""
        able = [member for member in self.serving if member.own_epoch(flow.least_epoch) is not None]
        free = [member for member in able if member.name not in flow.refused_by]
        if self.ending:
            flow.fail(ShuttingDown("the engines are shutting down"))
        elif free:
            if flow.moves:
                self.moved += 1
            flow.dispatch(self.router.choose(free, flow.prompt, key=flow.key, salt=flow.salt))
        elif able:
            flow.fail(next(reversed(flow.refused_by.values())))
        elif self.refusal is not None:
            flow.fail(error_for(self.refusal.code, self.refusal.message, self.refusal.detail))
        elif self._patience_s is not None:
            asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience, flow, flow.moves)

    def admitted(self) -> None:
        """There is a member more that serves: what waits goes on."""
        for flow in list(self._flows.values()):
            if flow.waits:
                self.place(flow)

    def lost(self, member: Member, error: EngineError) -> None:
        """The process of ``member`` has ended, or cannot be reached."""
        if member.state != "gone" and self.members.get(member.name) is member:
            self._out(member, "gone", error.message)
            for listener in list(self.on_lost):
                listener(member)

    def unfit(self, member: Member, error: EngineError) -> None:
        """``member`` has refused a request that the fleet's weights would serve."""
        if member.serves:
            self.fence(member, f"it refuses requests: {error.message}")

    def fence(self, member: Member, reason: str) -> None:
        """Take ``member`` out of routing: it does not have the fleet's weights, or cannot be waited for."""
        if member.state != "gone":
            self._out(member, "fenced", reason)

    def move(self, member: Member) -> None:
        """Continue on others what ``member`` has."""
        for flow in list(self._flows.values()):
            flow.leave(member)

    def abort(self, flows: Iterable[Flow], index: int | None = None) -> int:
        """End generations with what they have; returns how many samples were live."""
        return sum(flow.abort(index) for flow in list(flows))

    def ended(self, flow: Flow) -> None:
        """``flow`` has its results, or an error."""
        if self._flows.get(flow.generation.rid) is flow:
            del self._flows[flow.generation.rid]
            del self._frames[flow.generation.message_id]

    def end(self) -> None:
        """The engines are about to be told to end: what they then answer is final, and what waits for one fails."""
        self.ending = True
        for flow in list(self._flows.values()):
            if flow.waits:
                self.place(flow)

    def close(self, error: EngineError) -> None:
        """Fail everything in flight."""
        for flow in list(self._flows.values()):
            flow.fail(error)

    def _out(self, member: Member, state: State, reason: str) -> None:
        level = logging.INFO if self.ending else logging.WARNING
        logger.log(level, "engine %s serves no more (%s): %s", member.name, state, reason)
        member.leave(state, reason)
        self.router.forget(member.name)
        self.move(member)

    def _lose_patience(self, flow: Flow, moves: int) -> None:
        if flow.waits and flow.moves == moves:
            reasons = {member.name: member.reason for member in self.members.values()}
            flow.fail(
                EngineDied(f"no engine of the fleet has served for {self._patience_s:g} s", members=reasons)
            )


def _encoded(request: GenerateReqInput) -> bytes:
    count = request.sampling_params.n
    if not isinstance(count, int) or count < 1:
        raise InvalidRequest(f"sampling_params.n = {count!r} must be at least 1", field="sampling_params.n")
    try:
        return encode(request)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{type(request).__name__} cannot be encoded: {error}") from error
