"""The client's side of the hello: version and incarnation of the engine.

Invariant: whatever comes back first on a connection is the answer to its hello, since nothing else has been sent on it.
"""

from typing import NoReturn

import msgspec

from ... import __version__
from ...io_struct import (
    WIRE_VERSION,
    ErrorCode,
    ErrorReply,
    HelloReqInput,
    HelloReqOutput,
    decode_reply,
    encode,
    salvage_reply,
)
from ..exceptions import VersionMismatch, raise_for

BEFORE_HELLO = "0 (it knows no hello)"
"""What an engine speaks that refuses the hello as malformed."""


def hello_frame() -> bytes:
    """What to send first."""
    major, minor = WIRE_VERSION
    return encode(
        HelloReqInput(wire_major=major, wire_minor=minor, client=f"caesura {__version__} for Python")
    )


def incarnation_in(frame: bytes, endpoint: str) -> str:
    """Which start of the engine has answered.

    Raises:
        VersionMismatch: it speaks another major version, or one from before the hello.
        EngineError: another refusal, as the engine worded it.
    """
    try:
        answer = decode_reply(frame)
    except msgspec.DecodeError as error:
        unread = salvage_reply(frame)
        what = f"unknown (its {unread.type or 'first message'} cannot be read: {error})"
        raise _mismatch(endpoint, what) from error
    if isinstance(answer, ErrorReply):
        _refused(answer, endpoint)
    if not isinstance(answer, HelloReqOutput):
        raise _mismatch(endpoint, f"unknown (it answers a hello with {type(answer).__name__})")
    if answer.wire_major != WIRE_VERSION[0]:
        raise _mismatch(endpoint, f"{answer.wire_major}.{answer.wire_minor}")
    return answer.incarnation


def _refused(answer: ErrorReply, endpoint: str) -> NoReturn:
    if answer.code == ErrorCode.VERSION_MISMATCH:
        raise _mismatch(endpoint, str(answer.detail.get("engine") or f"unknown ({answer.message})"))
    if answer.code == ErrorCode.MALFORMED_MESSAGE:
        raise _mismatch(endpoint, BEFORE_HELLO)
    raise_for(answer)


def _mismatch(endpoint: str, engine: str) -> VersionMismatch:
    ours = ".".join(map(str, WIRE_VERSION))
    return VersionMismatch(
        f"this client (caesura {__version__}) speaks wire {ours}, the engine at {endpoint} speaks wire {engine}",
        client=ours,
        engine=engine,
    )
