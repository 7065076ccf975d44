"""The commands that start and end a trace of steps. A reply to stop names a file that is complete."""

from typing import TYPE_CHECKING

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from .engine_state import Sender
from .operations import Operation, Wait

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def start_profile(engine: "Engine", request: wire.StartProfileReqInput, sender: Sender) -> Operation:
    trace = engine.trace
    while not trace.is_loaded:
        yield Wait.CHANGE
    limit = trace.start(request, engine.state.step)
    return wire.StartProfileReqOutput(id=request.id, path=trace.path, num_steps=limit)


def stop_profile(engine: "Engine", request: wire.StopProfileReqInput, sender: Sender) -> Operation:
    """End the trace, or wait until it ends; then wait for its file."""
    trace = engine.trace
    if not trace.path:
        raise CaesuraError(ErrorCode.INVALID_REQUEST, "no trace was started")
    if not request.wait:
        trace.stop()
    while not trace.is_written:
        yield Wait.CHANGE
    return wire.StopProfileReqOutput(id=request.id, path=trace.path, steps=trace.steps)
