"""The address that the engine listens on: which are allowed, locking it, and shutting it for a while.

Invariants:
- One scheduler per endpoint: it first takes an ``flock`` on a lock file beside the ipc path, because a second
  bind on the same path would succeed and take over the traffic. A path never replaces a file that is not a
  socket.
- tcp binds loopback addresses only, unless clients must authenticate with keys.
- A shut endpoint accepts no new connections and keeps those that it has. ZeroMQ has no such state: an ipc
  socket is renamed, and a tcp listener drops connection requests.
"""

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct

import zmq

from ...io_struct import CaesuraError, ErrorCode
from ...process.contract import MAX_IPC_PATH, SHUT_SUFFIX

MAX_PORT = 65535
LISTEN_BACKLOG = 128
"""Connections that the kernel completes before ZeroMQ accepts them, even if the endpoint is shut."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_BPF_RET = 0x06


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
            drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
            program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self._is_shut = True

    def open(self) -> None:
        if not self._is_shut:
            return
        if self._path is not None:
            os.rename(self._path + SHUT_SUFFIX, self._path)
        elif self._listener is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._is_shut = False

    def close(self) -> None:
        """Release the address, after its socket was closed. Idempotent."""
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
    """Check an ipc address and take its lock; return the descriptor that holds it."""
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
        raise CaesuraError(
            ErrorCode.ENDPOINT_IN_USE,
            f"another scheduler owns {endpoint}: end it, or listen elsewhere",
            endpoint=endpoint,
        ) from error
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
    """Remove the renamed socket of a scheduler that was killed while its endpoint was shut."""
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
            "some, "
            "curve_secret_key_file and curve_authorized_clients name them; or bind a loopback address",
        )
    return f"[{address}]" if address.version == 6 else str(address), int(port)


def _listener(endpoint: str, host: str, port: int) -> socket.socket:
    """Return a listening socket, of which ZeroMQ gets a duplicate; the engine's own sets the filter."""
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
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"endpoint {endpoint!r}: {reason}", field="endpoint", value=endpoint
    )
