"""Throughput over the last seconds, and the log line about load.

Invariants:
- Counters that exist anyway are read about once a second while steps run, and never per step or token. An
  engine that has nothing to do is woken once, for the last line.
- A line covers the time since the line before, or since the work began: what an idle engine does not do is
  not averaged in.
"""

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from ...io_struct import GenerateImagesReqOutput, GenerateReqOutput
from ...io_struct.distribution import EPOCHS, SECONDS, Distribution, Histogram

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

READ_S = 1.0
"""Seconds between two readings of the counters."""
_LEAST_READ_S = 0.1
WINDOW_S = 5.0
"""Seconds that :meth:`Throughput.generated_per_s` looks back on."""


class Counters(NamedTuple):
    """The counters of an engine at one moment; all but the state at the end only rise."""

    generated_tokens: int
    prefilled_tokens: int
    """Prompt tokens that steps have computed."""
    prompt_tokens: int
    """Prompt tokens of requests that have started."""
    cached_tokens: int
    """Those of them that came from the prefix cache."""
    paused_s: float
    running: int
    waiting: int
    kv_held: int
    kv_total: int
    images: bool
    """Samples are images: their denoise steps are what ``generated_tokens`` counts."""
    state: str
    """What the engine does, for people: ``running``, ``paused in_place``, …"""


def counters(engine: "Engine") -> Counters:
    state, batcher, kv = engine.state, engine.batcher, engine.cache.usage()
    return Counters(
        generated_tokens=engine.outputs.generated_tokens,
        prefilled_tokens=batcher.prefilled_tokens,
        prompt_tokens=batcher.prompt_tokens,
        cached_tokens=batcher.cached_tokens,
        paused_s=sum(total.seconds for total in state.pause_totals()),
        running=batcher.num_running + batcher.num_prefilling,
        waiting=len(engine.waiting),
        kv_held=kv.held,
        kv_total=kv.total,
        images=batcher.images is not None,
        state=" ".join(filter(None, (state.generation, state.pause_mode)))
        + ("" if state.weights == "valid" else f", weights {state.weights}"),
    )


class _Reading(NamedTuple):
    at: float
    counters: Counters


class Throughput:
    """Reads counters while there is work; knows the recent throughput, and logs it."""

    def __init__(
        self, read: Callable[[], Counters], is_working: Callable[[], bool], log_interval_s: float
    ) -> None:
        """``is_working`` tells whether steps run; with ``log_interval_s`` 0 no lines are logged."""
        self._read = read
        self._is_working = is_working
        self._log_interval_s = log_interval_s
        self._read_s = max(_LEAST_READ_S, min(READ_S, log_interval_s or READ_S))
        self._readings: deque[_Reading] = deque(maxlen=round(WINDOW_S / self._read_s) + 2)
        self._next = 0.0
        self._logged: _Reading | None = None
        """Where the next line begins; None: no work since the last one."""

    def generated_per_s(self) -> float:
        """Return tokens per second in the last :data:`WINDOW_S`, or since the work began."""
        now = monotonic()
        recent = [reading for reading in self._readings if now - reading.at <= WINDOW_S]
        if not recent and self._readings and self._is_working():  # steps take longer than the window
            recent = [self._readings[-1]]
        if not recent or now <= recent[0].at:
            return 0.0
        tokens = self._read().generated_tokens - recent[0].counters.generated_tokens
        return tokens / (now - recent[0].at)

    def due(self) -> float | None:
        """Return when :meth:`act` is due, on the monotonic clock; None if there is nothing to do."""
        if self._is_working():
            return self._next
        return None if self._logged is None else self._logged.at + self._log_interval_s

    def act(self) -> None:
        """Read the counters, and log a line if its interval is over."""
        reading = _Reading(monotonic(), self._read())
        self._next = reading.at + self._read_s
        working = self._is_working()
        if working:
            self._readings.append(reading)
        if not self._log_interval_s:
            return
        if self._logged is None:
            self._logged = reading
        elif reading.at - self._logged.at >= self._log_interval_s:
            _log(self._logged, reading)
            self._logged = reading if working else None


def _log(first: _Reading, last: _Reading) -> None:
    logger.info("load: %s", line(first.counters, last.counters, last.at - first.at))


def line(before: Counters, now: Counters, seconds: float) -> str:
    """Return the work between two readings, ``seconds`` apart, in words."""
    rates = (_image_rates if now.images else _token_rates)(before, now, seconds)
    paused = now.paused_s - before.paused_s
    ending = f", {paused:.1f} s of them paused" if paused >= 0.05 else ""
    return f"{now.state}; {now.running} running, {now.waiting} waiting, {rates}; over {seconds:.1f} s{ending}"


def _image_rates(before: Counters, now: Counters, seconds: float) -> str:
    return f"denoised {(now.generated_tokens - before.generated_tokens) / seconds:.1f} steps/s"


def _token_rates(before: Counters, now: Counters, seconds: float) -> str:
    prompts = now.prompt_tokens - before.prompt_tokens
    hits = f"{100 * (now.cached_tokens - before.cached_tokens) / prompts:.0f} %" if prompts else "none"
    return (
        f"KV {100 * now.kv_held / max(now.kv_total, 1):.0f} % held; "
        f"generated {(now.generated_tokens - before.generated_tokens) / seconds:.1f} tok/s, "
        f"prefilled {(now.prefilled_tokens - before.prefilled_tokens) / seconds:.1f} tok/s, prefix hits "
        f"{hits}"
    )


class SampleTotals:
    def __init__(self) -> None:
        self._queue = Histogram(SECONDS)
        self._latency = Histogram(SECONDS)
        self._staleness = Histogram(EPOCHS)

    def count(self, result: GenerateReqOutput | GenerateImagesReqOutput) -> None:
        """Count a finished sample. One without a token has no staleness."""
        self._queue.observe(result.queue_time)
        self._latency.observe(result.e2e_latency)
        if spans := result.weight_versions:
            self._staleness.observe(spans[-1].epoch - spans[0].epoch)

    def totals(self) -> dict[str, Distribution]:
        """Return the histograms as fields of :class:`~caesura.io_struct.control.EngineTotals`."""
        return {
            "queue_time": self._queue.distribution(),
            "latency_s": self._latency.distribution(),
            "staleness": self._staleness.distribution(),
        }
