"""The commands that take time: one at a time in the order of arrival, advanced between steps.

Invariants:
- Commands are :data:`Operation` generators. One that waits for the engine to change steps aside for the next.
- Every command gets exactly one answer. One that failed gives unused device memory back before it is answered.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from ...io_struct import (
    BeginWeightUpdateReqInput,
    CaesuraError,
    ControlRequest,
    ErrorCode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from ..commands.handlers import Commands
from ..commands.lifecycle import Lifecycle, Operation, Wait
from ..guard import defect
from ..memory.device_cache import DeviceCache
from .answers import Answers
from .replies import Replies

logger = logging.getLogger(__name__)

SLICE_S = 0.010
"""Longest run of an operation between two looks at the inbox."""
MAX_PENDING_COMMANDS = 1024
"""Commands under way, queued or waiting for the engine to change."""

_EXCLUSIVE = (
    BeginWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)


@dataclass(slots=True)
class _Running:
    """An operation under way."""

    message: ControlRequest
    operation: Operation
    has_begun: bool = False


class CommandQueue:
    """Starts, advances and answers commands."""

    def __init__(
        self,
        *,
        handlers: Commands,
        lifecycle: Lifecycle,
        answers: Answers,
        replies: Replies,
        device_cache: DeviceCache,
        check_ledger: Callable[[], None] | None,
    ) -> None:
        """``check_ledger`` runs after every command. None: not at all."""
        self._handlers = handlers
        self._lifecycle = lifecycle
        self._answers = answers
        self._replies = replies
        self._device_cache = device_cache
        self._check_ledger = check_ledger
        self._queue: deque[_Running] = deque()
        self._stepped_aside: list[_Running] = []
        self._outside = False

    @property
    def is_busy(self) -> bool:
        """Some command is under way, queued behind one, or waits for the engine to change."""
        return bool(self._queue or self._stepped_aside)

    @property
    def wants_tick(self) -> bool:
        """Some command can go on at once: it waits for no thread."""
        return bool(self._queue) and not self._outside

    @property
    def has_stepped_aside(self) -> bool:
        """Some command waits for the engine to change, or for its deadline."""
        return bool(self._stepped_aside)

    @property
    def defers_lease(self) -> bool:
        """The lease of the pause must not expire now: a command of its owner is a sign of life, and one that has begun, whoever
        sent it, is not interrupted."""
        if self._queue and self._queue[0].has_begun:
            return True
        owner = self._lifecycle.pause_owner
        return any(
            running.message.owner == owner and self._answers.is_awaited(running.message.id)
            for running in (*self._queue, *self._stepped_aside)
        )

    def message_ids(self) -> list[str]:
        """Of every command that is not answered yet."""
        return [running.message.id for running in (*self._queue, *self._stepped_aside)]

    def add(self, client: bytes, message: ControlRequest, buffers: list[memoryview]) -> None:
        """Queue a command; nothing of it is done before its turn.

        Raises:
            CaesuraError: ``queue_full``; ``busy``, where only one of its kind may be under way; what its handler refuses.
        """
        self._refuse_when_full()
        if isinstance(message, _EXCLUSIVE):
            self._refuse_when_busy()
        self._queue.append(_Running(message, self._handlers.operation(client, message, buffers)))

    def advance(self) -> None:
        """Run the oldest command for at most a slice, and look at those that have stepped aside."""
        for running in self._stepped_aside[:]:
            if self._step(running) is not Wait.CHANGE:
                self._stepped_aside.remove(running)
        started, self._outside = perf_counter(), False
        while self._queue:
            wait = self._step(self._queue[0])
            if wait is None:
                self._queue.popleft()
            elif wait is Wait.CHANGE:
                self._stepped_aside.append(self._queue.popleft())
            self._outside = wait is Wait.OUTSIDE
            if wait in (Wait.STEP, Wait.OUTSIDE) or perf_counter() - started > SLICE_S:
                return

    def refuse_rest(self, message: str) -> None:
        """Shutdown: every command that is still under way ends with an error."""
        for running in [*self._stepped_aside, *self._queue]:
            try:
                running.operation.close()
            except Exception as error:  # the others must be answered, too
                logger.error("%s has left something behind", type(running.message).__name__, exc_info=error)
            refusal = CaesuraError(ErrorCode.SHUTTING_DOWN, message)
            self._replies.answer(running.message.id, refusal.to_reply(running.message.id))
        self._stepped_aside, self._queue = [], deque()

    def _step(self, running: _Running) -> Wait | None:
        """Advance an operation; None when it has ended and is answered."""
        message_id, name = running.message.id, type(running.message).__name__
        weights, failed = self._lifecycle.weights, False
        running.has_begun = True
        try:
            return next(running.operation)
        except StopIteration as stop:
            answer = stop.value
        except CaesuraError as error:
            answer, failed = error.to_reply(message_id), error.code == ErrorCode.OUT_OF_MEMORY
        except Exception as error:  # noqa: BLE001  a defect, whatever it is: its caller must hear, the loop must go on
            answer, failed = defect(name, message_id, error), True
        if failed or self._lifecycle.weights == "poisoned" != weights:
            self._device_cache.after_failure(name)
        self._replies.answer(message_id, answer)
        self._lifecycle.renew_lease(running.message.owner)  # a long command was a sign of life while it ran
        if self._check_ledger is not None:
            self._check_ledger()
        return None

    def _refuse_when_full(self) -> None:
        pending = len(self._queue) + len(self._stepped_aside)
        if pending >= MAX_PENDING_COMMANDS:
            raise CaesuraError(
                ErrorCode.QUEUE_FULL,
                f"{pending} commands are pending, the limit is {MAX_PENDING_COMMANDS}",
                waiting=pending,
                limit=MAX_PENDING_COMMANDS,
            )

    def _refuse_when_busy(self) -> None:
        for running in self._queue:
            if isinstance(running.message, _EXCLUSIVE):
                name = type(running.message).__name__
                raise CaesuraError(ErrorCode.BUSY, f"{name} is running", running=name, id=running.message.id)
