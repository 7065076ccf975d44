"""A client's CURVE keys: the engine's public key, pinned, and the client's own pair.

Invariant: a client with keys connects only to the engine with that public key, encrypted; it never falls back
to plain text.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from ...io_struct import CaesuraError
from ...process.curve import KeyPair, read_key_pair, server_key
from ..exceptions import InvalidRequest, error_for

KeyOrFile = str | os.PathLike[str]
SERVER_KEY_VARIABLE, CLIENT_KEY_VARIABLE = "CAESURA_CURVE_SERVER_KEY", "CAESURA_CURVE_CLIENT_KEY_FILE"
"""The command line's environment variables."""
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
        """Read a client's two options, of which both are given or none.

        Raises:
            InvalidRequest: a file cannot be used, or an option is missing.
        """
        if curve_server_key is None and curve_client_key_file is None:
            return None
        if curve_server_key is None or curve_client_key_file is None:
            missing = "curve_server_key" if curve_server_key is None else "curve_client_key_file"
            raise InvalidRequest(
                f"{missing} is missing: curve_server_key and curve_client_key_file belong together",
                field=missing,
            )
        try:
            return cls(
                server_key(os.fspath(curve_server_key), "curve_server_key"),
                read_key_pair(Path(curve_client_key_file), "curve_client_key_file"),
            )
        except CaesuraError as error:
            raise error_for(error.code, error.message, error.detail) from error


def configure(socket: "zmq.Socket[bytes]", endpoint: str, keys: ClientKeys | None) -> None:
    """Set the keys, and over tcp a heartbeat that notices a dead host, before ``socket`` connects."""
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
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
