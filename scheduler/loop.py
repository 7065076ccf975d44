"""The tick: hear, advance commands, choose, launch, answer.

Invariants:
- Nothing a client sends or omits stops the loop (I11), nor does a step that fails (``failure.py``).
- The loop blocks in ``poll`` whenever there is nothing to run, paused included: an idle or paused engine uses no CPU.
- What a step launched is passed from tick to tick, not stored: at pipeline depth 0 it is answered in the same tick, at
  depth 1 in the next one, while the device works on its successor. A launch that fails is a step whose results are the
  failure: it is answered when it is due, after the one before it, and nothing is launched until then.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import zmq

from .background import Wakeup
from .batching import Batcher, ScheduledBatch
from .channel import Router
from .device.memory import empty_device_cache_with_report
from .dispatch import Dispatcher
from .failure import Failure, Recovery
from .forward import ForwardOutput, Runner
from .lifecycle import Lifecycle
from .observability.memory_history import MemoryHistory
from .observability.stage_profiler import StageProfiler
from .observability.watchdog import Heartbeat
from .results import Results
from .stopping import Shutdown
from .updates import WeightUpdates

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""How often those who must be alive are looked at: clients with live requests, owners of shared memory."""
PARKED_POLL_S = 0.005
"""How often an operation that waits for idleness is looked at when nothing else happens."""
MAX_POLL_S = 3600.0
"""Longest sleep: poll counts milliseconds in 32 bits, deadlines may be further away or infinite."""
BACKLOG_POLL_S = 0.005
"""How often a client that could not take everything is tried again."""


@dataclass(slots=True)
class Step:
    """A launched step."""

    number: int
    """Counts launches from 1."""
    batch: ScheduledBatch
    output: ForwardOutput | Failure
    launched_at: float

    @property
    def is_lost(self) -> bool:
        """Known to have failed already."""
        return isinstance(self.output, Failure)


