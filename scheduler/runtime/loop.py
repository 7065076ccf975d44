"""The scheduler's loop. One tick: receive, advance commands, schedule and execute a step, process its output,
send.

Invariants:
- The loop survives whatever a client sends or omits (I11), errors of timers, and steps that fail. If it fails
  all the same, every live request still gets its terminal message.
- It blocks in ``poll`` whenever there is nothing to run: an idle or paused engine uses no CPU.
- At pipeline depth 0 a step's output is processed in the tick that launched it; at depth 1 in the next tick.
- A launch that raises counts as a step whose output is a :class:`Failure`, processed in order; no other step
  is launched until then.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import zmq

from ...io_struct import CaesuraError, ErrorCode
from ..messaging.outbox import MAX_SENDS
from ..scheduling.step_recovery import Failure
from .guard import EngineEndsError

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

WAITING_POLL_S = 0.005
MAX_POLL_S = 3600.0
"""Longest sleep: poll takes 32 bits of milliseconds, and deadlines may be infinite."""
BACKLOG_POLL_S = 0.005


@dataclass(slots=True)
class Step:
    number: int
    batch: Any
    output: Any
    """Result of the runner, whose ``fetch`` waits for the results; or a :class:`Failure`."""
    launched_at: float


class Scheduler:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._depth = engine.steps.pipeline_depth
        self._heard = engine.executor.heard
        self.last_step_at: float | None = None
        self._poller = zmq.Poller()
        self._poller.register(engine.router.socket, zmq.POLLIN)
        for fd in (engine.wakeup.fd, *engine.shutdown.fds, *engine.executor.heard):
            self._poller.register(fd, zmq.POLLIN)

    def run(self) -> None:
        in_flight: Step | None = None
        try:
            while not self._engine.shutdown.requested or self._must_drain(in_flight):
                in_flight = self.tick(in_flight)
            if in_flight is not None and (failure := self._process_output(in_flight)) is not None:
                self._recover(in_flight, failure, None)
        except EngineEndsError as end:
            logger.critical("%s", end)
            self._answer_everything(end.error, failed=True)
            raise
        except BaseException as error:
            logger.critical("the loop has failed: the engine ends", exc_info=error)
            reason = f"the engine has failed: {type(error).__name__}: {error}"
            self._answer_everything(CaesuraError(ErrorCode.ENGINE_DIED, reason), failed=True)
            raise
        ending = CaesuraError(ErrorCode.SHUTTING_DOWN, "the engine is shutting down")
        self._answer_everything(ending, failed=False)

    def _answer_everything(self, error: CaesuraError, *, failed: bool) -> None:
        engine = self._engine
        run = engine.guard.run
        finish = engine.outputs.fail if failed else engine.outputs.abort
        run("finishing the live requests", finish, engine.live, error.message, error.code)
        run("answering the pending commands", engine.dispatcher.refuse_rest, error.message, error.code)
        for _ in range(MAX_SENDS):
            run("sending the last results", engine.outbox.deliver, engine.state.step)

    def _must_drain(self, in_flight: Step | None) -> bool:
        engine = self._engine
        has_live = len(engine.live) > sum(engine.drift.counts())
        busy = in_flight is not None or has_live or engine.outbox.has_undelivered
        return engine.shutdown.is_draining and bool(busy or engine.dispatcher.has_unanswered)

    def tick(self, in_flight: Step | None) -> Step | None:
        engine = self._engine
        run = engine.guard.run
        self.receive(self._timeout(in_flight))
        run("advancing commands", engine.commands.advance)
        run("bringing an adapter to a slot", engine.adapters.advance)
        if engine.grammars is not None and engine.grammars.has_work:
            run("compiling grammars", engine.grammars.advance)
        run("scoring", engine.dispatcher.score)
        has_failed = in_flight is not None and isinstance(in_flight.output, Failure)
        launched = self._execute() if engine.state.may_execute and not has_failed else None
        due, in_flight = (launched, None) if self._depth == 0 else (in_flight, launched)
        if due is not None and (failure := self._process_output(due)) is not None:
            self._recover(due, failure, in_flight)
            in_flight = None
        engine.outbox.deliver(engine.state.step if due is None else due.number)
        run("aborting the requests of clients that are gone", engine.dispatcher.reap)
        return in_flight

    def receive(self, timeout_s: float | None) -> None:
        """Wait for what comes, at most ``timeout_s`` seconds, and take it in."""
        engine = self._engine
        engine.heartbeat.asleep = timeout_s != 0
        timeout_ms = None if timeout_s is None else round(min(timeout_s, MAX_POLL_S) * 1000)
        events = dict(self._poller.poll(timeout_ms))
        engine.heartbeat.asleep, engine.heartbeat.ticked = False, True
        if engine.wakeup.fd in events:
            engine.wakeup.clear()
        for fd, act in self._heard.items():
            if fd in events:
                act()
        if engine.router.socket in events:
            with engine.stages.stage("receive"):
                engine.guard.run("receiving messages", self._drain_socket)
        # After the socket: messages received before the signal are still started.
        for fd in engine.shutdown.fds:
            if fd in events:
                engine.shutdown.on_readable(fd)
        if engine.router.has_backlog:
            engine.guard.run("sending queued messages", engine.router.retry)
        engine.housekeeping.timers.fire(monotonic())

    def _drain_socket(self) -> None:
        engine = self._engine
        for client, header, buffers in engine.router.receive():
            engine.guard.run("handling a message", engine.dispatcher.handle, client, header, buffers)

    def _timeout(self, in_flight: Step | None) -> float | None:
        engine = self._engine
        runnable = engine.state.may_execute and engine.batcher.has_work
        if in_flight is not None or runnable or engine.dispatcher.wants_tick:
            engine.housekeeping.busy()
            return 0
        now = monotonic()
        engine.housekeeping.idle(now)
        waits: list[float] = [engine.shutdown.left_s] if engine.shutdown.requested else []
        if engine.dispatcher.waits:
            waits.append(WAITING_POLL_S)
        if engine.router.has_backlog or engine.outbox.has_undelivered:
            waits.append(BACKLOG_POLL_S)
        if (due := engine.housekeeping.timers.next_due()) is not None:
            waits.append(max(0.0, due - now))
        return min(waits) if waits else None

    def _execute(self) -> Step | None:
        engine = self._engine
        number = engine.state.step + 1
        try:
            with engine.stages.stage("schedule"):
                batch: Any = engine.batcher.schedule()
        except Exception as error:  # noqa: BLE001  a step may fail in any way; recovery decides what to do
            engine.recovery.build_failed(Failure.of(error, number))
            return None
        engine.recovery.step_built()
        if batch is None:
            return None
        engine.state.begin_step()
        engine.stages.begin(batch.kind)
        launched_at = monotonic()
        try:
            output: Any = engine.runner.execute(batch.forward)
        except Exception as error:  # noqa: BLE001  as above
            output = Failure.of(error, number)
        return Step(number, batch, output, launched_at)

    def _process_output(self, step: Step) -> Failure | None:
        engine = self._engine
        if isinstance(step.output, Failure):
            return step.output
        try:
            output = step.output.fetch()
        except Exception as error:  # noqa: BLE001  as in _execute: device errors surface here
            return Failure.of(error, step.number)
        # At depth 1 the device began this step when it had finished the one before.
        began = max(step.launched_at, self.last_step_at or 0.0)
        self.last_step_at = monotonic()
        engine.stages.record(step.batch.kind, self.last_step_at - began)
        with engine.stages.stage("process"):
            with engine.recovery.output_processing(step.batch, step.number):
                engine.outputs.record(step.batch, output)
            with engine.recovery.output_processing(step.batch, step.number):
                engine.batcher.complete_step(step.batch, self.last_step_at - began)
            engine.outbox.deliver(step.number)
        engine.guard.run("sampling memory usage", engine.history.sample)
        return None

    def _recover(self, step: Step, failure: Failure, later: Step | None) -> None:
        if later is not None and not isinstance(later.output, Failure):
            with suppress(Exception):  # its results are dropped; it must only have left the device
                later.output.fetch()
        self._engine.recovery.step_failed(step.batch, failure, None if later is None else later.batch)
