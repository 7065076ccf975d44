"""Builds the status reply: one consistent snapshot of the engine.

Invariants: the snapshot is taken between two steps; it has no side effect (it empties no cache, synchronises no stream and
generates no token).
"""

import os
from collections.abc import Callable, Sized
from dataclasses import dataclass
from time import monotonic

from ...io_struct import DeviceMemory, EngineTotals, GetStatusReqOutput, KVUsage, StageStatus
from ..cache.manager import CacheManager
from ..control.lifecycle import Lifecycle
from ..control.weight_updates import WeightUpdates
from ..execution.kernel_report import Serving
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import DeviceMemoryReading, available_memory_if_known
from ..memory.device_module import DeviceModule
from ..memory.residency import ComponentResidencyManager
from ..observability.memory_history import MemoryHistory
from ..observability.sample_totals import SampleTotals
from ..observability.stage_profiler import StageProfiler
from ..observability.throughput import Throughput
from ..runtime.config import PAGE_SIZE, EngineConfig
from ..scheduling.stepping import KeptPrompts, StepBatcher, StepOutputs, StepRecovery
from ..scoring.scoring import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFacts:
    """Facts that do not change after start."""

    dtype: str
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    routing_bytes_per_token: int
    context_len: int
    vocab_size: int
    latent_bytes_per_pixel: float | None
    version: str
    operations: Serving


class StatusReporter:
    """Builds status replies from the engine's modules."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        facts: StaticFacts,
        lifecycle: Lifecycle,
        updates: WeightUpdates,
        batcher: StepBatcher,
        waiting: Sized,
        outputs: StepOutputs,
        cache: CacheManager,
        prompts: KeptPrompts | None,
        scoring: Scoring | None,
        samples: SampleTotals,
        recovery: StepRecovery,
        executor: Executor,
        device_module: DeviceModule,
        device_cache: DeviceCache,
        residency: ComponentResidencyManager,
        history: MemoryHistory,
        stages: StageProfiler,
        throughput: Throughput,
        last_step_at: Callable[[], float | None],
    ) -> None:
        self._config = config
        self._facts = facts
        self._lifecycle = lifecycle
        self._updates = updates
        self._batcher = batcher
        self._waiting = waiting
        self._outputs = outputs
        self._cache = cache
        self._prompts = prompts
        self._scoring = scoring
        self._samples = samples
        self._recovery = recovery
        self._executor = executor
        self._device_module = device_module
        self._device_cache = device_cache
        self._residency = residency
        self._history = history
        self._stages = stages
        self._throughput = throughput
        self._last_step_at = last_step_at
        self._started = monotonic()

    def __call__(self, message_id: str) -> GetStatusReqOutput:
        """The reply to status request ``message_id``."""
        lifecycle, now, last = self._lifecycle, monotonic(), self._last_step_at()
        return GetStatusReqOutput(
            id=message_id,
            incarnation=lifecycle.stamp.incarnation,
            generation=lifecycle.generation,
            pause_mode=lifecycle.pause_mode,
            pause_age_s=lifecycle.pause_age_s,
            pause_owner=lifecycle.pause_owner,
            lease_left_s=None if (left := lifecycle.lease_left_s) is None else max(0.0, left),
            weights=lifecycle.weights,
            weights_detail=lifecycle.weights_detail,
            memory="released" if lifecycle.released else "resident",
            released_tags=sorted(lifecycle.released),
            weight_version=lifecycle.stamp.version,
            weights_epoch=lifecycle.stamp.epoch,
            session=self._updates.sessions.status(),
            update=self._updates.progress(),
            running_requests=self._batcher.num_running,
            prefilling_requests=self._batcher.num_prefilling,
            waiting_requests=len(self._waiting),
            step=lifecycle.step,
            last_step_age_s=None if last is None else now - last,
            generated_tokens=self._outputs.generated_tokens,
            gen_throughput=self._throughput.generated_per_s(),
            images=self._batcher.images,
            latent_bytes_per_pixel=self._facts.latent_bytes_per_pixel,
            num_retractions=self._batcher.num_retractions,
            step_failures=self._recovery.counts(),
            kv=self._kv(),
            device_memory=self._memory(),
            ranks=self._executor.status(),
            memory_by_tag=self._history.by_tag,
            totals=self._totals(),
            stages=self._stage_times(),
            prompt_cache=None if self._prompts is None else self._prompts.status(),
            components=self._residency.status(),
            reference=None if self._scoring is None else self._scoring.status(),
            model_path=self._updates.model_path,
            dtype=self._facts.dtype,
            device=self._config.device,
            weights_cpu_backup=self._config.weights_cpu_backup,
            kernels=self._facts.operations.by,
            kernels_reason=self._facts.operations.reason,
            context_len=self._facts.context_len,
            vocab_size=self._facts.vocab_size,
            max_running_requests=self._config.sizes.rows,
            uptime_s=now - self._started,
            pid=os.getpid(),
            version=self._facts.version,
        )

    def _totals(self) -> EngineTotals:
        return EngineTotals(
            prompt_tokens=self._batcher.prompt_tokens,
            cached_tokens=self._batcher.cached_tokens,
            finished_requests=dict(self._outputs.finished),
            pauses=self._lifecycle.pause_totals(),
            updates=self._lifecycle.update_totals(),
            emptied=self._device_cache.totals(),
            **self._samples.totals(),
        )

    def _stage_times(self) -> list[StageStatus]:
        return [
            StageStatus(
                name=name,
                count=total.count,
                total_s=total.seconds,
                median_s=total.median,
                longest_s=total.longest,
            )
            for name, total in self._stages.totals().items()
        ]

    def _kv(self) -> KVUsage:
        usage = self._cache.usage()
        return KVUsage(
            free=usage.free * PAGE_SIZE,
            cached=usage.cached * PAGE_SIZE,
            held=usage.held * PAGE_SIZE,
            total=usage.total * PAGE_SIZE,
            page_size=PAGE_SIZE,
            bytes_per_token=self._facts.kv_bytes_per_token,
            routing_bytes_per_token=self._facts.routing_bytes_per_token,
        )

    def _memory(self) -> DeviceMemory:
        reading = DeviceMemoryReading.of(self._device_module)
        return DeviceMemory(
            reserved=reading.reserved,
            allocated=reading.allocated,
            available=self._available(),
            weights=self._facts.weights_bytes,
            kv_cache=self._facts.kv_bytes,
            weights_backup=self._residency.backup_bytes("weights"),
            components=self._residency.moved_in_bytes,
            components_peak=self._residency.peak_bytes,
        )

    def _available(self) -> int | None:
        """The smallest of all ranks'; None: some rank's is not known."""
        each = [available_memory_if_known(self._config.device)]
        each += [rank.available for rank in self._executor.status()]
        known = [size for size in each if size is not None]
        return min(known) if len(known) == len(each) else None
