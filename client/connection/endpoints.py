"""Addresses of engines, the CURVE keys with which a client connects, and why nobody answers.

Invariant: a client with keys connects encrypted, to the engine with that public key only.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq

from ...io_struct import CaesuraError
from ...io_struct.field_errors import shown
from ...process.contract import MAX_IPC_PATH, SHUT_SUFFIX
from ...process.curve import KeyPair, read_key_pair, server_key
from ..exceptions import InvalidRequest, error_for

KeyOrFile = str | os.PathLike[str]
SERVER_KEY_VARIABLE, CLIENT_KEY_VARIABLE = "CAESURA_CURVE_SERVER_KEY", "CAESURA_CURVE_CLIENT_KEY_FILE"
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HEARTBEAT_MS = 10_000
_DEAD_PEER_MS = 60_000


@dataclass(frozen=True, slots=True)
class ClientKeys:
    server: bytes
    own: KeyPair

    @classmethod
    def read(cls, curve_server_key: KeyOrFile | None, curve_client_key_file: KeyOrFile | None) -> Self | None:
        """Read a client's two options, of which both or none are given; InvalidRequest if unusable."""
        if curve_server_key is None and curve_client_key_file is None:
            return None
        if curve_server_key is None or curve_client_key_file is None:
            missing = "curve_server_key" if curve_server_key is None else "curve_client_key_file"
            reason = f"{missing} is missing: curve_server_key and curve_client_key_file belong together"
            raise InvalidRequest(reason, field=missing)
        try:
            return cls(
                server_key(os.fspath(curve_server_key), "curve_server_key"),
                read_key_pair(Path(curve_client_key_file), "curve_client_key_file"),
            )
        except CaesuraError as error:
            raise error_for(error.code, error.message, error.detail) from error


def configure(socket: "zmq.Socket[bytes]", endpoint: str, keys: ClientKeys | None) -> None:
    """Set keys for the next connect of ``socket``, and over tcp a heartbeat that notices a dead host."""
    if keys is None:
        socket.setsockopt(zmq.CURVE_SERVER, 0)  # forgets the keys of a connect before
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS if endpoint.startswith("tcp://") else 0)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_PEER_MS)


def why_refused(event: int, value: int, keys: ClientKeys | None) -> str | None:
    """Return why a handshake failed, or None; ``event`` and ``value`` are the monitor's."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            "it refused this client's key: "
            "the public part of curve_client_key_file is not among its authorized clients"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if keys is None:
            return "it asks for keys: give curve_server_key and curve_client_key_file"
        return "it has no keys, and this client was told to use some"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "what listens there is no scheduler (an HTTP server?)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and keys is not None:
        return (
            "it broke the handshake off: "
            "curve_server_key is perhaps not the key of this engine, or it has no keys"
        )
    return None


FORMS = "ipc://PATH or tcp://HOST:PORT"


def check_endpoint(endpoint: Any) -> None:
    """Refuse an address that ZeroMQ would misunderstand or not take."""
    scheme, _, place = endpoint.partition("://") if isinstance(endpoint, str) else ("", "", "")
    if scheme not in ("ipc", "tcp") or not place:
        raise _refused(endpoint, f"must be {FORMS}{_hint(endpoint)}")
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH:
        raise _refused(endpoint, f"is too long: an ipc:// path has at most {MAX_IPC_PATH} bytes")
    if scheme == "tcp":
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise _refused(endpoint, "must be tcp://HOST:PORT with a port from 1 to 65535")


def connect_to(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise _refused(endpoint, f"cannot be connected to: {error}") from error


def nobody_at(endpoint: str) -> str:
    """Say that no scheduler answers at ``endpoint``, why, and what would help."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc" and os.path.exists(path + SHUT_SUFFIX):
        return f"the scheduler at {endpoint} takes no more clients for now: it has as many as it can"
    why = "nobody listens there" if scheme == "tcp" else _why_no_socket(path)
    return f"no scheduler answers at {endpoint}: {why}; `caesura scheduler --endpoint {endpoint}` starts one"


def _why_no_socket(path: str) -> str:
    if path.startswith("@"):  # a name in the kernel, not in a file system
        return "nobody listens there"
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return "there is no such socket file"
    except (OSError, ValueError) as error:
        return f"its socket file cannot be used ({getattr(error, 'strerror', error)})"
    return "nobody listens at its socket file" if is_socket else "the file is not a socket"


def _hint(endpoint: Any) -> str:
    if not isinstance(endpoint, str) or "://" in endpoint or not set(endpoint) & set("/:"):
        return ""
    return f" (did you mean {'ipc' if '/' in endpoint else 'tcp'}://{endpoint}?)"


def _refused(endpoint: Any, reason: str) -> InvalidRequest:
    text = shown(endpoint) if not isinstance(endpoint, str) else repr(endpoint)
    return InvalidRequest(f"endpoint = {text} {reason}", field="endpoint", value=str(endpoint))
