"""The answer to a client's hello: the wire version, or a refusal that names both versions."""

import logging
import os

from ... import __version__
from ...io_struct import WIRE_VERSION, CaesuraError, ErrorCode, ErrorReply, HelloReqInput, HelloReqOutput

logger = logging.getLogger(__name__)


def answer_hello(message: HelloReqInput, incarnation: str) -> HelloReqOutput | ErrorReply:
    """Accept every client with the same major version, whatever its minor version; refuse the others."""
    major, minor = WIRE_VERSION
    logger.debug("hello from %s: wire %d.%d", message.client or "?", message.wire_major, message.wire_minor)
    if message.wire_major != major:
        ours, theirs = f"{major}.{minor}", f"{message.wire_major}.{message.wire_minor}"
        error = CaesuraError(
            ErrorCode.VERSION_MISMATCH,
            f"this engine (caesura {__version__}) speaks wire {ours}, the client ({message.client or 'unknown'}) {theirs}",
            engine=ours,
            client=theirs,
        )
        return error.to_reply(message.id)
    return HelloReqOutput(
        id=message.id,
        wire_major=major,
        wire_minor=minor,
        incarnation=incarnation,
        version=__version__,
        pid=os.getpid(),
    )
