"""Traces of steps by torch's profiler, for reading in a trace viewer."""

from typing import Annotated, Literal

import msgspec

from .base import Reply
from .control import ControlRequest

MAX_TRACE_STEPS = 1000
"""Steps after which a trace ends whatever was asked for: events stay in memory until it is written."""
TraceActivity = Literal["CPU", "GPU"]
TraceSteps = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACE_STEPS)]


class StartProfileReqInput(ControlRequest, kw_only=True):
    """Record a trace of the next steps, which are slower; ``busy`` while another is recorded or written."""

    output_dir: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    """Folder under the engine's ``profile_dir``, created if missing. None means that folder itself."""
    num_steps: TraceSteps | None = None
    """Steps after which the trace ends by itself. None means at ``StopProfileReqInput``, or after 1,000."""
    activities: list[TraceActivity] | None = None
    """What is recorded; ``GPU`` counts where the engine has one. None means both."""
    with_stack: bool = False
    """Also record the Python stack of each operation, which is slow."""
    record_shapes: bool = False
    """Also record the shapes of the operations' inputs."""


class StartProfileReqOutput(Reply, kw_only=True):
    """The trace has begun."""

    path: str
    """The file on the engine's machine, which appears when it is complete."""
    num_steps: int
    """Number of steps after which the trace ends by itself."""


class StopProfileReqInput(ControlRequest, kw_only=True):
    """End the trace; the reply comes when its file is written. ``invalid_request`` if none was started."""

    wait: bool = False
    """True: the trace is not ended, but waited for until it ends by itself."""


class StopProfileReqOutput(Reply, kw_only=True):
    """The trace is written; also the answer where the trace had ended by itself before."""

    path: str
    """The file, on the engine's machine: Chrome's trace format, compressed with gzip."""
    steps: int
    """Number of steps that were recorded."""
