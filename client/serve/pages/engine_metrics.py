"""The engine's metrics: a watch that looks at its status every second, and the conversion of a status into metric families.

Invariants: the engine is asked at most every :data:`FRESH_S`, however many look. While it does not answer, its last status
is reported together with its age. Nothing here is called per request or token.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import TYPE_CHECKING, get_args

import msgspec

from ....io_struct import GenerationState, GetStatusReqOutput, MemoryTag, PauseMode, WeightsState
from ....io_struct.distribution import EPOCHS, SECONDS, Histogram
from ...connection.async_control_client import AsyncControlClient
from ...exceptions import EngineError
from ..health import NOBODY
from ..printable import printable
from .document import Percentiles, ReplicaView, UpdateTimes
from .metric_families import Families
from .ticks import TICK_S, Tick, Ticks

if TYPE_CHECKING:
    from ...group.replicas import ReplicaFleet

FRESH_S = 0.2
"""A status younger than this is reused."""
ANSWER_S = 2.0
"""Timeout of a status request; an engine answers within 0.1 s in every state."""
RATE_S = 1.0
"""Window of the throughput in seconds."""
_UPDATE_STAGES = ("pause", "update.receive", "update.copy", "update.derive", "update.flush", "continue")


@dataclass(frozen=True, slots=True)
class Look:
    """The latest known status of an engine."""

    status: GetStatusReqOutput | None
    """None until the first answer."""
    answered: bool
    """Whether the engine answered the last poll."""
    age_s: float
    """Age of the status; 0.0 without one."""
    throughput: float
    """Tokens per second within the last :data:`RATE_S`."""


class EngineWatch:
    """Looks at an engine's status every second, and when somebody asks."""

    def __init__(self) -> None:
        self.fleet: ReplicaFleet | None = None
        """The replicas whose status this is; None: one engine's."""
        self.ticks = Ticks()
        self.last_update: UpdateTimes | None = None
        self._restarts = 0
        self._lock = asyncio.Lock()
        self._status: GetStatusReqOutput | None = None
        self._answered = False
        self._answered_at = self._asked_at = float("-inf")
        self._before_update: GetStatusReqOutput | None = None

    async def sample(self, client: AsyncControlClient) -> None:
        """Look every :data:`TICK_S` until cancelled."""
        while True:
            await self.look(client)
            await asyncio.sleep(TICK_S)

    async def look(self, client: AsyncControlClient) -> Look:
        """The engine's status, at most :data:`FRESH_S` old if it answers. Never raises if it does not."""
        async with self._lock:
            if monotonic() - self._asked_at >= FRESH_S:
                await self._ask(client)
        status, age = self._status, monotonic() - self._answered_at
        return Look(status, self._answered, 0.0 if status is None else age, self._throughput())

    @property
    def restarts(self) -> int:
        """Number of new engine processes that were seen."""
        return self._restarts if self.fleet is None else self.fleet.restarts

    def histograms(self) -> dict[str, Histogram]:
        """What the engine counts of finished samples, by name."""
        if self._status is None:
            return {}
        totals = self._status.totals
        counted = {"in the queue": totals.queue_time, "whole sample": totals.latency_s}
        return {name: Histogram(SECONDS, each) for name, each in counted.items() if each.counts}

    def replicas(self) -> list[ReplicaView]:
        """Return the replicas as they are now."""
        members = [] if self.fleet is None else self.fleet.members
        return [
            ReplicaView(name=each.name, state=each.state, reason="" if each.serves else each.reason)
            for each in members
        ]

    async def _ask(self, client: AsyncControlClient) -> None:
        try:
            status = await client.status(owner=NOBODY, timeout=ANSWER_S)
        except EngineError:
            self._answered = False
        else:
            if self._status is not None and status.incarnation != self._status.incarnation:
                self.ticks = Ticks()  # another engine, whose counters start at 0
                self._before_update = None
                self._restarts += 1
            self._status, self._answered, self._answered_at = status, True, monotonic()
            self._keep(status)
        self._asked_at = monotonic()

    def _keep(self, status: GetStatusReqOutput) -> None:
        members = [] if self.fleet is None else self.fleet.members
        self.ticks.add(
            Tick(
                time(),
                status.uptime_s,
                status.generated_tokens,
                _holding(status),
                status.waiting_requests,
                status.kv.held,
                status.device_memory.reserved,
                [each.load if each.serves else -1 for each in members],
            )
        )
        if status.generation == "running" and status.weights == "valid" and status.session is None:
            self._note_update(status)

    def _note_update(self, status: GetStatusReqOutput) -> None:
        """Note how long the update took that was committed since the last look at an engine that ran."""
        before, self._before_update = self._before_update, status
        updates = 0 if before is None else _committed(status) - _committed(before)
        if before is None or updates <= 0:
            return
        earlier = {stage.name: stage.total_s for stage in before.stages}
        now = {stage.name: stage.total_s for stage in status.stages}
        seconds = {name: (now.get(name, 0.0) - earlier.get(name, 0.0)) / updates for name in _UPDATE_STAGES}
        self.last_update = UpdateTimes(at=time(), updates=updates, seconds=seconds)

    def _throughput(self) -> float:
        both = self.ticks.over(RATE_S) if self._answered else None
        if both is None:
            return 0.0
        first, last = both
        seconds = last.uptime_s - first.uptime_s
        return (last.generated_tokens - first.generated_tokens) / seconds if seconds > 0 else 0.0


