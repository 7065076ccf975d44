"""Rank 0's socket, where workers join: its address, its keys, and who may connect until all are there.

Invariants:
- Workers of this host come over a socket in a private directory, which is removed when all are there.
- Workers of other hosts come over tcp; beyond loopback only with CURVE keys: the socket's own, and those that
  clients of the engine may have. The socket's own are made of a secret in the environment of all nodes, or
  are the engine's. With keys, connections are accepted in :meth:`WorkerSocket.answer_handshakes` alone.
- When all are there, the address takes no connections any more, where the system can drop their requests.
- A thread tells of a connection that breaks afterwards: at once when a process ends, by ZeroMQ's heartbeats
  when a host does.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...io_struct import CaesuraError, ErrorCode
from ...process import private_directory, shut_listener
from ...process.contract import is_loopback
from ...process.curve import (
    NODES_VARIABLE,
    Handshakes,
    KeyPair,
    read_key_pair,
    read_public_keys,
    shared_key_pair,
)
from ..runtime.engine_config import EngineConfig

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 2_000
DEAD_HOST_MS = 20_000
CONNECTION_LOST = "the connection to a worker has ended"
_LINGER_MS = 500


class WorkerSocket:
    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost(reason)`` in a thread when a connection breaks after :meth:`shut`."""
        self._on_lost = on_lost
        self._authorized = config.curve_authorized_clients
        self._keys: KeyPair | None = None
        self._key_file = config.curve_secret_key_file
        if config.tp_address is not None:
            self._keys = shared_key_pair()
            if self._keys is None and self._key_file is not None:
                self._keys = read_key_pair(self._key_file, "curve_secret_key_file")
        self.connections: dict[int, int] = {}
        """Descriptor of each worker's connection, by rank: anybody else's may come and go."""
        self._is_shut = False
        self._handshakes: Handshakes | None = None
        self._directory: str | None = None
        self._cleanup = contextlib.ExitStack()
        try:
            self._open(config)
        except BaseException:
            self._cleanup.close()
            raise

    def _open(self, config: EngineConfig) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._cleanup.callback(self._context.term)
        events = self._context.socket(zmq.PAIR)
        self._cleanup.callback(events.close)  # after the other end, which would wait for it
        self.socket = self._context.socket(zmq.ROUTER)
        self._cleanup.callback(self.socket.close, _LINGER_MS)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a crashed host seems to be there for a while
        self.socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by who waits for the answers
        if config.tp_address is None:
            self._directory = str(private_directory.make())
            self._cleanup.callback(private_directory.remove, self._directory)
            self.address = f"ipc://{self._directory}/{private_directory.SOCKET}"
        else:
            self.address = _checked(config.tp_address, has_keys=self._keys is not None)
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_HOST_MS)
        if self._keys is not None:
            self._handshakes = Handshakes(self.socket, self._context, self._keys, self._allowed, "worker")
            self._cleanup.callback(self._handshakes.socket.close)
        self._monitor(events)
        try:
            self.socket.bind(self.address)
        except zmq.ZMQError as error:
            reason = f"workers cannot join at {self.address}: {error}"
            raise CaesuraError(ErrorCode.ENDPOINT_IN_USE, reason) from error
        listening = parse_monitor_message(events.recv_multipart())["value"]
        self._listener = self._cleanup.enter_context(socket.socket(fileno=os.dup(listening)))
        given, self.address = self.address, self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if _is_reached_here_alone(self.address) and not _is_reached_here_alone(given):
            problem = f"is {self.address} on this host, where no other one reaches it: give a number"
            raise _invalid(given, problem)
        thread = threading.Thread(target=self._follow, args=(events,), name="caesura-ranks", daemon=True)
        thread.start()
        self._cleanup.callback(thread.join)
        self._cleanup.callback(self.socket.disable_monitor)

    def command(self) -> list[str]:
        return worker_command(self.address, None if self._keys is None else self._key_file)

    def answer_handshakes(self) -> None:
        """Accept the connections whose keys are authorized now (RFC 27, ZAP)."""
        if self._handshakes is not None:
            self._handshakes.answer()

    def shut(self) -> None:
        """Take no further connection, and tell of each of :attr:`connections` that breaks."""
        self._is_shut = True
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if self._directory is not None:
            private_directory.remove(self._directory)
            return
        with contextlib.suppress(OSError):  # a sandbox without filters
            shut_listener.shut(self._listener)

    def close(self) -> None:
        self._cleanup.close()

    def _allowed(self) -> frozenset[bytes]:
        assert self._keys is not None
        own = frozenset((self._keys.public,))  # of workers that rank 0 has started itself
        if self._authorized is None:
            return own
        return own | read_public_keys(self._authorized, "curve_authorized_clients")

    def _monitor(self, events: "zmq.Socket[bytes]") -> None:
        """Have the listener of the socket, which is bound next, and then its connections reported."""
        address = f"inproc://caesura-ranks-{id(self)}"
        wanted = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        self.socket.monitor(address, wanted)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RCVHWM, 0)
        events.connect(address)

    def _follow(self, events: "zmq.Socket[bytes]") -> None:
        connected: set[int] = set()
        with contextlib.closing(events):
            while True:
                event = parse_monitor_message(events.recv_multipart())
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event["event"] == zmq.EVENT_ACCEPTED:
                    connected.add(event["value"])
                else:
                    connected.discard(event["value"])
                lost = self._is_shut and not connected.issuperset(self.connections.values())
                # Behind the last event: a descriptor that one connection had may be the next one's.
                if lost and not events.poll(0):
                    self._on_lost(CONNECTION_LOST)


def worker_command(address: str, key_file: str | None) -> list[str]:
    """Return the command of a worker with the engine's own keys, but for its rank."""
    keys = []
    if key_file is not None and shared_key_pair() is None:
        keys = ["--curve-server-key", key_file, "--curve-client-key-file", key_file]
    return [sys.executable, "-P", "-m", __package__, "--join", address, *keys]


def _checked(address: str, *, has_keys: bool) -> str:
    parts = urlsplit(address)
    host = parts.hostname or ""
    problem = None
    if parts.scheme != "tcp" or not host or parts.port is None:
        problem = "is no address tcp://HOST:PORT"
    elif not is_loopback(host) and not has_keys:
        problem = (
            "is open to others: it needs curve_secret_key_file and curve_authorized_clients, or a secret in "
            f"{NODES_VARIABLE}"
        )
    if problem is None:
        return address
    raise _invalid(address, problem)


def _is_reached_here_alone(address: str) -> bool:
    return is_loopback(urlsplit(address).hostname or "localhost")


def _invalid(address: str, problem: str) -> CaesuraError:
    reason = f"tp_address = {address!r} {problem}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="tp_address", value=address)
