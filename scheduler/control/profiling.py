"""The commands that start and end a trace of steps.

Invariant: a reply to stop names a file that is complete.
"""

from collections.abc import Callable

from ...io_struct import (
    CaesuraError,
    ErrorCode,
    StartProfileReqInput,
    StartProfileReqOutput,
    StopProfileReqInput,
    StopProfileReqOutput,
)
from ..observability.step_trace import StepTrace
from .lifecycle import Operation, Wait


class ProfilingCommands:
    """The handlers of start and stop."""

    def __init__(self, trace: StepTrace, step: Callable[[], int]) -> None:
        """``step`` returns the number of the last step."""
        self._trace = trace
        self._step = step

    def start(self, request: StartProfileReqInput) -> Operation:
        """Begin a trace with the next step."""
        while not self._trace.is_loaded:
            yield Wait.CHANGE
        limit = self._trace.start(request, self._step())
        return StartProfileReqOutput(id=request.id, path=str(self._trace.path), num_steps=limit)

    def stop(self, request: StopProfileReqInput) -> Operation:
        """End the trace, or wait until it ends; then wait for its file."""
        if self._trace.path is None:
            raise CaesuraError(ErrorCode.INVALID_REQUEST, "no trace was started")
        if not request.wait:
            self._trace.stop()
        path = self._trace.path
        while not self._trace.is_written:
            yield Wait.CHANGE
        return StopProfileReqOutput(id=request.id, path=str(path), steps=self._trace.steps)
