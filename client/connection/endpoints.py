"""Addresses of engines, and why nobody answers at one."""

import os
import stat
from typing import Any

import zmq

from ...io_struct.field_errors import shown
from ...process.contract import MAX_IPC_PATH, SHUT_SUFFIX
from ..exceptions import InvalidRequest

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
    """Return a guess of what was meant by an address without a scheme."""
    if not isinstance(endpoint, str) or "://" in endpoint or not endpoint:
        return ""
    return (
        f" (did you mean {'ipc' if '/' in endpoint else 'tcp'}://{endpoint}?)"
        if set(endpoint) & set("/:")
        else ""
    )


def _refused(endpoint: Any, reason: str) -> InvalidRequest:
    text = shown(endpoint) if not isinstance(endpoint, str) else repr(endpoint)
    return InvalidRequest(f"endpoint = {text} {reason}", field="endpoint", value=str(endpoint))
