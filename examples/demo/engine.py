"""The interface that the run samples through, and its two implementations: one engine over its socket, or
several behind HTTP.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from caesura.client import GenerateOutput, SamplingParams, launch_scheduler
from caesura.io_struct import (
    AbortReqOutput,
    ContinueGenerationReqOutput,
    GetStatusReqOutput,
    PauseGenerationReqOutput,
    PauseMode,
)

from . import task
from .settings import LoraSettings, Settings


class Handle(Protocol):
    """A generation in flight."""

    def done(self) -> bool: ...
    def results(self, timeout: float | None = None) -> list[GenerateOutput]: ...


class Engine(Protocol):
    """The methods of a :class:`SchedulerClient` that the run uses."""

    @property
    def endpoint(self) -> str: ...
    def submit(
        self,
        input_ids: Sequence[int],
        sampling_params: SamplingParams,
        /,
        *,
        return_logprob: bool,
        adapter: str | None = None,
    ) -> Handle: ...
    def status(self, *, timeout: float | None = None) -> GetStatusReqOutput: ...
    def pause(self, mode: PauseMode, /, *, timeout: float | None = None) -> PauseGenerationReqOutput: ...
    def continue_generation(self, *, timeout: float | None = None) -> ContinueGenerationReqOutput: ...
    def abort(self, *, abort_all: bool, timeout: float | None = None) -> AbortReqOutput: ...


def started(settings: Settings, model: str) -> AbstractContextManager[Engine]:
    """Start an engine on the checkpoint in ``model``, or ``settings.replicas`` of them."""
    log = settings.out_dir / "engine.log"
    if settings.replicas > 1:
        from .replicas import Served

        return Served(settings, model, log)
    adapters: dict[str, Any] = {}
    if isinstance(settings, LoraSettings):  # the versions that samples still have keep their slots
        slots = 2 * len(settings.targets)
        adapters = {"enable_lora": True, "max_loras": slots, "max_lora_rank": settings.rank}
    return launch_scheduler(
        model,
        dtype="float32",
        device="cpu",
        num_threads=settings.engine_threads,
        context_len=task.CONTEXT_LEN,
        kv_pool_tokens=settings.kv_pool_tokens,
        max_running_requests=settings.max_running_requests,
        log_path=log,
        **adapters,
    )
