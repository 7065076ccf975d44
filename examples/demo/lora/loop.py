"""The run: a base is warmed up, then each adapter learns in a loop of its own, all on one engine.

Invariants:
- The engine is never paused. An adapter is replaced under its name between two steps, whatever the other
  loops are doing.
- Loops share the engine and nothing else: each has a trainer process, a pool of prompts and a history.
"""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

from caesura.io_struct import LoadAdapterReqOutput

from ..engine import Engine, started
from ..loop import PATIENCE_S, Loop, StalledError, follow_warmup
from ..messages import Connect, Initialised, StepDone
from ..rollout import Sampled, ScoredGroup
from ..settings import LoraSettings
from ..trainer import TrainerProcess
from .history import AdapterHistory, LoraHistory, SwapRecord
from .trainer import serve_adapter

Say = Callable[[str], None]
"""Tells whoever looks on."""


def run(settings: LoraSettings, history: LoraHistory, say: Say) -> None:
    """Run everything and fill ``history``."""
    began, base = time.perf_counter(), settings.out_dir / "model"
    say(f"supervised warm-up of the base: {', '.join(settings.targets)}, each as often")
    with TrainerProcess(settings) as trainer:
        history.parameters = trainer.receive(Initialised).parameters
        done = follow_warmup(trainer, history, lambda: None)
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(done.path, base)
    say(f"starting the engine, and a trainer for each of {len(settings.targets)} adapters")
    with ExitStack() as stack:
        trainers = {
            target: stack.enter_context(
                TrainerProcess(settings.of(target), serve_adapter, f"trainer-{target}")
            )
            for target in settings.targets
        }
        launched = time.perf_counter()
        client = stack.enter_context(started(settings, str(base)))
        history.engine_start_s = time.perf_counter() - launched
        for trainer in trainers.values():
            stack.callback(trainer.close)  # it takes leave of an engine that is still there
            trainer.send(Connect(endpoint=client.endpoint, base=str(base)))
        for target, trainer in trainers.items():
            history.adapter_parameters = trainer.receive(Initialised).parameters
            history.adapters[target] = AdapterHistory()
        say("reinforcement learning")
        learn(client, trainers, settings, history, say)
    history.wall_s = time.perf_counter() - began


def learn(
    client: Engine,
    trainers: dict[str, TrainerProcess],
    settings: LoraSettings,
    history: LoraHistory,
    say: Say,
) -> None:
    """Run the loops of all adapters, each in a thread; raise what the first one raises."""
    origin, failed = time.perf_counter(), threading.Event()
    first_tokens = client.status(timeout=PATIENCE_S).generated_tokens

    def changed() -> None:
        if failed.is_set():
            raise StalledError("another adapter's loop has failed")

    with ThreadPoolExecutor(len(trainers), thread_name_prefix="adapter") as threads:
        loops = [
            AdapterLoop(
                client,
                trainer,
                settings.of(target),
                history.adapters[target],
                changed,
                Sampled(target, target),
                origin,
                say,
            )
            for target, trainer in trainers.items()
        ]
        futures = [threads.submit(loop.run) for loop in loops]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            failed.set()
            raise
    history.tokens = client.status(timeout=PATIENCE_S).generated_tokens - first_tokens
    history.rl_s = time.perf_counter() - origin


@dataclass
class AdapterLoop(Loop[SwapRecord]):
    """An adapter learns: it is replaced by each update, and samples in mid-answer go on with the new one."""

    history: AdapterHistory
    origin: float
    """Clock when the loops began, in seconds."""
    say: Say

    def _began_learning(self) -> None:
        """Do nothing: the clock began for all loops at once."""

    def _send(self, version: int, *, flush_cache: bool) -> LoadAdapterReqOutput:
        reply = super()._send(version, flush_cache=flush_cache)
        assert isinstance(reply, LoadAdapterReqOutput)
        self.policy.updates[reply.adapter_epoch] = version
        return reply

    def _push(self, update: int, groups: list[ScoredGroup], wait_s: float, done: StepDone) -> SwapRecord:
        """Replace the adapter while all others go on; then the record of this turn."""
        self._pool.pump()
        began = time.perf_counter()
        loaded = self._send(update, flush_cache=False)
        ended = time.perf_counter()
        return SwapRecord(
            **self._measured(update, groups, wait_s, done),
            at_s=ended - self.origin,
            update_ms=1e3 * (ended - began),
            changed_tensors=loaded.changed_tensors,
            adapter_epoch=loaded.adapter_epoch,
            norm=loaded.norm,
            switched=loaded.switched,
        )

    def _finish_evaluation(self) -> None:
        if self._evaluation is None:
            return
        super()._finish_evaluation()
        last, target = self.history.evals[-1], self.policy.target
        self.say(f"{target:10} update {last.update:3d}  held-out reward {last.reward:.3f}")