class Scheduler:
    """The engine's main loop over its parts."""

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: Dispatcher,
        lifecycle: Lifecycle,
        batcher: Batcher,
        results: Results,
        runner: Runner,
        recovery: Recovery,
        updates: WeightUpdates,
        history: MemoryHistory,
        stages: StageProfiler,
        device_module: Any,
        pipeline_depth: int,
        idle_empty_s: float,
        wakeup: Wakeup,
        shutdown: Shutdown,
        heartbeat: Heartbeat,
    ) -> None:
        """``shutdown`` says when to end, ``heartbeat`` is told of every tick."""
        self._router = router
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._results = results
        self._runner = runner
        self._recovery = recovery
        self._updates = updates
        self._history = history
        self._stages = stages
        self._device_module = device_module
        self._depth = pipeline_depth
        self._idle_empty_s = idle_empty_s
        self._wakeup = wakeup
        self._shutdown = shutdown
        self._heartbeat = heartbeat
        self._idle_since: float | None = None
        self._next_keepalive = 0.0
        self.last_step_at: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(router.socket, zmq.POLLIN)
        for fd in (wakeup.fd, *shutdown.fds):
            self._poller.register(fd, zmq.POLLIN)

    def run(self) -> None:
        """Until told to stop; then every live request ends and every client is told."""
        ongoing: Step | None = None
        while not self._shutdown.requested or self._drains(ongoing):
            ongoing = self.tick(ongoing)
        self.end(ongoing)

    def end(self, ongoing: Step | None) -> None:
        """Every request and command that is left gets its terminal message."""
        if ongoing is not None and (failure := self._answer(ongoing)) is not None:
            self._discard(ongoing, failure, None)
        self._results.abort_all("the engine is shutting down")
        self._dispatcher.refuse_rest("the engine is shutting down")
        self._results.deliver(self._lifecycle.step)

    def _drains(self, ongoing: Step | None) -> bool:
        """Whether the end waits for something that is under way."""
        busy = ongoing is not None or self._results.live or self._results.has_undelivered
        return self._shutdown.is_draining and bool(busy or self._dispatcher.has_work)

    def tick(self, ongoing: Step | None) -> Step | None:
        """One turn; returns the step that is still in flight, at depth 1."""
        self._hear(self._timeout(ongoing))
        self._dispatcher.advance()
        self._dispatcher.score()
        may_launch = self._lifecycle.may_launch and not (ongoing is not None and ongoing.is_lost)
        launched = self._launch() if may_launch else None
        due, ongoing = (launched, None) if self._depth == 0 else (ongoing, launched)
        if due is not None and (failure := self._answer(due)) is not None:
            self._discard(due, failure, ongoing)
            ongoing = None
        self._results.deliver(self._lifecycle.step if due is None else due.number)
        self._dispatcher.reap()
        return ongoing

    def _hear(self, timeout_s: float | None) -> None:
        """Drain the inbox; block up to ``timeout_s`` for it (None: until something comes)."""
        blocks = timeout_s != 0
        if blocks:
            self._heartbeat.asleep = True
        events = dict(
            self._poller.poll(None if timeout_s is None else round(min(timeout_s, MAX_POLL_S) * 1000))
        )
        if blocks:
            self._heartbeat.asleep = False
        self._heartbeat.ticked = True
        if self._wakeup.fd in events:
            self._wakeup.clear()
        if self._router.socket in events:
            with self._stages.stage("receive"):
                for client, header, buffers in self._router.receive():
                    self._dispatcher.handle(client, header, buffers)
        for fd in self._shutdown.fds:  # what came before the end is still begun
            if fd in events:
                self._shutdown.heard(fd)
        if self._router.has_backlog:
            self._router.retry()
        self._on_timers()

    def _timeout(self, ongoing: Step | None) -> float | None:
        """Seconds to block: 0 with work at hand, else until the next timer; None without any."""
        runnable = self._lifecycle.may_launch and self._batcher.has_work
        if ongoing is not None or runnable or self._dispatcher.wants_tick:
            self._idle_since = None
            return 0
        now = monotonic()
        timers: list[float] = [self._shutdown.left_s] if self._shutdown.requested else []
        if self._dispatcher.has_parked:
            timers.append(PARKED_POLL_S)
        if self._router.has_backlog or self._results.has_undelivered:
            timers.append(BACKLOG_POLL_S)
        if self._results.live or self._updates.keeps_memory:
            timers.append(max(0.0, self._next_keepalive - now))
        if self._updates.deadline is not None:
            timers.append(max(0.0, self._updates.deadline - now))
        lease_left = self._lifecycle.lease_left_s
        if lease_left is not None and not self._dispatcher.is_busy:
            timers.append(max(0.0, lease_left))
        if self._idle_since is None:
            self._idle_since = now
        if self._idle_since != float("inf"):
            timers.append(max(0.0, self._idle_since + self._idle_empty_s - now))
        return min(timers) if timers else None

    def _on_timers(self) -> None:
        now = monotonic()
        if now >= self._next_keepalive and (self._results.live or self._updates.keeps_memory):
            self._next_keepalive = now + KEEPALIVE_S
            self._router.keepalive({r.client for r in self._results.live.values()}, self._lifecycle.step)
            self._updates.collect()
        if self._updates.deadline is not None and now >= self._updates.deadline:
            self._updates.expire()
        lease_left = self._lifecycle.lease_left_s
        if lease_left is not None and lease_left <= 0 and not self._dispatcher.is_busy:
            if self._lifecycle.lease_expiry == "continue":
                self._updates.expire()  # a session left open is aborted first
            self._lifecycle.expire_lease()
        if self._idle_since is not None and now >= self._idle_since + self._idle_empty_s:
            self._idle_since = float("inf")  # once per idle period
            report = empty_device_cache_with_report(self._device_module)
            logger.debug("%s", report.describe("idle"))
            self._history.note("idle", returned=report.freed)

    def _launch(self) -> Step | None:
        number = self._lifecycle.step + 1
        try:
            with self._stages.stage("schedule"):
                batch = self._batcher.choose()
        except Exception as error:  # noqa: BLE001  a step may fail in any way, and then the next one must not
            self._recovery.not_built(Failure.of(error, number))
            return None
        self._recovery.built()
        if batch is None:
            return None
        self._lifecycle.step = number
        self._stages.begin(_kind(batch))
        launched_at = monotonic()
        output: ForwardOutput | Failure
        try:
            output = self._runner.launch(batch.forward)
        except Exception as error:  # noqa: BLE001  as above
            output = Failure.of(error, number)
        return Step(number, batch, output, launched_at)

    def _answer(self, step: Step) -> Failure | None:
        """Take the results of a step in; a failure means that they are lost."""
        if isinstance(step.output, Failure):
            return step.output
        try:
            output = step.output.fetch()
        except Exception as error:  # noqa: BLE001  as in _launch: device errors surface here
            return Failure.of(error, step.number)
        # At depth 1 the device began with this step when it had done the one before.
        began = max(step.launched_at, self.last_step_at or 0.0)
        self.last_step_at = monotonic()
        self._stages.record(_kind(step.batch), self.last_step_at - began)
        with self._stages.stage("process"):
            with self._recovery.taking_in(step.batch, step.number):
                self._results.record(step.batch, output)
            with self._recovery.taking_in(step.batch, step.number):
                self._batcher.landed(step.batch, self.last_step_at - began)
            self._results.deliver(step.number)
        self._history.sample()
        return None

    def _discard(self, step: Step, failure: Failure, later: Step | None) -> None:
        """The results of ``step`` are lost, and with them those of the step that was launched after it."""
        if later is not None and not isinstance(later.output, Failure):
            with suppress(Exception):  # only that it is over, and its memory free, matters
                later.output.fetch()
        self._recovery.lost(step.batch, failure, None if later is None else later.batch)


def _kind(batch: ScheduledBatch) -> str:
    """The stage that a step counts as: with any prompt tokens in it, prefill."""
    return "decode" if batch.forward.num_decode == len(batch.slots) else "prefill"
