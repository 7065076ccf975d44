"""A trace of steps by torch's profiler, written as a file for trace viewers.

Nothing is installed while no trace is recorded. The profiler is started and stopped in the loop's thread;
what it imports (seconds of it) is imported, and the file written, by other threads. A trace ends at its last
step.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from time import localtime, strftime

import torch
from torch.profiler import ProfilerActivity, profile

from ...io_struct import MAX_TRACE_STEPS, CaesuraError, ErrorCode, StartProfileReqInput
from ..runtime.background import Task
from .stage_profiler import StageProfiler

logger = logging.getLogger(__name__)

IMPORTED_BY_START = "torch._inductor"
STEPS = ("prefill", "decode", "encode", "denoise")


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
        self._writing: Task[None] | None = None
        self.path: Path | None = None
        self.steps = 0
        self._limit = 0
        self._started = 0

    @property
    def is_loaded(self) -> bool:
        if self._loading is None:
            self._loading = Task(partial(import_module, IMPORTED_BY_START), self._wake)
        return self._loading.done

    @property
    def is_written(self) -> bool:
        if self._recording is not None or self._writing is None or not self._writing.done:
            return False
        try:
            self._writing.result()
        except (OSError, RuntimeError) as error:
            raise CaesuraError(ErrorCode.INTERNAL, f"{self.path} could not be written: {error}") from error
        return True

    def start(self, request: StartProfileReqInput, step: int) -> int:
        """Record the steps after ``step``; return how many at most. Raises ``busy``, ``invalid_request``."""
        if self._recording is not None or (self._writing is not None and not self._writing.done):
            raise CaesuraError(ErrorCode.BUSY, f"the trace {self.path} is still being recorded or written")
        wanted = request.activities or ["CPU", "GPU"]
        activities = [ProfilerActivity.CPU] if "CPU" in wanted else []
        if self._on_gpu and "GPU" in wanted:
            activities.append(ProfilerActivity.CUDA)
        if not activities:
            reason = "this engine has no GPU to record"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="activities")
        folder = self._permitted(request.output_dir)
        recording = profile(
            activities=activities, with_stack=request.with_stack, record_shapes=request.record_shapes
        )
        recording.start()
        stamp = strftime("%Y%m%d-%H%M%S", localtime())
        self._started += 1  # an idle engine may be traced twice in a second
        name = f"caesura-{stamp}-pid{os.getpid()}-{self._started}-step{step + 1}.trace.json.gz"
        self.path = folder / name
        self.steps, self._limit = 0, request.num_steps or MAX_TRACE_STEPS
        self._recording, self._writing = recording, None
        self._stages.call_at_ends(self._count)
        logger.info("recording a trace of at most %d steps: %s", self._limit, self.path)
        return self._limit

    def stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._stages.call_at_ends(None)
        path = self.path
        assert path is not None
        recording.stop()

        def write() -> None:
            partial = path.with_name(f".{path.name.removesuffix('.gz')}.partial.gz")
            recording.export_chrome_trace(str(partial))
            partial.replace(path)
            logger.info("wrote the trace %s", path)

        self._writing = Task(write, self._wake)

    def close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            self._stages.call_at_ends(None)
            recording.stop()

    def _count(self, stage: str) -> None:
        if stage in STEPS:
            self.steps += 1
            if self.steps == self._limit:
                self.stop()

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
