"""History of a run: written by the loop, read by the display and the report.

Units: seconds, milliseconds and MB (2^20 bytes) as the names say; rewards and shares in [0, 1].
"""

import statistics
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from caesura.io_struct import StageTimes

from .messages import GapStats, Sample, StepStats, WarmupProgress
from .rollout import Ledger, PoolCounts

MB = 1 << 20
STAGES = ("receive", "copy", "derive", "flush")
"""Stages of an update, as the engine times it."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a loop: rollouts taken, step made, weights brought to the engine."""

    update: int
    at_s: float
    """Seconds since reinforcement learning began."""
    train_exact: float
    """Share of sampled training answers that are exactly right (all that ended since the last update)."""
    train_reward: float
    """Mean reward of these answers, partial credit included."""
    lag: float
    """Mean over the batch: updates between a group's oldest token and its use."""
    samples: int
    wait_s: float
    """Seconds that the trainer waited for rollouts."""
    train_s: float
    verify_s: float
    save_s: float
    update_ms: float
    changed_tensors: int
    step: StepStats
    gap: GapStats


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Turn):
    """A turn whose weights came during a pause in place."""

    pause_ms: float
    continue_ms: float
    stages: StageTimes
    """Milliseconds of the update's stages, by the engine."""
    held_requests: int
    """Samples that kept their KV through the pause, in mid-answer."""
    waiting_requests: int
    reserved_running_mb: float
    """Reserved memory just before the pause."""
    reserved_before_mb: float
    """Reserved memory while paused, before the device cache was emptied."""
    reserved_after_mb: float
    tokens_per_s: float
    """Tokens per second sampled since the last update, pauses included."""


@dataclass(frozen=True)
class EvalRecord:
    """Held-out reward of one version."""

    update: int
    at_s: float
    reward: float
    answers: dict[str, list[int]] = field(repr=False)


@dataclass(kw_only=True)
class RunHistory:
    """Record of what a run has once, however many loops it has."""

    updates_planned: int
    transport: str
    parameters: int = 0
    warmup: list[WarmupProgress] = field(default_factory=list)
    warmup_s: float = 0.0
    engine_start_s: float = 0.0
    tokens: int = 0
    """Tokens sampled by the engine over the reinforcement-learning phase."""
    rl_s: float = 0.0
    wall_s: float = 0.0


TurnT = TypeVar("TurnT", bound=Turn)


@dataclass(kw_only=True)
class LoopHistory(Generic[TurnT]):
    """Record of one loop; ``phase`` is for the display."""

    phase: str = "starting"
    updates: list[TurnT] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    counts: PoolCounts = field(default_factory=PoolCounts)
    exemplar: tuple[str, Sample] | None = None


@dataclass(kw_only=True)
class History(RunHistory, LoopHistory[UpdateRecord]):
    """Record of a run with one loop."""

    def stages_ms(self) -> dict[str, float]:
        """Return the median milliseconds per stage of an update."""
        return {
            stage: round(1e3 * statistics.median(getattr(row.stages, stage) for row in self.updates), 3)
            for stage in STAGES
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of ``summary.json``: exact shares on held-out words; gaps over first spans."""
        pauses = [record.pause_ms for record in self.updates]
        return {
            "reward_first": round(self.evals[0].reward, 4),
            "reward_last": round(self.evals[-1].reward, 4),
            "ess_min": round(min(record.step.ess for record in self.updates), 4),
            "updates": len(self.updates),
            "pause_ms_p50": round(statistics.median(pauses), 3),
            "pause_ms_max": round(max(pauses), 3),
            "update_ms_p50": round(statistics.median(record.update_ms for record in self.updates), 3),
            "reserved_mb_first": round(self.updates[0].reserved_after_mb, 2),
            "reserved_mb_last": round(self.updates[-1].reserved_after_mb, 2),
            "tokens_per_s": round(self.tokens / self.rl_s, 1),
            "max_logprob_gap": max(record.gap.first_max for record in self.updates),
            "requests_lost": self.ledger.submitted - self.ledger.ended,
            "transport": self.transport,
            "update_stages_ms": self.stages_ms(),
        }
