"""A loop: rollouts to the trainer, weights to the engine, until the last update.

One turn of :class:`InPlaceLoop`, pipelined (the engine samples all the time; the trainer steps on what came
back meanwhile):

    take a batch -> trainer steps, pool pumps -> pause in place -> trainer sends weights -> continue ->
    evaluate at times

Invariants:
- Weights are pushed only while the engine is paused, with requests in mid-answer; those keep their KV, and
  their spans name both versions.
- An evaluation runs under one version: the next push waits for it.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic

from caesura.io_struct import LoadAdapterReqOutput, WeightUpdateReqOutput

from . import task
from .engine import Engine, started
from .history import MB, EvalRecord, History, LoopHistory, RunHistory, TurnT, UpdateRecord
from .messages import (
    Connect,
    Initialised,
    Push,
    Pushed,
    StepDone,
    TrainBatch,
    WarmupDone,
    WarmupProgress,
)
from .rollout import Evaluation, RolloutPool, Sampled, ScoredGroup, exact_share
from .settings import Settings
from .trainer import TrainerError, TrainerProcess

POLL_S = 0.004
PATIENCE_S = 120.0
"""Seconds that a control call or a batch may take; the engine's death is noticed at once."""
SMALL_BATCH_AFTER_S = 3.0
"""Late in a run few groups differ in reward; after this long a batch may be a quarter of its size."""

Notify = Callable[[], None]
"""Called after every change of the history."""


class StalledError(RuntimeError):
    """No batch came together, although the engine answers."""


def run(settings: Settings, history: History, notify: Notify) -> None:
    """Run everything and fill ``history``."""
    began = time.perf_counter()
    history.phase = "starting trainer"
    notify()
    with TrainerProcess(settings) as trainer:
        initial = trainer.receive(Initialised)
        history.parameters = initial.parameters
        history.phase = "starting engine"
        notify()
        launched = time.perf_counter()
        engine = started(settings, initial.path)
        with engine as client, closing(trainer):  # the trainer takes leave of an engine that is still there
            history.engine_start_s = time.perf_counter() - launched
            history.phase = "supervised warm-up"
            follow_warmup(trainer, history, notify)
            trainer.send(Connect(endpoint=client.endpoint))
            InPlaceLoop(client, trainer, settings, history, notify, Sampled()).run()
    history.wall_s = time.perf_counter() - began


def follow_warmup(trainer: TrainerProcess, history: RunHistory, notify: Notify) -> WarmupDone:
    """Record the supervised steps until the policy is ready."""
    while True:
        match trainer.receive_any():
            case WarmupProgress() as progress:
                history.warmup.append(progress)
            case WarmupDone() as done:
                history.warmup_s = done.seconds
                return done
            case message:
                raise TrainerError(f"{type(message).__name__} during the warm-up")
        notify()