def percentiles(histograms: Mapping[str, Histogram]) -> list[Percentiles]:
    """Return the percentiles of the histograms that have values."""
    return [
        Percentiles(name=name, count=each.total, p50=p50, p90=p90, p99=p99)
        for name, each in histograms.items()
        for p50, p90, p99 in [[each.quantile(share) or 0.0 for share in (0.5, 0.9, 0.99)]]
        if each.total
    ]


def engine_families(families: Families, look: Look) -> None:
    """Adds all metrics of ``look``."""
    families.gauge(
        "engine_up",
        "1 if the engine answers; if 0, the other metrics show its last known values.",
        look.answered,
    )
    if look.status is None:
        return
    families.gauge("engine_status_age_seconds", "Age of the engine metrics.", look.age_s)
    _state(families, look.status)
    _load(families, look.status, look.throughput)
    _memory(families, look.status)
    _totals(families, look.status)


def _state(families: Families, status: GetStatusReqOutput) -> None:
    states, gauge, modes = families.states, families.gauge, get_args(PauseMode)
    states(
        "engine_state",
        "1 for the current state of generation.",
        "state",
        get_args(GenerationState),
        status.generation,
    )
    states("pause_mode", "1 for the mode of the current pause.", "mode", modes, status.pause_mode)
    states(
        "weights_state",
        "1 for the current state of the weights.",
        "state",
        get_args(WeightsState),
        status.weights,
    )
    released = {tag: tag in status.released_tags for tag in get_args(MemoryTag)}
    gauge("memory_released", "1 for each tag whose memory is released.", released, ("tag",))
    gauge("pause_age_seconds", "Duration of the current pause; 0 if not paused.", status.pause_age_s or 0.0)
    paused = _holding(status) if status.generation == "paused" else 0
    gauge("num_paused_reqs", "Requests frozen by a pause, with their KV cache.", paused)
    gauge("weights_epoch", "Number of committed weight updates.", status.weights_epoch)
    words = {
        "weight_version": status.weight_version, "model_path": status.model_path, "dtype": status.dtype,
        "device": status.device, "engine_version": status.version,
    }  # fmt: skip
    words = {name: printable(word, 1024) for name, word in words.items()}
    families.info("engine", "The model and the engine that serve it.", words)


def _load(families: Families, status: GetStatusReqOutput, throughput: float) -> None:
    gauge = families.gauge
    if status.images is None:
        _tokens(families, status, throughput)
    else:
        gauge("denoise_throughput", "Denoise steps of samples per second.", throughput)
        text = "Running samples of an image engine, by the step that each needs next."
        gauge("image_samples", text, msgspec.structs.asdict(status.images), ("stage",))
        families.counter("denoise_steps", "Denoise steps of samples.", status.generated_tokens)
    gauge(
        "num_running_reqs",
        "Running requests: those that hold KV cache, in prefill or decode.",
        _holding(status),
    )
    gauge(
        "num_prefilling_reqs", "Running requests whose prefill is not complete.", status.prefilling_requests
    )
    gauge("num_queue_reqs", "Requests in the waiting queue.", status.waiting_requests)
    gauge("max_running_requests", "Maximum number of running requests.", status.max_running_requests)
    gauge(
        "step_age_seconds",
        "Seconds since the last step finished; 0 before the first.",
        status.last_step_age_s or 0.0,
    )
    limit = status.step_failures.token_limit
    if limit is not None:
        gauge(
            "step_token_limit",
            "Maximum tokens per step (samples of an image engine), lowered after running out of memory.",
            limit,
        )


