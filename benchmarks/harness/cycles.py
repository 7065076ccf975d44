"""Pause, update, continue under load, timed cycle by cycle from the trainer's side.

Invariants:
- A pause is asked for while every request of the load decodes, at a random phase of a step.
- First and last tokens are told apart by the step in which they were sampled, which the pause's reply names.
  A step that ran between that reply and the continue is an error, not a measurement.
- Every update is other weights than those in place, complete, and committed before the engine goes on.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from caesura.client import ControlClient
from caesura.io_struct import PauseMode

from .load import Load
from .transports import Trainer, Transport

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
Change = Transport | Literal["none"]
NO_UPDATE: Final = "none"
"""Transport of cycles that pause and continue without an update."""
STEPS_BETWEEN = 4
"""Steps that run at least between two pauses."""
VARIANTS = {"plain": False, "empty-cache": True}
"""Ways to continue: True with the empty-cache step."""
COMMON = ("pause", "barrier", "update")
BY_VARIANT = ("resume", "first_token", "gap")
"""Parts of a cycle."""
ALLOWANCE_MS = 2.0
"""Milliseconds that the engine may take beyond one step."""
TARGET_STEP_S = 0.2
"""Longest step with prompts in it, in seconds: the engine's default."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One pause and what followed, in seconds."""

    variant: str
    """Way to continue: a key of :data:`VARIANTS`."""
    pause: float
    """Time from the call to its reply: the rest of the step in flight, and ``barrier``."""
    barrier: float
    """Part of ``pause`` after the last tokens arrived; slightly negative if their reader woke up late."""
    update: float
    resume: float
    """Time from the call that continues to its reply."""
    first_token: float
    """Time from the call that continues to the first tokens of any request."""
    gap: float
    """Time from the last tokens before the pause to the first ones after it."""
    steps: int
    """Steps from the call that continues to the first tokens, the one that sampled them included."""
    met: int
    """Requests that the pause met, running and waiting."""


class Cycles:
    """Cycles on one engine and one load; weights alternate between the trainer's two."""

    def __init__(
        self, client: ControlClient, trainer: Trainer, load: Load, mode: PauseMode, seed: int
    ) -> None:
        self._client = client
        self._trainer = trainer
        self._load = load
        self._mode: PauseMode = mode
        self._random = random.Random(seed)
        self._which = 0

    def run(self, transport: Change, variant: str, step_s: float) -> Cycle:
        """Run one cycle; ``step_s`` is about the length of a step."""
        self._load.steady(STEPS_BETWEEN)
        # A timer, not a busy loop: with as many engine threads as cores that would take one of them away from
        # a step.
        time.sleep(self._random.random() * step_s)
        pausing = time.perf_counter()
        paused = self._client.pause(self._mode)
        updating = time.perf_counter()
        if transport != NO_UPDATE:
            self._which = 1 - self._which
            reply = self._trainer.push(transport, self._which, flush_cache=self._mode != "in_place")
            assert reply.committed and reply.changed_tensors, f"{transport}: the update changed nothing"
        updated = time.perf_counter()
        continuing = time.perf_counter()
        self._client.continue_generation(torch_empty_cache=VARIANTS[variant])
        continued = time.perf_counter()
        (_, last), (step, first) = self._load.around(paused.step)
        assert first > continuing, f"step {step} ran after the pause was acknowledged at step {paused.step}"
        return Cycle(
            variant=variant,
            pause=updating - pausing,
            barrier=updating - max(last, pausing),
            update=updated - updating,
            resume=continued - continuing,
            first_token=first - continuing,
            gap=first - last,
            steps=step - paused.step,
            met=paused.held_requests + paused.waiting_requests + paused.aborted_requests,
        )


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Return ``count``, and quantiles by nearest rank: each is one of ``values``."""
    ordered = sorted(values)
    found = {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in QUANTILES.items()}
    return {"count": len(ordered), **found}


def summarise(cycles: Sequence[Cycle]) -> dict[str, dict[str, float]]:
    """Return the distribution of each part of a cycle in ms (``steps``: a number)."""
    found = {part: distribution([1e3 * getattr(cycle, part) for cycle in cycles]) for part in COMMON}
    for part in BY_VARIANT:
        for variant in VARIANTS:
            values = [1e3 * getattr(cycle, part) for cycle in cycles if cycle.variant == variant]
            found[f"{part}, {variant}"] = distribution(values)
    found["steps"] = distribution([cycle.steps for cycle in cycles])
    return found


def one_step_of(mode: PauseMode, part: str, step: dict[str, float]) -> dict[str, float]:
    """Return the ms that one step may take: after an abort or a retraction it has prompts in it."""
    return step if part == "pause" or mode == "in_place" else dict.fromkeys(step, 1e3 * TARGET_STEP_S)


def verdicts(
    mode: PauseMode, summary: dict[str, dict[str, float]], step: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Judge a pause and a plain continue to the first token: each may take one step and 2 ms."""
    found = {}
    for part in ("pause", "first_token, plain"):
        one_step = one_step_of(mode, part, step)
        measured, limit = summary[part]["p99"], one_step["p99"] + ALLOWANCE_MS
        strict = one_step["p50"] + ALLOWANCE_MS
        found[part] = {
            "p99_ms": measured,
            "limit_ms": limit,
            "met": measured <= limit,
            "median_limit_ms": strict,
            "met_by_median_step": measured <= strict,
        }
    return found
