"""Rank 0's socket, where workers join: its address, its keys, and who may connect until all are there.

Invariants:
- Workers of this host come over a socket in a private directory, which is removed when all are there.
- Workers of other hosts come over tcp; beyond loopback only with CURVE keys: the socket's own, and those that
  clients of the engine may have. With keys, connections are accepted in
  :meth:`WorkerSocket.answer_handshakes` alone, so never after :meth:`WorkerSocket.shut`.
- A thread tells of a connection that breaks afterwards: the operating system says so at once when a process
  ends, ZeroMQ's heartbeats when a host does.
"""

import contextlib
import ipaddress
import logging
import sys
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...io_struct import CaesuraError, ErrorCode
from ...process import private_directory
from ...process.curve import Handshakes, KeyPair, read_key_pair, read_public_keys
from ..runtime.config import EngineConfig

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 2_000
DEAD_HOST_MS = 20_000
        """Accept the connections whose keys are authorized now (RFC 27, ZAP)."""
        if self._handshakes is not None:
            self._handshakes.answer()

    def shut(self, workers: int) -> None:
        """Take no connection beside those of ``workers``, and tell of each that breaks."""
        self._expected = workers
        if self._directory is not None:
            private_directory.remove(self._directory)

    def close(self) -> None:
        """Close all connections."""
        self.socket.disable_monitor()
        self._thread.join()
        self._cleanup.close()

    def _allowed(self) -> frozenset[bytes]:
        assert self._keys is not None
        own = frozenset((self._keys.public,))  # of workers that rank 0 has started itself
        if self._authorized is None:
            return own
        return own | read_public_keys(self._authorized, "curve_authorized_clients")

    def _watch_connections(self) -> None:
        address = f"inproc://caesura-ranks-{id(self)}"
        wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self.socket.monitor(address, wanted)
        events = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RCVHWM, 0)
        events.connect(address)
        self._thread = threading.Thread(
            target=self._follow, args=(events,), name="caesura-ranks", daemon=True
        )
        self._thread.start()

    def _follow(self, events: "zmq.Socket[bytes]") -> None:
        """Follow the connections in a thread, until the monitor stops."""
        connected: set[int] = set()
        with contextlib.closing(events):
            while True:
                event = parse_monitor_message(events.recv_multipart())
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event["event"] == zmq.EVENT_ACCEPTED:
                    connected.add(event["value"])
                    continue
                connected.discard(event["value"])
                if len(connected) < self._expected:
                    self._on_lost("the connection to a worker has ended")


def _checked(address: str, *, has_keys: bool) -> str:
    """Return ``address``, if workers may join there.

    Raises:
        CaesuraError: ``invalid_request``.
    """
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    problem = None
    if parts.scheme != "tcp" or not host or parts.port is None:
        problem = "is no address tcp://HOST:PORT"
    elif not loopback and not has_keys:
        problem = "is open to others: it needs curve_secret_key_file and curve_authorized_clients"
    if problem is None:
        return address
    raise CaesuraError(
        ErrorCode.INVALID_REQUEST, f"tp_address = {address!r} {problem}", field="tp_address", value=address
    )
