"""The I/O thread of a blocking client.

Invariants:
- Registering a request and queueing its frame happen under one lock, and so do failing everything and emptying the
  queue: a request that was failed is never sent afterwards.
- The socket belongs to the thread. Waiters are resolved under the lock, so nothing that runs at that moment may call
  back into the channel.
- Whatever ends the thread, all waiters are resolved.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from ..io_struct import GenerateReqInput, Message, Request
from .connection import Connection, Generation
from .curve import ClientKeys
from .exceptions import EngineDied
from .link import Frames, Link
from .results import TokenDelta

Result = Future[Any]
Deltas = queue.SimpleQueue[TokenDelta | None]


class ThreadChannel:
    """Requests in from any thread, answers out through futures."""

    def __init__(
        self, endpoint: str, *, connect_timeout: float | None, keys: ClientKeys | None = None
    ) -> None:
        self._lock = threading.Lock()
        # Under the lock.
        self._connection: Connection[Result, Deltas] = Connection(Future, queue.SimpleQueue)
        self._outbox: deque[Frames] = deque()
        self._exit_reason: str | None = None
        self._closing = False
        # The thread's own, once it runs.
        self._poller = zmq.Poller()
        self._link = Link(
            endpoint,
            connect_timeout=connect_timeout,
            keys=keys,
            receive=self._on_message,
            lost=self._on_lost,
            watch=lambda socket: self._poller.register(socket, zmq.POLLIN),
            unwatch=lambda socket: self._poller.unregister(socket),
        )
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="caesura-client", daemon=True)
        self._thread.start()

    def start_generation(self, request: GenerateReqInput) -> Generation[Result, Deltas]:
        """Send a generate request; raises what :meth:`Connection.start_generation` raises."""
        with self._lock:
            generation, frame = self._connection.start_generation(request)
            self._post((frame,))
        return generation

    def start_call(
        self, request: Request, expects: type[Message], buffers: Sequence[memoryview] = ()
    ) -> Result:
        """Send a control message; raises what :meth:`Connection.start_call` raises."""
        with self._lock:
            future, frame = self._connection.start_call(request, expects)
            self._post((frame, *buffers))
        return future

    def expect_exit(self) -> None:
        """Somebody watches the engine's process and will call :meth:`engine_exited`."""
        self._link.expect_exit()

    def engine_exited(self, reason: str) -> None:
        """The engine's process has ended; after what it had sent, everything fails with ``reason``."""
        with self._lock:
            self._exit_reason = reason
            self._wake()

    def close(self) -> None:
        """End the thread and fail what is pending. Idempotent."""
        with self._lock:
            self._closing = True
            self._wake()
        self._thread.join()

    def _post(self, frames: Frames) -> None:
        self._outbox.append(frames)
        self._wake()

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # full: the thread has been told often enough
                os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        try:
            while self._turn():
                deadline = self._link.deadline
                left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
                self._poller.poll(left)
        finally:
            self._end()

    def _turn(self) -> bool:
        """Send what was posted, deliver what has come; False when the client is closing."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 65536)
        with self._lock:
            messages = list(self._outbox)
            self._outbox.clear()
            closing, exit_reason, self._exit_reason = self._closing, self._exit_reason, None
        for frames in messages:
            self._link.send(frames)
        if exit_reason is not None:
            self._link.engine_exited(exit_reason)
        self._link.pump()
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

    def _on_lost(self, reason: str, final: bool) -> None:
        with self._lock:
            error = EngineDied(reason)
            if final:
                self._connection.failure = error
            self._outbox.clear()
            self._connection.fail_all(error)
