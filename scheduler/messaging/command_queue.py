"""The queue of commands: they run one at a time in the order of arrival, and are advanced between steps.

- One that waits for the engine to change *steps aside*: the next command runs, and this one is checked in
  every tick. When it has work again it goes to the head of the queue, behind a command there that has begun.
- A command that must not begin yet (it would change weights that are being sent) holds back those behind it.
- Every command gets exactly one answer. After a failure the device cache is emptied before the answer is
  sent.
"""

import logging
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..control.command_table import operation
from ..control.operations import Operation, Wait, slice_s
from ..runtime.guard import defect

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

MAX_PENDING_COMMANDS = 1024

_EXCLUSIVE = (
    wire.BeginWeightUpdateReqInput,
    wire.ReleaseMemoryOccupationReqInput,
    wire.ResumeMemoryOccupationReqInput,
    wire.RollbackWeightsReqInput,
    wire.UpdateWeightFromDiskReqInput,
)


@dataclass(slots=True)
class _PendingCommand:
    message: wire.ControlRequest
    operation: Operation
    has_begun: bool = False


class CommandQueue:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._queue: deque[_PendingCommand] = deque()
        self._stepped_aside: list[_PendingCommand] = []
        self._waits_for_thread = False
        self._advanced_at = perf_counter()

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._stepped_aside)

    @property
    def wants_tick(self) -> bool:
        return bool(self._queue) and not self._waits_for_thread

    @property
    def has_stepped_aside(self) -> bool:
        return bool(self._stepped_aside)

    @property
    def defers_lease(self) -> bool:
        """True if the pause lease must not expire now: its owner waits for a command, or any has begun."""
        engine = self._engine
        if self._queue and self._queue[0].has_begun:
            return True
        owner, pending = engine.state.ownership.owner, (*self._queue, *self._stepped_aside)
        exchanges = [engine.answers.get(each.message.id) for each in pending if each.message.owner == owner]
        return any(exchange is not None and exchange.clients for exchange in exchanges)

    def message_ids(self) -> list[str]:
        return [command.message.id for command in (*self._queue, *self._stepped_aside)]

    def add(self, client: bytes, message: wire.ControlRequest, buffers: list[memoryview]) -> None:
        """Queue a command, or raise ``queue_full``, ``busy``, or what its function refuses at once."""
        pending, limit = len(self._queue) + len(self._stepped_aside), MAX_PENDING_COMMANDS
        if pending >= limit:
            reason = f"{pending} commands are pending, the limit is {limit}"
            raise CaesuraError(ErrorCode.QUEUE_FULL, reason, waiting=pending, limit=limit)
        for command in self._queue if isinstance(message, _EXCLUSIVE) else ():
            if isinstance(command.message, _EXCLUSIVE):
                name = type(command.message).__name__
                raise CaesuraError(ErrorCode.BUSY, f"{name} is running", running=name, id=command.message.id)
        self._queue.append(_PendingCommand(message, operation(self._engine, client, message, buffers)))

    def advance(self) -> None:
        for command in self._stepped_aside[:]:
            wait = self._advance_operation(command)
            if wait is not Wait.CHANGE:
                self._stepped_aside.remove(command)
            if wait not in (None, Wait.CHANGE):
                self._queue.insert(int(bool(self._queue) and self._queue[0].has_begun), command)
        before, started, self._waits_for_thread = self._advanced_at, perf_counter(), False
        self._advanced_at = started
        while self._queue:
            if not self._queue[0].has_begun and self._engine.sending.holds_back(self._queue[0].message):
                self._waits_for_thread = True
                return
            wait = self._advance_operation(self._queue[0])
            if wait is None:
                self._queue.popleft()
            elif wait is Wait.CHANGE:
                self._stepped_aside.append(self._queue.popleft())
            self._waits_for_thread = wait is Wait.THREAD
            if wait in (Wait.STEP, Wait.THREAD) or perf_counter() - started > slice_s(started - before):
                return

    def refuse_rest(self, message: str, code: ErrorCode) -> None:
        for command in [*self._stepped_aside, *self._queue]:
            try:
                command.operation.close()
            except Exception as error:  # the other commands must be answered, too
                logger.error("%s could not clean up", type(command.message).__name__, exc_info=error)
            refusal = CaesuraError(code, message)
            self._engine.replies.answer(command.message.id, refusal.to_reply(command.message.id))
        self._stepped_aside, self._queue = [], deque()

    def _advance_operation(self, command: _PendingCommand) -> Wait | None:
        engine = self._engine
        message_id, name = command.message.id, type(command.message).__name__
        weights, failed = engine.state.weights, False
        command.has_begun = True
        try:
            return next(command.operation)
        except StopIteration as stop:
            answer = stop.value
        except CaesuraError as error:
            answer, failed = error.to_reply(message_id), error.code == ErrorCode.OUT_OF_MEMORY
        # An unforeseen error must be answered, and the loop must go on.
        except Exception as error:  # noqa: BLE001
            answer, failed = defect(name, message_id, error), True
        if failed or engine.state.weights == "poisoned" != weights:
            engine.device_cache.after_failure(name)
        engine.replies.answer(message_id, answer)
        engine.state.renew_lease(command.message.owner)  # the command's time does not count as silence
        if engine.config.check_ledger:
            engine.cache.check()
        return None
