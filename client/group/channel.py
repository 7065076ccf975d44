"""A fleet in the place of one engine's connection: what generates over a channel generates over a fleet, unchanged.

Invariant: generations are the dispatcher's, and a message for any one engine (a score, images) goes to the least loaded one. Commands
are refused: one reply could not say what each member did, so the fleet has methods of its own for them.
"""

import asyncio
from collections.abc import Sequence

from ...io_struct import (
    AbortReq,
    AbortReqOutput,
    FetchResultReqInput,
    FetchResultReqOutput,
    GenerateImagesReqInput,
    GenerateReqInput,
    Message,
    Request,
    ScoreReqInput,
)
from ..connection.async_channel import Channel, Deltas, Result
from ..connection.async_client import AsyncSchedulerClient
from ..connection.connection import Generation, ImageGeneration, Sink
from ..connection.fork import Process
from ..connection.options import ConnectionOptions
from ..exceptions import EngineDied, EngineError, Unsupported, error_for
from .dispatcher import Dispatcher
from .members import Member


class FleetChannel:
    """The requests of clients of a fleet."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._process = Process("client")
        self._refusal: EngineError | None = None

    @property
    def incarnation(self) -> str | None:
        """A fleet has none: its members come and go."""
        return None

    @property
    def pending(self) -> int:
        """How many requests have no final answer yet."""
        return len(self._dispatcher.flows)

    def require_own_process(self) -> None:
        """Raise RuntimeError in a forked child."""
        self._process.require()

    def start_generation(
        self, request: GenerateReqInput, sink: Sink | None = None
    ) -> Generation[Result, Deltas]:
        """Start a generation on the member that the router chooses."""
        self._prepare()
        return self._dispatcher.start(request, sink)

    def start_images(
        self, request: GenerateImagesReqInput, buffers: Sequence[bytes]
    ) -> ImageGeneration[Result]:
        """Start images on the least loaded member; they end with it."""
        self._prepare()
        member = self._any()
        generation = member.client.channel.start_images(request, buffers)
        self._count(member, generation.waiter, generation.n)
        return generation

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Send a message to whom it concerns."""
        self._prepare()
        if isinstance(request, AbortReq):
            return self._answered(AbortReqOutput(id=request.id, aborted=self._abort(request)))
        if isinstance(request, FetchResultReqInput):
            flow = self._dispatcher.flows.get(request.rid)
            live = 0 if flow is None else flow.generation.n
            return self._answered(FetchResultReqOutput(id=request.id, results=[], live=live))
        if isinstance(request, ScoreReqInput):
            member = self._any()
            answer = member.client.channel.start_call(request, expects, buffers)
            self._count(member, answer, len(request.input_ids))
            return answer
        raise Unsupported(
            f"{type(request).__name__} is a command to one engine: a fleet has methods for all of them "
            "(pause, update, flush_cache, status), and fleet.members[i].client for one"
        )

    def refuse(self, error: EngineError | None) -> None:
        """From now on every new request raises ``error``; None: no longer."""
        self._refusal = error

    def close(self) -> None:
        """Fail what is pending. The members' clients are their owner's to close. Idempotent."""
        if not self._process.is_here:
            return
        self._refusal = EngineDied("this client is closed")
        self._dispatcher.close(EngineDied("the client was closed before the answer came"))

    def _prepare(self) -> None:
        self._process.require()
        if self._refusal is not None:
            raise error_for(self._refusal.code, self._refusal.message, self._refusal.detail)

    def _abort(self, request: AbortReq) -> int:
        flows = self._dispatcher.flows
        if request.abort_all:
            return self._dispatcher.abort(flows.values())
        flow = flows.get(request.rid or "")
        return 0 if flow is None else self._dispatcher.abort([flow], request.index)

    def _any(self) -> Member:
        serving = self._dispatcher.serving
        if not serving:
            raise EngineDied("no engine of the fleet serves now")
        return min(serving, key=lambda member: member.load)

    @staticmethod
    def _count(member: Member, answer: Result, work: int) -> None:
        """``member`` has so much more to do until ``answer`` is there."""

        def done(_: Result) -> None:
            member.load -= work

        member.load += work
        answer.add_done_callback(done)

    @staticmethod
    def _answered(reply: Message) -> Result:
        future: Result = asyncio.get_running_loop().create_future()
        future.set_result(reply)
        return future


class FleetClient(AsyncSchedulerClient):
    """Generations, images and scores of a fleet, for whatever takes an :class:`AsyncSchedulerClient`."""

    def __init__(self, channel: FleetChannel, *, owner: str | None) -> None:
        self._fleet_channel = channel
        super().__init__("fleet", owner=owner)

    def _opened(self, connection: ConnectionOptions) -> Channel:
        return self._fleet_channel