@dataclass
class Loop(Generic[TurnT]):
    """Reinforcement learning on a running engine, from version 0.

    A subclass says how weights get into the engine.
    """

    client: Engine
    trainer: TrainerProcess
    settings: Settings
    history: LoopHistory[TurnT]
    notify: Notify
    policy: Sampled

    def __post_init__(self) -> None:
        history = self.history
        self._pool = RolloutPool(self.client, self.settings, history.ledger, self.policy, history.counts)
        self._words = task.held_out_words(self.settings.held_out_prompts, self.settings.seed)
        self._evaluation: Evaluation | None = None

    def run(self) -> None:
        """Run all updates and evaluations; end with nothing in flight."""
        history, settings = self.history, self.settings
        self._send(0, flush_cache=True)
        history.phase = "reinforcement learning"
        self._pool.pump()
        self._evaluate(0, at_s=0.0)
        self._finish_evaluation()
        self._began_learning()
        for update in range(1, settings.updates + 1):
            groups, wait_s = self._collect(update)
            step = self._train(update, groups)
            self._finish_evaluation()
            record = self._push(update, groups, wait_s, step)
            history.updates.append(record)
            history.exemplar = self._pool.exemplar
            self.notify()
            if update % settings.eval_every == 0 or update == settings.updates:
                self._evaluate(update, at_s=record.at_s)
        history.phase = "last evaluation"
        self._finish_evaluation()
        self._pool.drain()
        history.phase = "done"
        self.notify()

    @abstractmethod
    def _began_learning(self) -> None:
        """Begin to measure: the first evaluation has ended."""

    @abstractmethod
    def _push(self, update: int, groups: list[ScoredGroup], wait_s: float, done: StepDone) -> TurnT:
        """Bring the trainer's policy into the engine as ``update``; then the record of this turn."""

    def _collect(self, update: int) -> tuple[list[ScoredGroup], float]:
        """Return a batch for ``update``, and the seconds that the trainer waited for it."""
        began = time.perf_counter()
        wanted = self.settings.groups_per_update
        oldest = update - 1 - self.settings.max_lag
        while True:
            self._pool.pump()
            self._pool.discard_older_than(oldest)
            waited = time.perf_counter() - began
            enough = wanted if waited < SMALL_BATCH_AFTER_S else max(wanted // 4, 1)
            if self._pool.ready >= enough:
                return self._pool.take(wanted), waited
            if waited > PATIENCE_S:
                raise StalledError(f"only {self._pool.ready} of {wanted} groups came back in {waited:.0f} s")
            self.trainer.poll(POLL_S)

    def _train(self, update: int, groups: list[ScoredGroup]) -> StepDone:
        """Run the trainer's step with the pool kept full meanwhile."""
        self.trainer.send(TrainBatch(update=update, groups=[group.to_message() for group in groups]))
        while not self.trainer.poll(POLL_S):
            self._pool.pump()
        return self.trainer.receive(StepDone)

    def _measured(
        self, update: int, groups: list[ScoredGroup], wait_s: float, done: StepDone
    ) -> dict[str, Any]:
        """Return the fields of a turn that both kinds of loop have."""
        scored = self._pool.scored_since() or groups
        return {
            "update": update,
            "train_exact": sum(group.exact for group in scored) / len(scored),
            "train_reward": sum(group.reward for group in scored) / len(scored),
            "lag": sum(update - 1 - group.first_version for group in groups) / len(groups),
            "samples": sum(len(group.samples) for group in groups),
            "wait_s": wait_s,
            "train_s": done.train_s,
            "verify_s": done.verify_s,
            "save_s": done.save_s,
            "step": done.step,
            "gap": done.gap,
        }

    def _send(self, version: int, *, flush_cache: bool) -> WeightUpdateReqOutput | LoadAdapterReqOutput:
        """Have the trainer bring its policy into the engine, and wait for it."""
        try:
            self.trainer.send(Push(version=version, flush_cache=flush_cache))
            return self.trainer.receive(Pushed).reply
        except TrainerError:
            self.client.status(timeout=PATIENCE_S)  # raises where the engine is gone: then that is the reason
            raise

    def _evaluate(self, update: int, at_s: float) -> None:
        """Begin the held-out evaluation of the version that serves now."""
        self._evaluation_at_s = at_s
        self._evaluation = Evaluation.start(self.client, self._pool.ledger, self.policy, self._words, update)

    def _finish_evaluation(self) -> None:
        """Wait for the evaluation that runs, if one does, with the pool kept full meanwhile."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is None:
            return
        while not evaluation.done():
            self._pool.pump()
            time.sleep(POLL_S)
        answers = evaluation.answers()
        reward = exact_share(answers, self.policy.target)
        self.history.evals.append(EvalRecord(evaluation.version, self._evaluation_at_s, reward, answers))
        self.notify()


@dataclass
class InPlaceLoop(Loop[UpdateRecord]):
    """The weights themselves learn: the engine is paused in place for each update."""

    history: History

    def _began_learning(self) -> None:
        self._began = self._last_at = time.perf_counter()
        self._first_tokens = self._last_tokens = self.client.status(timeout=PATIENCE_S).generated_tokens

    def _push(self, update: int, groups: list[ScoredGroup], wait_s: float, done: StepDone) -> UpdateRecord:
        """Pause in place, update, continue; then the record of this turn."""
        self._pool.pump()
        status = self.client.status(timeout=PATIENCE_S)
        times = [time.perf_counter()]
        paused = self.client.pause("in_place", timeout=PATIENCE_S)
        times.append(time.perf_counter())
        updated = self._send(update, flush_cache=False)
        assert isinstance(updated, WeightUpdateReqOutput)
        times.append(time.perf_counter())
        resumed = self.client.continue_generation(timeout=PATIENCE_S)
        times.append(time.perf_counter())
        pause_ms, update_ms, continue_ms = (1e3 * (after - before) for before, after in pairwise(times))
        elapsed, self._last_at = times[-1] - self._last_at, times[-1]
        tokens, self._last_tokens = status.generated_tokens - self._last_tokens, status.generated_tokens
        self.history.tokens = self._last_tokens - self._first_tokens
        self.history.rl_s = self._last_at - self._began
        return UpdateRecord(
            **self._measured(update, groups, wait_s, done),
            at_s=self.history.rl_s,
            pause_ms=pause_ms,
            update_ms=update_ms,
            continue_ms=continue_ms,
            stages=updated.stages,
            held_requests=paused.held_requests,
            waiting_requests=paused.waiting_requests,
            changed_tensors=updated.changed_tensors,
            reserved_running_mb=status.device_memory.reserved / MB,
            reserved_before_mb=(resumed.reserved_before or 0) / MB,
            reserved_after_mb=(resumed.reserved_after or 0) / MB,
            tokens_per_s=tokens / elapsed,
        )
