"""A trace of steps by torch's profiler, written as a file for trace viewers, and its commands.

Nothing is installed while no trace is recorded. The profiler is started and stopped in the loop's thread;
what it imports (seconds of it) is imported, and files are written, by other threads. A trace ends at its last
step. One by stages has a file for each, which begins with the next such step once the file before is written,
and ends early where a step of another stage begins. A reply to stop names a file that is complete.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from ... import io_struct as wire
from ...io_struct import MAX_TRACE_STEPS, CaesuraError, ErrorCode
from ..observability.stage_profiler import StageProfiler
from ..runtime.background import Task
from .engine_state import Sender
from .operations import Operation, Wait

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

IMPORTED_BY_START = "torch._inductor"
STEPS = ("prefill", "decode", "encode", "denoise")
_SUFFIXES = {None: "", "prefill": "-EXTEND", "decode": "-DECODE"}
"""Ends of files' names, as SGLang's."""


class StepTrace:
    def __init__(
        self, stages: StageProfiler, folder: str | None, device: str, wake: Callable[[], None]
    ) -> None:
        """``folder`` None: a new private folder, made when it is first needed. ``wake`` wakes the loop."""
        self._stages = stages
        self._folder = folder
        self._on_gpu = torch.device(device).type != "cpu"
        self._wake = wake
        self._loading: Task[object] | None = None
        self._recording: profile | None = None
        self._record: Callable[[], profile] = profile
        self._coming: dict[str | None, Path] = {}
        """File of each stage that has not begun; of None, where stages are not told apart."""
        self._stage: str | None = None
        self._writing: list[Task[None]] = []
        self.paths: list[Path] = []
        """Files of the last trace: those to come while it is recorded, those that there are after it."""
        self._begun: list[Path] = []
        self.steps = 0
        self._steps_of_file = self._limit = self._before = self._started = 0

    @property
    def is_loaded(self) -> bool:
        if self._loading is None:
            self._loading = Task(partial(import_module, IMPORTED_BY_START), self._wake)
        return self._loading.done

    @property
    def _is_busy(self) -> bool:
        return bool(self._recording or self._coming) or not all(task.done for task in self._writing)

    @property
    def is_written(self) -> bool:
        if self._is_busy:
            return False
        if not self._begun:
            raise CaesuraError(ErrorCode.INVALID_REQUEST, "the trace was stopped before its first step")
        try:
            for task in self._writing:
                task.result()
        except (OSError, RuntimeError) as error:
            reason = f"{self.path} could not be written: {error}"
            raise CaesuraError(ErrorCode.INTERNAL, reason) from error
        return True

    @property
    def path(self) -> str:
        return ", ".join(map(str, self.paths))

    def start(self, request: wire.StartProfileReqInput, step: int) -> int:
        """Record the steps after ``step``; return how many at most. Raises ``busy``, ``invalid_request``."""
        if self._is_busy:
            raise CaesuraError(ErrorCode.BUSY, f"the trace {self.path} is still being recorded or written")
        wanted = request.activities or ["CPU", "GPU"]
        activities = [ProfilerActivity.CPU] if "CPU" in wanted else []
        if self._on_gpu and "GPU" in wanted:
            activities.append(ProfilerActivity.CUDA)
        if not activities:
            reason = "this engine has no GPU to record"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="activities")
        folder = self._permitted(request.output_dir)
        self._record = partial(
            profile,
            activities=activities,
            with_stack=request.with_stack,
            record_shapes=request.record_shapes,
        )
        stages: list[str | None] = [None] if request.stages is None else [*request.stages]
        self._before = max(0, (request.start_step or 0) - step - 1)
        stem = self._stem(request, step + 1 + self._before)
        self._coming = {stage: folder / f"{stem}{_SUFFIXES[stage]}.trace.json.gz" for stage in stages}
        self.paths, self._begun, self._writing = list(self._coming.values()), [], []
        self.steps, self._limit = 0, request.num_steps or MAX_TRACE_STEPS
        self._stages.call_at_ends(self._count, self._begin)
        if None in self._coming and not self._before:
            self._begin_file(None)
        logger.info("recording a trace of at most %d steps: %s", self._limit, self.path)
        return self._limit

    def stop(self) -> None:
        self._coming.clear()
        self._end_file()

    def _stem(self, request: wire.StartProfileReqInput, first: int) -> str:
        self._started += 1  # an idle engine may be traced twice in a second
        stamp = strftime("%Y%m%d-%H%M%S", localtime())
        stem = f"caesura-{stamp}-pid{os.getpid()}-{self._started}-step{first}"
        if request.profile_id is not None:
            stem = f"{request.profile_id}-TP-0"
        return stem if request.prefix is None else f"{request.prefix}-{stem}"

    def _begin_file(self, stage: str | None) -> None:
        recording = self._record()
        recording.start()
        self._begun.append(self._coming.pop(stage))
        self._recording, self._stage, self._steps_of_file = recording, stage, 0

    def _end_file(self) -> None:
        """Stop recording, and write what was recorded; the trace has ended if no file is to come."""
        recording, self._recording = self._recording, None
        if not self._coming:
            self._stages.call_at_ends(None)
            self.paths = self._begun
        if recording is None:
            return
        path = self._begun[-1]
        recording.stop()

        def write() -> None:
            partial = path.with_name(f".{path.name.removesuffix('.gz')}.partial.gz")
            recording.export_chrome_trace(str(partial))
            partial.replace(path)
            logger.info("wrote the trace %s", path)

        self._writing.append(Task(write, self._wake))

    def close(self) -> None:
        self._coming.clear()
        recording, self._recording = self._recording, None
        if recording is not None:
            self._stages.call_at_ends(None)
            recording.stop()

    def _begin(self, stage: str) -> None:
        """Take the begin of a step: of another stage it ends a file, of a wanted one it begins a file."""
        if stage not in STEPS or self._before:
            return
        if self._recording is not None and self._stage not in (None, stage):
            self._end_file()
        wanted = None if None in self._coming else stage
        if self._recording is None and wanted in self._coming and all(each.done for each in self._writing):
            self._begin_file(wanted)

    def _count(self, stage: str) -> None:
        if stage not in STEPS:
            return
        if self._before:
            self._before -= 1
        elif self._recording is not None:
            self.steps += 1
            self._steps_of_file += 1
            if self._steps_of_file == self._limit:
                self._end_file()

    def _permitted(self, wanted: str | None) -> Path:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="profiles-")
        root = os.path.realpath(self._folder)
        try:
            folder = os.path.realpath(os.path.join(root, wanted or ""))
            if os.path.commonpath([folder, root]) != root:
                reason = f"is outside {root}, the folder that this engine writes traces under (--profile-dir)"
                raise CaesuraError(ErrorCode.INVALID_REQUEST, f"output_dir {reason}", field="output_dir")
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError, RecursionError) as error:
            reason = f"output_dir cannot be made: {error}"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="output_dir") from error
        return Path(folder)


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
