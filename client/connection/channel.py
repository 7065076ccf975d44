"""The I/O thread of a blocking client, and how other threads wait.

Invariants:
- One thread owns the socket; any others may register a request, queue its frame and wait on a future.
- Registering and queueing share one lock. A lost connection fails what its socket got; the queue goes to the
  next.
- Waiters are resolved under the lock, so nothing then may call back; whatever ends the thread, all are.
- A forked child has neither thread nor socket, and is told so without taking the lock.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar, cast

import zmq

from ...io_struct import GenerateImagesReqInput, GenerateReqInput, Message, Request
from ..exceptions import EngineDied, EngineError
from .client_options import ChannelOptions
from .connection import Connection, Generation, ImageGeneration
from .fork import Process
from .link import Frames, Link
from .prompts import timed_out
from .results import TokenDelta
from .shared_socket import SharedSocket

StartedT = TypeVar("StartedT")
ResultT = TypeVar("ResultT")
Result = Future[Any]
Deltas = queue.SimpleQueue[TokenDelta | None]

MAX_POLL_S = 3600.0
"""Longest sleep: poll counts milliseconds in an int."""


def wait_for(future: Result, message_id: str, timeout: float | None) -> Any:
    """Return the future's result, or raise TimedOut after ``timeout`` seconds (None: no limit)."""
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # an answer that is itself a TimeoutError, or one that came in this instant
            return future.result()
        raise timed_out(message_id, timeout) from None


def wait_for_all(futures: Sequence[Result], timeout: float | None) -> None:
    """Return when all have ended, one has failed, or ``timeout`` seconds are over."""
    wait(futures, timeout, return_when=FIRST_EXCEPTION)


def next_delta(deltas: Deltas, message_id: str, timeout: float | None) -> TokenDelta | None:
    """Return the next delta, or None at the end of the stream; TimedOut after ``timeout`` seconds."""
    try:
        return deltas.get(timeout=timeout)
    except queue.Empty:
        raise timed_out(message_id, timeout) from None


def at_once(function: Callable[..., ResultT]) -> Callable[..., Coroutine[Any, Any, ResultT]]:
    """Return a coroutine function that calls ``function``, which may block, without suspending."""

    async def call(*arguments: Any) -> ResultT:
        return function(*arguments)

    return call


def finished(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Carry out a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast("ResultT", done.value)
    raise RuntimeError("a coroutine of a blocking client has suspended")


class ThreadChannel:
    def __init__(self, endpoint: str, options: ChannelOptions) -> None:
        self._process = Process("client")
        self._lock = threading.Lock()
        # Under the lock.
        self._connection: Connection[Result, Deltas] = Connection(Future, queue.SimpleQueue)
        self._outbox: deque[tuple[str | None, Frames]] = deque()
        """Frames, with their message id unless they repeat a message that was sent before."""
        self._exit_reason: str | None = None
        self._closing = False
        # The thread's own, once it runs.
        self._poller = zmq.Poller()
        self._link = Link(
            endpoint,
            options,
            SharedSocket(lambda each: self._poller.register(each, zmq.POLLIN), self._poller.unregister),
            pending=lambda: self._connection.pending > 0,
            receive=self._on_message,
            lost=self._on_lost,
        )
        try:
            self._wake_read, self._wake_write = os.pipe()
        except OSError:
            self._link.close()
            raise
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="caesura-client", daemon=True)
        self._thread.start()

    @property
    def incarnation(self) -> str | None:
        return self._link.incarnation

    def start_generation(self, request: GenerateReqInput) -> Generation[Result, Deltas]:
        return self._start(request, lambda: self._connection.start_generation(request))

    def start_images(
        self, request: GenerateImagesReqInput, buffers: Sequence[bytes]
    ) -> ImageGeneration[Result]:
        return self._start(request, lambda: self._connection.start_images(request), buffers)

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        return self._start(request, lambda: self._connection.start_call(request, expects), buffers)

    def _start(
        self, request: Request, register: Callable[[], tuple[StartedT, bytes]], buffers: Frames = ()
    ) -> StartedT:
        self._process.require()
        with self._lock:
            again = self._connection.awaits(request.id)
            started, frame = register()
            self._outbox.append((None if again else request.id, (frame, *buffers)))
            self._wake()
        return started

    def expect_exit(self) -> None:
        self._link.expect_exit()

    def engine_exited(self, reason: str) -> None:
        """Fail everything with ``reason``, after what the ended process had sent."""
        with self._lock:
            self._exit_reason = reason
            self._wake()

    def close(self) -> None:
        """End the thread and fail what is pending. Idempotent; without effect in a forked child."""
        if not self._process.is_here:
            return
        with self._lock:
            self._closing = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # full: the thread has been told often enough
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        try:
            while self._turn():
                deadline = self._link.deadline
                left = MAX_POLL_S if deadline is None else deadline - time.monotonic()
                self._poller.poll(max(0, int(min(left, MAX_POLL_S) * 1000) + 1))
        finally:
            self._end()

    def _turn(self) -> bool:
        """Deliver what has come, then send what was posted; False when the client is closing."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 65536)
        with self._lock:
            exit_reason, self._exit_reason = self._exit_reason, None
        if exit_reason is not None:
            self._link.engine_exited(exit_reason)
        self._link.pump()  # first: nothing is handed to a socket that is known to have lost its engine
        with self._lock:
            messages = list(self._outbox)
            self._outbox.clear()
            closing = self._closing
        for _, frames in messages:
            self._link.send(frames)
        return not closing

    def _end(self) -> None:
        with self._lock:
            if self._connection.failure is None:
                self._connection.failure = EngineDied("this client is closed")
            self._connection.fail_all(EngineDied("the client was closed before the answer came"))
            os.close(self._wake_write)
            self._wake_write = -1
        os.close(self._wake_read)
        self._link.close()

    def _on_message(self, frames: list[bytes]) -> None:
        with self._lock:
            self._connection.receive(frames)

    def _on_lost(self, error: EngineError, final: bool) -> None:
        with self._lock:
            if final:
                self._connection.failure = error
                self._outbox.clear()
            unsent = [(message_id, frames) for message_id, frames in self._outbox if message_id is not None]
            self._outbox = deque(unsent)
            self._connection.fail_all(error, spare={message_id for message_id, _ in unsent})