def _tokens(families: Families, status: GetStatusReqOutput, throughput: float) -> None:
    """What only language models have."""
    gauge, counter, kv, totals = families.gauge, families.counter, status.kv, status.totals
    gauge("gen_throughput", "Generation throughput in tokens per second.", throughput)
    gauge("num_used_tokens", "KV cache tokens held by running requests.", kv.held)
    gauge("num_cached_tokens", "KV cache tokens held by the prefix cache alone (evictable).", kv.cached)
    gauge("max_total_num_tokens", "Size of the KV cache pool in tokens.", kv.total)
    gauge(
        "token_usage",
        "Fraction of the KV cache pool held by running requests, 0 to 1.",
        kv.held / max(kv.total, 1),
    )
    rate = totals.cached_tokens / max(totals.prompt_tokens, 1)
    gauge("cache_hit_rate", "Fraction of prompt tokens found in the prefix cache, since start.", rate)
    counter("generation_tokens", "Generated tokens.", status.generated_tokens)
    counter("prompt_tokens", "Prompt tokens of requests that have been scheduled.", totals.prompt_tokens)
    counter("cached_tokens", "Prompt tokens found in the prefix cache.", totals.cached_tokens)


def _memory(families: Families, status: GetStatusReqOutput) -> None:
    memory, gauge = status.device_memory, families.gauge
    gauge("memory_reserved_bytes", "Bytes reserved by the device allocator.", memory.reserved)
    gauge("memory_allocated_bytes", "Bytes in use within the reserved memory.", memory.allocated)
    if memory.available is not None:
        gauge("memory_available_bytes", "Free bytes on the device.", memory.available)
    if status.memory_by_tag is not None:
        text = "Reserved memory by purpose, at the last memory event."
        gauge("memory_bytes", text, msgspec.structs.asdict(status.memory_by_tag), ("tag",))
    there = {each.name: each.device_bytes for each in status.components}
    if there:
        gauge("component_bytes", "Bytes on the device of components that come and go.", there, ("component",))
    if (prompts := status.prompt_cache) is not None:
        gauge("prompt_cache_bytes", "Bytes of encoded prompts that are kept.", prompts.nbytes)
        families.counter("prompt_cache_hits", "Prompts that were found encoded.", prompts.hits)
        families.counter("prompt_cache_misses", "Prompts that were encoded.", prompts.misses)


def _totals(families: Families, status: GetStatusReqOutput) -> None:
    counter, totals, failures = families.counter, status.totals, status.step_failures
    ended = totals.finished_requests
    counter("num_requests", "Finished samples.", sum(ended.values()))
    counter("num_aborted_requests", "Aborted samples.", ended.get("abort", 0))
    counter("finished_requests", "Finished samples by finish reason.", ended, ("finish_reason",))
    counter(
        "num_retracted_requests",
        "Retractions: times a request's KV cache was freed, to be recomputed.",
        status.num_retractions,
    )
    counter("steps", "Executed steps.", status.step)
    counter("failed_steps", "Steps that failed.", failures.failed)
    counter("retried_steps", "Steps that were computed again after a failure.", failures.retried)
    pauses = {pause.mode: pause.count for pause in totals.pauses}
    paused_s = {pause.mode: pause.seconds for pause in totals.pauses}
    counter("pauses", "Pauses by mode.", pauses, ("mode",))
    counter("pause_seconds", "Time spent paused, including the current pause.", paused_s, ("mode",))
    updates = {(update.source, "committed"): update.committed for update in totals.updates}
    updates |= {(update.source, "failed"): update.failed for update in totals.updates}
    text = "Weight updates by transport and result; a failed one left the weights poisoned."
    counter("weight_updates", text, updates, ("source", "result"))
    emptied = {each.place: each.count for each in totals.emptied}
    returned = {each.place: each.freed_bytes for each in totals.emptied}
    counter(
        "cache_emptyings", "Times the device allocator's cache was emptied, by place.", emptied, ("place",)
    )
    text = "Bytes returned to the system by emptying the cache, by place."
    counter("cache_emptied_bytes", text, returned, ("place",))
    stages = {stage.name: stage.total_s for stage in status.stages}
    runs = {stage.name: stage.count for stage in status.stages}
    counter("stage_seconds", "Time by stage; update.* are the stages of weight updates.", stages, ("stage",))
    counter("stage_runs", "Runs by stage.", runs, ("stage",))
    if totals.queue_time.counts:
        text = "Time of finished samples from arrival to the first scheduled step."
        families.histogram("queue_time_seconds", text, Histogram(SECONDS, totals.queue_time))
        text = "Time of finished samples from arrival to the end, in the engine."
        families.histogram("sample_latency_seconds", text, Histogram(SECONDS, totals.latency_s))
        text = "Weight commits between the first and the last token of finished samples."
        families.histogram("sample_staleness_epochs", text, Histogram(EPOCHS, totals.staleness))


def _committed(status: GetStatusReqOutput) -> int:
    return sum(update.committed for update in status.totals.updates)


def _holding(status: GetStatusReqOutput) -> int:
    return status.running_requests + status.prefilling_requests
