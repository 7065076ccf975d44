"""The address that the engine listens on, and the thread that decides which clients may connect, and how
many.

- One scheduler per endpoint: it first takes an ``flock`` on a lock file beside the ipc path, because a second
  bind on the same path would succeed and take over the traffic. A path never replaces a file that is not a
  socket.
- tcp binds loopback addresses only, unless clients must authenticate with keys, which are read for each
  handshake.
- A shut endpoint accepts no new connections and keeps those that it has. ZeroMQ has no such state: an ipc
  socket is renamed, and a tcp listener drops connection requests.
- It is shut before the process runs out of descriptors: without, ZeroMQ would abort the process, or keep a
  core busy. Its I/O thread cannot get ahead: it waits once about 1,000 accepted connections have not been
  looked at.
- The thread reads every event that ZeroMQ reports until it is told to stop; no exception ends it.
"""

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...io_struct import CaesuraError, ErrorCode
from ...process import shut_listener
from ...process.contract import MAX_IPC_PATH, SHUT_SUFFIX
from ...process.curve import Handshakes, KeyPair, read_key_pair, read_public_keys

logger = logging.getLogger(__name__)

MAX_PORT = 65535
LISTEN_BACKLOG = 128
"""Connections that the kernel completes before ZeroMQ accepts them, even if the endpoint is shut."""
HANDSHAKE_MS = 10_000
HEARTBEAT_MS = 10_000
DEAD_PEER_MS = 60_000
"""Milliseconds after which a silent peer counts as gone, over tcp, and the engine for it."""
MAX_RESERVE = 1536
"""Descriptors left free at most; more than ZeroMQ can accept unseen: 1,002, and the backlog."""
RECHECK_MS = 1000


