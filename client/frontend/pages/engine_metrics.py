"""What the engine tells of itself, as metrics: one status into families, and a watch that asks for statuses.

Invariants: the engine is asked at most every :data:`FRESH_S`, whoever wants to know; while it does not answer, its last
status stands and says how old it is. Nothing here is called per request or token.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from time import monotonic, time
from typing import get_args

import msgspec

from ....io_struct import GenerationState, GetStatusReqOutput, MemoryTag, PauseMode, WeightsState
from ...exceptions import EngineError
from ...wire.async_control_client import AsyncControlClient
from ..health import NOBODY
from ..printable import printable
from .document import Tick
from .metric_families import Families

FRESH_S = 0.2
"""A status so young is not asked for again."""
ANSWER_S = 2.0
"""How long an answer may take; an engine answers within 0.1 s whatever it does."""
TICKS = 1200
TICK_S = 0.5
"""Between two ticks that are kept: ten minutes of them."""
RATE_S = 1.0
"""Throughput is of the last so many seconds, or since the look before, if that is longer ago."""


@dataclass(frozen=True, slots=True)
class Look:
    """The newest that is known of an engine."""

    status: GetStatusReqOutput | None
    """None: it has never answered."""
    answered: bool
    """False: it does not answer now, or has not for a while."""
    age_s: float
    """Of the status; 0.0 without one."""
    throughput: float
    """Tokens per second lately."""


class EngineWatch:
    """Asks an engine for its status when somebody wants to know, not more often than useful."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._status: GetStatusReqOutput | None = None
        self._answered = False
        self._answered_at = self._asked_at = float("-inf")
        self._ticks: deque[Tick] = deque(maxlen=TICKS)

    async def look(self, client: AsyncControlClient) -> Look:
        """The engine's status, at most :data:`FRESH_S` old where it answers; never raises for one that does not."""
        async with self._lock:
            if monotonic() - self._asked_at >= FRESH_S:
                await self._ask(client)
        status, age = self._status, monotonic() - self._answered_at
        return Look(status, self._answered, 0.0 if status is None else age, self._throughput())

    def ticks(self, since: float) -> list[Tick]:
        """Those after ``since`` (seconds since the epoch), oldest first; some :data:`TICK_S` apart."""
        return [tick for tick in self._ticks if tick.at > since]

    async def _ask(self, client: AsyncControlClient) -> None:
        try:
            status = await client.status(owner=NOBODY, timeout=ANSWER_S)
        except EngineError:
            self._answered = False
        else:
            if self._status is not None and status.pid != self._status.pid:
                self._ticks.clear()  # another engine, whose counters began again
            self._status, self._answered, self._answered_at = status, True, monotonic()
            self._keep(status)
        self._asked_at = monotonic()

    def _keep(self, status: GetStatusReqOutput) -> None:
        tick = Tick(
            time(),
            status.uptime_s,
            status.generated_tokens,
            _holding(status),
            status.waiting_requests,
            status.kv.held,
            status.device_memory.reserved,
        )
        if len(self._ticks) > 1 and self._ticks[-1].uptime_s - self._ticks[-2].uptime_s < TICK_S:
            self._ticks.pop()  # the last one is always the newest, those before are TICK_S apart
        self._ticks.append(tick)

    def _throughput(self) -> float:
        if len(self._ticks) < 2 or not self._answered:
            return 0.0
        last = self._ticks[-1]
        earlier = (tick for tick in reversed(self._ticks) if last.uptime_s - tick.uptime_s >= RATE_S)
        first = next(earlier, self._ticks[0])
        seconds = last.uptime_s - first.uptime_s
        return (last.generated_tokens - first.generated_tokens) / seconds if seconds > 0 else 0.0


def engine_families(families: Families, look: Look) -> None:
    """Everything that ``look`` says."""
    families.gauge("engine_up", "1 if the engine answers; else its last figures stand.", look.answered)
    if look.status is None:
        return
    families.gauge("engine_status_age_seconds", "Age of the engine's figures.", look.age_s)
    _state(families, look.status)
    _load(families, look.status, look.throughput)
    _memory(families, look.status)
    _totals(families, look.status)


def _state(families: Families, status: GetStatusReqOutput) -> None:
    states, gauge, modes = families.states, families.gauge, get_args(PauseMode)
    states("engine_state", "1 for what generation is.", "state", get_args(GenerationState), status.generation)
    states("pause_mode", "1 for the mode of the pause that lasts.", "mode", modes, status.pause_mode)
    states("weights_state", "1 for what the weights are.", "state", get_args(WeightsState), status.weights)
    released = {tag: tag in status.released_tags for tag in get_args(MemoryTag)}
    gauge("memory_released", "1 for memory that is given back.", released, ("tag",))
    gauge("pause_age_seconds", "How long the pause has lasted; else 0.", status.pause_age_s or 0.0)
    paused = _holding(status) if status.generation == "paused" else 0
    gauge("num_paused_reqs", "Requests frozen by a pause with their KV.", paused)
    gauge("weights_epoch", "Commits of new weights since start.", status.weights_epoch)
    words = {
        "weight_version": status.weight_version, "model_path": status.model_path, "dtype": status.dtype,
        "device": status.device, "engine_version": status.version,
    }  # fmt: skip
    words = {name: printable(word, 1024) for name, word in words.items()}
    families.info("engine", "What the engine serves.", words)


