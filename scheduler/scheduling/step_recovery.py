"""Recovery from a failed step: which requests end, and which tokens are computed again.

Out of memory is no request's fault: the step is rolled back, and computed again in steps of half the size
(decoding rows first). Only a step of a single token or sample that fails twice ends its request. Any other
failure, while a step is built, launched, fetched or processed, ends the requests of its step.

- A step's output is recorded only if all of it has arrived. One that is computed again writes the same KV
  slots, and its noise is a function of position, so it samples the same tokens.
- A step that was launched after a failed one is rolled back with it: its decoding rows read the failed step's
  tokens.
- The device cache is emptied once per failure, when nothing refers to the step's tensors any more.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...io_struct import ErrorCode, StepFailures
from ..memory.device_memory import is_out_of_memory

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

MAX_BUILDS = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception's message; the exception itself would keep the step's tensors alive."""

    message: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception, step: int) -> "Failure":
        failure = cls(f"{type(error).__name__}: {error}", is_out_of_memory(error))
        if failure.out_of_memory:
            logger.warning("step %d ran out of memory: %s", step, failure.message)
        else:
            logger.error("step %d failed", step, exc_info=error)
        return failure


class Recovery:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._failed = self._retried = self._splits = self._failed_builds = 0

    def counts(self) -> StepFailures:
        return StepFailures(
            failed=self._failed,
            retried=self._retried,
            splits=self._splits,
            token_limit=self._engine.batcher.step_limit,
        )

    def step_built(self) -> None:
        self._failed_builds = 0

    def build_failed(self, failure: Failure) -> None:
        self._failed += 1
        self._failed_builds += 1
        if self._failed_builds == MAX_BUILDS:
            self._failed_builds = 0
            self._fail(self._engine.batcher.schedule_failure_candidates(), failure)
        self._engine.device_cache.after_failure(failure.message)

    def step_failed(self, batch: Any, failure: Failure, later: Any | None) -> None:
        self._failed += 1
        if later is not None:
            self._engine.batcher.roll_back_step(later)
            self._retried += 1
        self._engine.batcher.roll_back_step(batch)
        if failure.out_of_memory and self._engine.batcher.halve(batch):
            self._splits += 1
            self._retried += 1
        else:
            self._fail(self._engine.batcher.requests_of(batch), failure)
        self._engine.device_cache.after_failure(failure.message)
        self._engine.batcher.restore(self._engine.runner)

    @contextmanager
    def output_processing(self, batch: Any, number: int) -> Iterator[None]:
        """Process the output of ``batch`` in the block; an exception ends its requests."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  an unforeseen error: the other requests must go on
            failure = Failure.of(error, number)
        else:
            return
        self._failed += 1
        self._fail(self._engine.batcher.requests_of(batch), failure)
        self._engine.device_cache.after_failure(failure.message)

    def _fail(self, requests: list[Any], failure: Failure) -> None:
        if failure.out_of_memory:
            message = f"out of memory: {failure.message}"
            self._engine.outputs.fail(requests, message, ErrorCode.OUT_OF_MEMORY)
        else:
            self._engine.outputs.fail(requests, f"the step failed: {failure.message}")
