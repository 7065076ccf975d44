"""The connections of asyncio clients, driven by their event loop.

Invariants:
- Everything runs on the loop of the first call; another loop is refused, and so is a forked child.
- A lost connection is reported before a request is registered: the request is not lost with it.
- libzmq's descriptor signals once, so each wake-up and send (which may eat the signal) drains the socket.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ...io_struct import AbortReq, AbortReqOutput, GenerateImagesReqInput, GenerateReqInput, Message, Request
from ..exceptions import EngineDied, EngineError
from .client_options import ChannelOptions
from .connection import Connection, Generation, ImageGeneration, Sink
from .endpoints import check_endpoint
from .fork import Process
from .link import Frames, Link
from .prompts import timed_out
from .results import TokenDelta
from .shared_socket import SharedSocket

if TYPE_CHECKING:
    import zmq

Result = asyncio.Future[Any]
Deltas = asyncio.Queue[TokenDelta | None]

MAX_SLEEP_S = 3600.0
"""Longest timer: an event loop refuses to sleep for years."""


async def wait_for(future: Result, message_id: str, timeout: float | None) -> Any:
    """Return the future's result, or raise TimedOut after ``timeout`` seconds (None: no limit)."""
    await asyncio.wait([future], timeout=timeout)
    if not future.done():
        raise timed_out(message_id, timeout)
    return future.result()


async def wait_for_all(futures: Sequence[Result], timeout: float | None) -> None:
    """Return when all have ended, one has failed, or ``timeout`` seconds are over."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)


async def next_delta(deltas: Deltas, message_id: str, timeout: float | None) -> TokenDelta | None:
    """Return the next delta, or None at the end of the stream; TimedOut after ``timeout`` seconds."""
    try:
        async with asyncio.timeout(timeout):
            return await deltas.get()
    except TimeoutError:
        raise timed_out(message_id, timeout) from None


async def run(work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work)


class LoopSocket(SharedSocket):
    """A socket that the running loop looks after, for any number of channels of this loop."""

    def __init__(self) -> None:
        super().__init__(self._read, self._read_no_more)
        self._turn_is_due = False

    def pump(self) -> bool:
        more = super().pump()
        if more:
            self.turn_soon()
        return more

    def turn_soon(self) -> None:
        """Pump after a send, which may have eaten the signal of a message."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self.pump()

    def _read(self, each: "zmq.Socket[bytes]") -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(each.FD, self.pump)

    def _read_no_more(self, each: "zmq.Socket[bytes]") -> None:
        self._loop.remove_reader(each.FD)


class LoopChannel:
    """The asyncio client's side of one engine; connects at the first request.

    ``shared`` is the socket that it uses, by default one of its own.
    """

    def __init__(self, endpoint: str, options: ChannelOptions, shared: LoopSocket | None = None) -> None:
        check_endpoint(endpoint)
        self._process = Process("client")
        self._endpoint = endpoint
        self._options = options
        self._shared = shared or LoopSocket()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._connection: Connection[Result, Deltas] = Connection(self._new_future, asyncio.Queue)
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        self._refusal: EngineError | None = None

    @property
    def incarnation(self) -> str | None:
        return None if self._link is None else self._link.incarnation

    @property
    def pending(self) -> int:
        return self._connection.pending

    def start_generation(
        self, request: GenerateReqInput, sink: Sink | None = None
    ) -> Generation[Result, Deltas]:
        self._prepare()
        generation, frame = self._connection.start_generation(request, sink)
        self._post((frame,))
        if sink is not None:
            generation.waiter.add_done_callback(lambda _: self._abort_unheard(generation))
        return generation

    def _abort_unheard(self, generation: Generation[Result, Deltas]) -> None:
        if generation.sink is None and self._connection.awaits(generation.message_id):
            with suppress(EngineError):
                self.start_call(AbortReq(rid=generation.rid), AbortReqOutput)

    def start_images(
        self, request: GenerateImagesReqInput, buffers: Sequence[bytes]
    ) -> ImageGeneration[Result]:
        self._prepare()
        generation, frame = self._connection.start_images(request)
        self._post((frame, *buffers))
        return generation

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        self._prepare()
        future, frame = self._connection.start_call(request, expects)
        self._post((frame, *buffers))
        return future

    def refuse(self, error: EngineError | None) -> None:
        """Raise ``error`` for new requests until None is given; what is pending is the link's to fail."""
        if self._connection.failure is self._refusal:
            self._connection.failure = self._refusal = error

    def close(self) -> None:
        """Close the socket and fail what is pending. Idempotent; without effect in a forked child."""
        if not self._process.is_here:
            return
        if self._connection.failure is self._refusal:
            self._connection.failure = EngineDied("this client is closed")
        self._connection.fail_all(EngineDied("the client was closed before the answer came"))
        if self._timer is not None:
            self._timer.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _prepare(self) -> None:
        self._process.require()
        self._bind()
        if self._link is not None:
            self._link.notice_loss()

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this client belongs to another event loop")
        return loop

    def _new_future(self) -> Result:
        future: Result = self._bind().create_future()
        # An error that nobody awaits (an aborted sibling, say) is no defect: count it as seen.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return future

    def _post(self, frames: Frames) -> None:
        if self._link is None:
            self._link = self._connect()
        self._link.send(frames)
        self._shared.turn_soon()

    def _connect(self) -> Link:
        self._bind()
        return Link(
            self._endpoint,
            self._options,
            self._shared,
            pending=lambda: self._connection.pending > 0,
            receive=self._connection.receive,
            lost=self._on_lost,
            looked=self._set_timer,
        )

    def _set_timer(self) -> None:
        """Wake up at the deadline at the latest; an earlier timer is kept, since deadlines mostly move on."""
        if self._link is None:
            return
        deadline = self._link.deadline
        now = time.monotonic()
        if self._timer is not None:
            if deadline is None or now < self._wakes_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            left = min(max(0.0, deadline - now), MAX_SLEEP_S)
            self._wakes_at = now + left
            self._timer = self._bind().call_later(left, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None  # spent, also where it fired early, as uvloop's do: the look must set another one
        if self._link is not None:
            self._link.pump()

    def _on_lost(self, error: EngineError, final: bool) -> None:
        if final:
            self._connection.failure = error
        self._connection.fail_all(error)


class Channel(Protocol):
    """Whatever answers the requests of an asyncio client; the methods are those of :class:`LoopChannel`."""

    @property
    def incarnation(self) -> str | None: ...
    @property
    def pending(self) -> int: ...
    def start_generation(
        self, request: GenerateReqInput, sink: Sink | None = None
    ) -> Generation[Result, Deltas]: ...
    def start_images(
        self, request: GenerateImagesReqInput, buffers: Sequence[bytes]
    ) -> ImageGeneration[Result]: ...
    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result: ...
    def refuse(self, error: EngineError | None) -> None: ...
    def close(self) -> None: ...