def _load(families: Families, status: GetStatusReqOutput, throughput: float) -> None:
    gauge, kv, totals = families.gauge, status.kv, status.totals
    gauge("gen_throughput", "Tokens sampled per second, lately.", throughput)
    gauge("num_running_reqs", "Requests that hold KV, prefilling or sampling.", _holding(status))
    gauge("num_prefilling_reqs", "Those with prompt left to compute.", status.prefilling_requests)
    gauge("num_queue_reqs", "Requests that wait for KV.", status.waiting_requests)
    gauge("max_running_requests", "Most requests that may hold KV.", status.max_running_requests)
    gauge("num_used_tokens", "Token slots of KV that live requests hold.", kv.held)
    gauge("num_cached_tokens", "Token slots of the prefix cache that nobody holds.", kv.cached)
    gauge("max_total_num_tokens", "Token slots of the KV pool.", kv.total)
    gauge("token_usage", "Share of the KV pool that live requests hold, 0 to 1.", kv.held / max(kv.total, 1))
    rate = totals.cached_tokens / max(totals.prompt_tokens, 1)
    gauge("cache_hit_rate", "Share of prompt tokens that came from the prefix cache, since start.", rate)
    gauge("step_age_seconds", "Since a step finished; 0 before the first.", status.last_step_age_s or 0.0)
    limit = status.step_failures.token_limit
    if limit is not None:
        gauge("step_token_limit", "Tokens in a step, small for want of memory.", limit)


def _memory(families: Families, status: GetStatusReqOutput) -> None:
    memory, gauge = status.device_memory, families.gauge
    gauge("memory_reserved_bytes", "What the device allocator holds.", memory.reserved)
    gauge("memory_allocated_bytes", "What it has handed out.", memory.allocated)
    if memory.available is not None:
        gauge("memory_available_bytes", "Free on the device.", memory.available)
    if status.memory_by_tag is not None:
        text = "Reserved memory by what holds it, as of the last memory event."
        gauge("memory_bytes", text, msgspec.structs.asdict(status.memory_by_tag), ("tag",))


def _totals(families: Families, status: GetStatusReqOutput) -> None:
    counter, totals, failures = families.counter, status.totals, status.step_failures
    counter("generation_tokens", "Tokens sampled.", status.generated_tokens)
    counter("prompt_tokens", "Prompt tokens of requests that have begun to run.", totals.prompt_tokens)
    counter("cached_tokens", "Those of them that came from the prefix cache.", totals.cached_tokens)
    ended = totals.finished_requests
    counter("num_requests", "Samples that have ended.", sum(ended.values()))
    counter("num_aborted_requests", "Samples that were aborted.", ended.get("abort", 0))
    counter("finished_requests", "Samples that have ended, by how.", ended, ("finish_reason",))
    counter("num_retracted_requests", "KV of requests given back and recomputed.", status.num_retractions)
    counter("steps", "Steps launched.", status.step)
    counter("failed_steps", "Steps that raised.", failures.failed)
    counter("retried_steps", "Steps whose requests went on after a failure.", failures.retried)
    pauses = {pause.mode: pause.count for pause in totals.pauses}
    paused_s = {pause.mode: pause.seconds for pause in totals.pauses}
    counter("pauses", "Pauses.", pauses, ("mode",))
    counter("pause_seconds", "Time spent paused, the pause that lasts included.", paused_s, ("mode",))
    updates = {(update.source, "committed"): update.committed for update in totals.updates}
    updates |= {(update.source, "failed"): update.failed for update in totals.updates}
    text = "Weight updates: committed, or failed with weights poisoned."
    counter("weight_updates", text, updates, ("source", "result"))
    emptied = {each.place: each.count for each in totals.emptied}
    returned = {each.place: each.freed_bytes for each in totals.emptied}
    counter("cache_emptyings", "Emptyings of the device allocator's cache, by place.", emptied, ("place",))
    text = "Bytes that these emptyings returned to the system, by place."
    counter("cache_emptied_bytes", text, returned, ("place",))
    stages = {stage.name: stage.total_s for stage in status.stages}
    runs = {stage.name: stage.count for stage in status.stages}
    counter("stage_seconds", "Time by stage; update.* are those of weight updates.", stages, ("stage",))
    counter("stage_runs", "How often each stage ran.", runs, ("stage",))


def _holding(status: GetStatusReqOutput) -> int:
    return status.running_requests + status.prefilling_requests
