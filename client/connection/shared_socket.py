"""The ROUTER socket of any number of connections to schedulers, and its monitor.

Invariants:
- Each connection is one connect of the socket, under names of its own on both sides: what comes under the
  name of one that was given up is dropped.
- An endpoint has one connection at a time, as events of the monitor name no more than that.
- The sockets exist while a link uses them. The owner calls :meth:`SharedSocket.pump` whenever one of them may
  be readable and after every send, and then looks at each link's deadline.
"""

import itertools
import os
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import zmq

from ..exceptions import InvalidRequest
from .endpoints import HANDSHAKE_FAILURES, ClientKeys, configure, connect_to

if TYPE_CHECKING:
    from .link import Frames, Link

Context = zmq.Context["zmq.Socket[bytes]"]
Watch = Callable[["zmq.Socket[bytes]"], object]

MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | HANDSHAKE_FAILURES
)
NEVER_MS = 1 << 30
"""libzmq reconnects by itself in twelve days: its own "never" (-1) drops what was not read."""
MOST_AT_ONCE = 1000

_REPORT = struct.Struct("=Hi")
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain integers, which are faster: asked for with every message."""


def monitored(report: bytes) -> tuple[int, int]:
    """Return event and value of a monitor's message; pyzmq's own parser keeps every value that came."""
    event, value = _REPORT.unpack(report)
    return event, value


class SharedSocket:
    """``watch`` and ``unwatch`` keep the owner's poller right."""

    def __init__(self, watch: Watch, unwatch: Watch) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._users = 0
        self._links: dict[bytes, Link] = {}
        self._names: dict[str, bytes] = {}
        """Names of the connections by endpoint."""
        self._numbers = itertools.count()
        self._to_look: dict[Link, None] = {}
        """Links that have sent or heard something since their last look at the clock."""
        self._pumping = False
        self._router: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]

    def join(self) -> None:
        """Open the sockets for another link; :meth:`leave` must follow."""
        if self._users == 0:
            self._open()
        self._users += 1

    def leave(self, link: "Link") -> None:
        """Close the sockets after the last link, without lingering: unsent messages are dropped."""
        self.disconnect(link)
        self._to_look.pop(link, None)
        self._users -= 1
        if self._users == 0:
            self._close()

    def connect(self, link: "Link", keys: ClientKeys | None) -> bytes:
        """Return the name of a new connection for ``link``; InvalidRequest if its endpoint has one."""
        endpoint = link.endpoint
        if endpoint in self._names:
            raise InvalidRequest(
                f"endpoint = {endpoint!r} has a connection already", field="endpoint", value=endpoint
            )
        name = b"E%d" % next(self._numbers)
        # libzmq reserves identities that begin with a zero byte.
        self._router.setsockopt(zmq.ROUTING_ID, b"C" + os.urandom(15))
        self._router.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        configure(self._router, endpoint, keys)
        connect_to(self._router, endpoint)
        self._names[endpoint], self._links[name] = name, link
        return name

    def disconnect(self, link: "Link") -> None:
        """End the connection of ``link``, if it has one."""
        name = self._names.get(link.endpoint)
        if name is not None and self._links[name] is link:
            del self._names[link.endpoint], self._links[name]
            self._router.disconnect(link.endpoint)

    def send(self, name: bytes, frames: "Frames") -> None:
        """Send; has no effect on a connection that libzmq has ended, which its monitor reports."""
        with suppress(zmq.Again):
            self._router.send(name, zmq.NOBLOCK | zmq.SNDMORE)
            if len(frames) == 1:
                self._router.send(frames[0], zmq.NOBLOCK)
            else:
                self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def look_soon(self, link: "Link") -> None:
        """Have ``link`` look at the clock at the end of the next pump."""
        self._to_look[link] = None

    def notice_losses(self) -> None:
        """Report connections that have gone meanwhile, at little cost."""
        if not self._pumping and _is_readable(self._monitor):
            self.pump()

    def pump(self) -> bool:
        """Deliver what has come, then events of connections, and look at the clock.

        Return True if more messages lie there: many engines can send faster than their owner takes them, who
        has other things to do.
        """
        if self._users == 0:
            return False
        self._pumping = True
        try:
            more = self._drain()
            while self._users and _is_readable(self._monitor):
                report, endpoint = self._monitor.recv_multipart()[:2]
                name = self._names.get(endpoint.decode(errors="replace"))
                if name is not None:
                    link = self._links[name]
                    self._to_look[link] = None
                    link.take_event(*monitored(report))
            while self._to_look:
                link, _ = self._to_look.popitem()
                link.look_at_the_clock()
        finally:
            self._pumping = False
        return more

    def drain_ended(self, ended: "Link") -> None:
        """Deliver what is left of a connection that has ended; others may send without end.

        libzmq reads connections in turn: none of two turns is from one that has nothing left.
        """
        others = 0
        while others < 2 * len(self._links) and self._users and _is_readable(self._router):
            others = 0 if self._deliver() is ended else others + 1

    def _drain(self) -> bool:
        """Deliver what has come, some messages at most; return True if there may be others."""
        for _ in range(MOST_AT_ONCE):
            if not (self._users and _is_readable(self._router)):
                return False
            self._deliver()
        return self._users > 0 and _is_readable(self._router)

    def _deliver(self) -> "Link | None":
        """Deliver one message; return whose it is."""
        name, *frames = self._router.recv_multipart()
        link = self._links.get(name)
        if link is not None:
            self._to_look[link] = None
            link.take(frames)
        return link

    def _open(self) -> None:
        context = acquire_context()
        with ExitStack() as failed:
            failed.callback(release_context)
            self._router = context.socket(zmq.ROUTER)
            failed.callback(self._router.close, linger=0)
            self._router.linger = 0
            # Unlimited: the engine refuses requests, the socket never drops or blocks them; and libzmq drops
            # what a full socket has not read yet when its peer closes, last results included.
            self._router.sndhwm = self._router.rcvhwm = 0
            self._router.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            self._monitor = self._router.get_monitor_socket(MONITORED)
            failed.callback(self._monitor.close, linger=0)
            self._watch(self._router)
            self._watch(self._monitor)
            failed.pop_all()

    def _close(self) -> None:
        try:
            self._unwatch(self._router)
            self._unwatch(self._monitor)
            self._router.disable_monitor()
            self._monitor.close(linger=0)
            self._router.close(linger=0)
        finally:
            release_context()


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Return True if a message lies there; cheaper than a receive that fails."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


MAX_IO_THREADS = 4
"""Maximum number of I/O threads of all connections; at most half of the cores."""

_lock = threading.Lock()
_context: Context | None = None
_users = 0
_inherited: list[Context | None] = []
"""Contexts of the parent, which must not be ended here."""


def acquire_context() -> Context:
    """Return the shared context, made if there is none; :func:`release_context` must follow."""
    global _context, _users
    with _lock:
        if _context is None:
            _context = zmq.Context(max(1, min(MAX_IO_THREADS, (os.cpu_count() or 1) // 2)))
            _context.set(zmq.MAX_SOCKETS, _context.get(zmq.SOCKET_LIMIT))
        _users += 1
        return _context


def release_context() -> None:
    """Give up one use of the context, after its sockets were closed."""
    global _context, _users
    with _lock:
        _users -= 1
        if _users == 0 and _context is not None:
            _context.destroy(linger=0)  # term() would wait for ever for a socket that was left open
            _context = None


def _in_child() -> None:
    global _context, _users
    _inherited.append(_context)
    _context, _users = None, 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