class Endpoint:
    def __init__(self, address: str, *, has_keys: bool) -> None:
        """Check ``address`` and, for ipc, take its lock; raise ``endpoint_in_use`` or ``invalid_request``."""
        self.address = address
        self._lock: int | None = None
        self._listener: socket.socket | None = None
        self._path: str | None = None
        self._is_shut = False
        if address.startswith("tcp://"):
            host, port = _checked_tcp(address, has_keys=has_keys)
            self._listener = _listener(address, host, port)
            self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"
        else:
            self._lock = _locked_path(address)

    def bind(self, router: "zmq.Socket[bytes]") -> None:
        router.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)
        router.setsockopt(zmq.IPV6, int("[" in self.address))
        if self._listener is not None:
            router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        try:
            router.bind(self.address)
        except zmq.ZMQError as error:
            raise _not_bound(self.address, error.errno, str(error)) from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.address.startswith("ipc://"):
            self._path = self.address.removeprefix("ipc://")
            os.chmod(self._path, 0o600)

    def shut(self) -> None:
        if self._is_shut:
            return
        if self._path is not None:
            os.rename(self._path, self._path + SHUT_SUFFIX)
        elif self._listener is not None:
            shut_listener.shut(self._listener)
        self._is_shut = True

    def open(self) -> None:
        if not self._is_shut:
            return
        if self._path is not None:
            os.rename(self._path + SHUT_SUFFIX, self._path)
        elif self._listener is not None:
            shut_listener.open_again(self._listener)
        self._is_shut = False

    def close(self) -> None:
        if self._path is not None:  # ZeroMQ does not unlink it; it is ours while we hold the lock
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path + (SHUT_SUFFIX if self._is_shut else ""))
            self._path = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked_path(endpoint: str) -> int:
    path = endpoint.removeprefix("ipc://")
    if not endpoint.startswith("ipc://") or not os.path.isabs(path):
        raise _bad_endpoint(endpoint, "must be ipc:///absolute/path or tcp://address:port")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise _bad_endpoint(endpoint, f"ipc paths are limited to {MAX_IPC_PATH} bytes")
    try:
        # The lock file is neither truncated nor removed: it may be a foreign file, and the lock belongs to
        # its inode.
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        folder = os.path.dirname(path)
        missing = "" if os.path.isdir(folder) else f"; {folder} is not a folder"
        raise _bad_endpoint(endpoint, f"cannot create its lock file: {error.strerror}{missing}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_other_files(endpoint, path)
    except BlockingIOError as error:
        os.close(lock)
        reason = f"another scheduler owns {endpoint}: end it, or listen elsewhere"
        raise CaesuraError(ErrorCode.ENDPOINT_IN_USE, reason, endpoint=endpoint) from error
    except CaesuraError:
        os.close(lock)
        raise
    _remove_shut_socket(path)
    return lock


def _refuse_other_files(endpoint: str, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise _bad_endpoint(endpoint, "a file that is not a socket lies there")


def _remove_shut_socket(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path + SHUT_SUFFIX).st_mode):
            os.unlink(path + SHUT_SUFFIX)


def _checked_tcp(endpoint: str, *, has_keys: bool) -> tuple[str, int]:
    """Return host and port; refuse a host beyond loopback unless clients must have keys."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):  # ZeroMQ takes 99999 modulo 65536
        raise _bad_endpoint(endpoint, f"needs a port from 0 (any free one) to {MAX_PORT}")
    if host == "localhost":
        return "127.0.0.1", int(port)
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise _bad_endpoint(endpoint, "needs an IP address, or localhost") from error
    if not (address.is_loopback or has_keys):
        raise _bad_endpoint(
            endpoint,
            "other hosts can reach this address, so clients must show keys: `caesura keygen DIR` writes "
            "some, curve_secret_key_file and curve_authorized_clients name them; or bind a loopback address",
        )
    return f"[{address}]" if address.version == 6 else str(address), int(port)


def _listener(endpoint: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise _not_bound(endpoint, error.errno, str(error.strerror)) from error
    listener.setblocking(False)
    return listener


def _not_bound(endpoint: str, number: int | None, reason: str) -> CaesuraError:
    if number == errno.EADDRINUSE:
        return CaesuraError(ErrorCode.ENDPOINT_IN_USE, f"cannot bind {endpoint}: {reason}", endpoint=endpoint)
    return _bad_endpoint(endpoint, f"cannot be bound: {reason}")


def _bad_endpoint(endpoint: str, reason: str) -> CaesuraError:
    reason = f"endpoint {endpoint!r}: {reason}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="endpoint", value=endpoint)


@dataclass(frozen=True, slots=True)
class ServerKeys:
    own: KeyPair
    authorized: Path

    @classmethod
    def read(cls, secret_key_file: str | None, authorized_clients: str | None) -> "ServerKeys | None":
        """Read the keys; None if neither option is set. One alone is ``invalid_request``."""
        if secret_key_file is None and authorized_clients is None:
            return None
        if secret_key_file is None or authorized_clients is None:
            missing = "curve_secret_key_file" if secret_key_file is None else "curve_authorized_clients"
            reason = (
                f"{missing} is missing: curve_secret_key_file and curve_authorized_clients belong together"
            )
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=missing, value=None)
        keys = cls(read_key_pair(secret_key_file, "curve_secret_key_file"), Path(authorized_clients))
        keys.clients()
        return keys

    def clients(self) -> frozenset[bytes]:
        return read_public_keys(self.authorized, "curve_authorized_clients")


class Access:
    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: Endpoint,
        keys: ServerKeys | None,
    ) -> None:
        self._router = router
        self._endpoint = endpoint
        self._descriptor_guard = _DescriptorGuard(endpoint)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if endpoint.address.startswith("tcp://"):
            router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            router.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_PEER_MS)
            router.setsockopt(zmq.HEARTBEAT_TTL, DEAD_PEER_MS)
        self._handshakes = (
            None if keys is None else Handshakes(router, context, keys.own, keys.clients, "client")
        )
        address = f"inproc://caesura-access-{id(self)}"
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # With 1,000 of ZeroMQ's own: its I/O thread waits when so many have not been read.
        self._events.setsockopt(zmq.RCVHWM, 1)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="caesura-access", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Disable_monitor would wait with the GIL for an I/O thread that waits for this thread
        self._router.close()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = [self._events] + ([] if self._handshakes is None else [self._handshakes.socket])
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        while True:
            try:
                poller.poll(RECHECK_MS if self._descriptor_guard.is_shut else None)
                if not self._process_events():
                    break
                if self._handshakes is not None:
                    self._handshakes.answer()
            except Exception:  # the thread must go on; the handshake timeout refuses this client
                logger.exception("a connection could not be checked")
                time.sleep(0.1)
        for each in sockets:
            each.close()

    def _process_events(self) -> bool:
        self._descriptor_guard.note_accepted(0)
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event == zmq.EVENT_ACCEPTED:
                self._descriptor_guard.note_accepted(1)
        return True


class _DescriptorGuard:
    def __init__(self, endpoint: Endpoint) -> None:
        self.is_shut = False
        self._endpoint = endpoint
        self._free_descriptors = 0
        self._accepted_since = 0
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit < 2 * MAX_RESERVE:
            logger.warning(
                "%d descriptors are few: many connections at once can end the engine; allow %d (ulimit -Hn)",
                limit,
                2 * MAX_RESERVE,
            )

    def note_accepted(self, accepted: int) -> None:
        self._accepted_since += accepted
        if not self.is_shut and 4 * self._accepted_since < self._free_descriptors:
            return
        if self.is_shut and accepted:  # they were on their way; it is looked again when something has ended
            return
        used, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(limit // 2, MAX_RESERVE)
        self._accepted_since, self._free_descriptors = 0, limit - reserve - used
        if not self.is_shut and self._free_descriptors <= 0:
            self._endpoint.shut()
            self.is_shut = True
            logger.warning(
                "%d of %d descriptors are in use: no further connections until some are free (ulimit -n)",
                used,
                limit,
            )
        elif self.is_shut and self._free_descriptors > reserve // 4:
            self._endpoint.open()
            self.is_shut = False
            logger.warning("%d of %d descriptors are in use: connections are taken again", used, limit)
