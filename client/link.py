"""The socket to one scheduler, without blocking and without a thread of its own.

Invariants:
- A lost connection is final for everything that was pending: a restarted engine has no memory of old requests. The
  socket is replaced at that moment, so nothing queued for the old engine can reach a new one (a pause from the
  past, say).
- Everything the engine sent before it went is delivered before the loss is reported.
- The owner calls :meth:`pump` whenever one of the sockets may be readable, after every send, and at :attr:`deadline`.

States of a link: *connecting* (a deadline runs while something is pending) → *connected* → *lost* (replaced, back to
connecting; or dead for good when the watched process has exited).
"""

import os
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from .curve import HANDSHAKE_FAILURES, ClientKeys, configure, why_refused
from .exceptions import InvalidRequest

MAX_IPC_PATH = 107
"""Longest ipc:// path, in bytes: the kernel's sun_path less its terminating zero."""

EXIT_GRACE_S = 1.0
"""How long a closed connection and the exit of its process wait for each other, so that the error names both."""

Frames = Sequence[bytes | memoryview]
"""Header, then buffers."""


class Link:
    """One DEALER socket and its monitor.

    ``receive(frames)`` gets every message; ``lost(reason, final)`` is told that the engine is gone, ``final`` when no
    reconnect can help; ``watch(socket)`` and ``unwatch(socket)`` keep the owner's poller right as sockets are replaced.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        connect_timeout: float | None,
        keys: ClientKeys | None = None,
        receive: Callable[[list[bytes]], None],
        lost: Callable[[str, bool], None],
        watch: Callable[["zmq.Socket[bytes]"], None],
        unwatch: Callable[["zmq.Socket[bytes]"], None],
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.deadline: float | None = None
        """When :meth:`pump` must be called next, on time.monotonic's clock; None: only when a socket is readable."""
        self._connect_timeout = connect_timeout
        self._keys = keys
        self._receive = receive
        self._lost = lost
        self._watch = watch
        self._unwatch = unwatch
        self._connected = False
        self._disconnected = False
        self._refusal: str | None = None
        """Why the last handshake failed, where that can be told."""
        self._exit_reason: str | None = None
        self._expects_exit = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open(connect=True)

    def send(self, frames: Frames) -> None:
        """Hand one message to the socket; never blocks, its queue is bounded by what the callers have pending.

        Buffers behind the header are not copied: they must stay as they are until the answer is there.
        """
        if not self._connected and self.deadline is None and self._connect_timeout is not None:
            if self._refusal is not None:  # while nothing was pending; ZeroMQ does not try again by itself
                self._close_sockets()
                self._open(connect=True)
            self.deadline = time.monotonic() + self._connect_timeout
        if len(frames) == 1:
            self._dealer.send(frames[0], zmq.NOBLOCK)
        else:
            self._dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def expect_exit(self) -> None:
        """The process behind this endpoint is watched: its exit will be reported, and explains a lost connection."""
        self._expects_exit = True

    def engine_exited(self, reason: str) -> None:
        """The watched process has ended; what it had sent is delivered first."""
        self._exit_reason = reason
        if not self._disconnected:
            self.deadline = time.monotonic() + EXIT_GRACE_S

    def pump(self) -> None:
        """Deliver what has arrived and notice what has gone."""
        self._drain()
        for event, value in self._events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._refusal = None
                self.deadline = None
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self._disconnected = True
                self.deadline = time.monotonic() + (EXIT_GRACE_S if self._expects_exit else 0.0)
            elif event & HANDSHAKE_FAILURES:
                self._refusal = why_refused(event, value, self._keys) or self._refusal
                if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self.deadline is not None:
                    self.deadline = time.monotonic()  # ZeroMQ does not try again by itself
        due = self.deadline is not None and time.monotonic() >= self.deadline
        if self._disconnected and (due or self._exit_reason is not None):
            self._give_up(self._exit_reason or f"the connection to {self.endpoint} was lost")
        elif due:
            waited = f"no scheduler answered at {self.endpoint} within {self._connect_timeout} s"
            if self._refusal is not None:
                waited = f"the scheduler at {self.endpoint} cannot be used: {self._refusal}"
            self._give_up(self._exit_reason or waited)

    def close(self) -> None:
        """Close without lingering; unsent messages are dropped."""
        self._close_sockets()
        self._context.term()

    def _open(self, *, connect: bool) -> None:
        self._connected = self._disconnected = False
        self._refusal = None
        self.deadline = None
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        # Unlimited here: a caller's request is refused by the engine, never dropped or blocked by the socket.
        self._dealer.sndhwm = 0
        # Unlimited too: libzmq drops what a full socket has not read yet when its peer closes, last results included.
        self._dealer.rcvhwm = 0
        # libzmq reserves identities that begin with a zero byte.
        self._dealer.setsockopt(zmq.ROUTING_ID, b"C" + os.urandom(15))
        self._monitor = self._dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES
        )
        configure(self._dealer, self.endpoint, self._keys)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if connect:
            self._dealer.connect(self.endpoint)
        self._watch(self._dealer)
        self._watch(self._monitor)

    def _close_sockets(self) -> None:
        self._unwatch(self._dealer)
        self._unwatch(self._monitor)
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)

    def _drain(self) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)

    def _events(self) -> list[tuple[int, int]]:
        """(event, value) of what the monitor has reported."""
        events: list[tuple[int, int]] = []
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return events
            report = parse_monitor_message(frames)
            events.append((report["event"], report["value"]))

    def _give_up(self, reason: str) -> None:
        self._drain()  # libzmq reports the disconnect after the last message, not before it
        final = self._exit_reason is not None
        self._close_sockets()
        self._open(connect=not final)
        self._lost(reason, final)


def check_endpoint(endpoint: str) -> None:
    """Refuse an address that ZeroMQ would take wrongly or not at all, by name."""
    scheme, _, path = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not path:
        raise InvalidRequest(
            f"endpoint = {endpoint!r} must begin with ipc:// or tcp://", field="endpoint", value=endpoint
        )
    if scheme == "ipc" and len(os.fsencode(path)) > MAX_IPC_PATH:
        raise InvalidRequest(
            f"endpoint = {endpoint!r}: an ipc:// path has at most {MAX_IPC_PATH} bytes",
            field="endpoint",
            value=endpoint,
        )
