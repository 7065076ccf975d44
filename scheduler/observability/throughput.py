"""Throughput over the last seconds, and the log line about load, of counters that are read once a second."""

import logging
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from ...io_struct import GenerateImagesReqOutput, GenerateReqOutput
from ...io_struct.distribution import EPOCHS, SECONDS, Distribution, Histogram

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

READ_S = 1.0
_LEAST_READ_S = 0.1
WINDOW_S = 5.0
"""Seconds that :meth:`Throughput.generated_per_s` looks back on."""


class Counters(NamedTuple):
    at: float
    generated_tokens: int
    prefilled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    paused_s: float
    running: int
    waiting: int
    kv_held: float
    images: bool
    """Samples are images: their denoise steps are what ``generated_tokens`` counts."""
    state: str


def counters(engine: "Engine") -> Counters:
    state, batcher, kv = engine.state, engine.batcher, engine.cache.usage()
    mode = " ".join(filter(None, (state.generation, state.pause_mode)))
    return Counters(
        at=monotonic(),
        generated_tokens=engine.outputs.generated_tokens,
        prefilled_tokens=batcher.prefilled_tokens,
        prompt_tokens=batcher.prompt_tokens,
        cached_tokens=batcher.cached_tokens,
        paused_s=sum(total.seconds for total in state.pause_totals()),
        running=batcher.num_running + batcher.num_prefilling,
        waiting=len(engine.waiting),
        kv_held=kv.held / max(kv.total, 1),
        images=batcher.images is not None,
        state=mode + ("" if state.weights == "valid" else f", weights {state.weights}"),
    )


class Throughput:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._log_interval_s = interval = engine.config.log_stats_interval_s
        self._read_s = max(_LEAST_READ_S, min(READ_S, interval or READ_S))
        self._readings: deque[Counters] = deque(maxlen=round(WINDOW_S / self._read_s) + 2)
        self._next = 0.0
        self._logged: Counters | None = None
        """Where the next line begins; None: no work since the last one."""

    @property
    def _is_working(self) -> bool:
        return self._engine.state.may_execute and self._engine.batcher.has_work

    def generated_per_s(self) -> float:
        """Return tokens per second in the last :data:`WINDOW_S`, or since the work began."""
        now = monotonic()
        recent = [reading for reading in self._readings if now - reading.at <= WINDOW_S]
        if not recent and self._readings and self._is_working:  # steps take longer than the window
            recent = [self._readings[-1]]
        if not recent or now <= recent[0].at:
            return 0.0
        return (self._engine.outputs.generated_tokens - recent[0].generated_tokens) / (now - recent[0].at)

    def due(self) -> float | None:
        if self._is_working:
            return self._next
        return None if self._logged is None else self._logged.at + self._log_interval_s

    def act(self) -> None:
        reading, working = counters(self._engine), self._is_working
        self._next = reading.at + self._read_s
        if working:
            self._readings.append(reading)
        if not self._log_interval_s:
            return
        if self._logged is None:
            self._logged = reading
        elif reading.at - self._logged.at >= self._log_interval_s:
            logger.info("load: %s", line(self._logged, reading))
            self._logged = reading if working else None


def line(before: Counters, now: Counters) -> str:
    seconds = now.at - before.at
    paused = now.paused_s - before.paused_s
    ending = f", {paused:.1f} s of them paused" if paused >= 0.05 else ""
    generated = (now.generated_tokens - before.generated_tokens) / seconds
    rates = f"denoised {generated:.1f} steps/s"
    if not now.images:
        prompts = now.prompt_tokens - before.prompt_tokens
        hits = f"{100 * (now.cached_tokens - before.cached_tokens) / prompts:.0f} %" if prompts else "none"
        prefilled = (now.prefilled_tokens - before.prefilled_tokens) / seconds
        rates = (
            f"KV {100 * now.kv_held:.0f} % held; generated {generated:.1f} tok/s, "
            f"prefilled {prefilled:.1f} tok/s, prefix hits {hits}"
        )
    return f"{now.state}; {now.running} running, {now.waiting} waiting, {rates}; over {seconds:.1f} s{ending}"


class SampleTotals:
    def __init__(self) -> None:
        self._queue = Histogram(SECONDS)
        self._latency = Histogram(SECONDS)
        self._staleness = Histogram(EPOCHS)

    def count(self, result: GenerateReqOutput | GenerateImagesReqOutput) -> None:
        self._queue.observe(result.queue_time)
        self._latency.observe(result.e2e_latency)
        if spans := result.weight_versions:
            self._staleness.observe(spans[-1].epoch - spans[0].epoch)

    def totals(self) -> dict[str, Distribution]:
        return {
            "queue_time": self._queue.distribution(),
            "latency_s": self._latency.distribution(),
            "staleness": self._staleness.distribution(),
        }
