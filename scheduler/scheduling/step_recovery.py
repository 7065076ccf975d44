"""Recovery from a failed step: which requests end, and which tokens are computed again.

Out of memory is no request's fault: the step is rolled back, and computed again in steps of half the size
(decoding rows first). Only a step of a single token or sample that fails twice ends its request. Any other
failure, while a step is built, launched, fetched or processed, ends the requests of its step.

Invariants:
- A step's output is recorded only if all of it has arrived. A step that is computed again writes the same KV
  slots, and its noise is a function of position, so it samples the same tokens.
- Requests whose linear-attention state the step has overwritten start again from the last one that was kept
  for a prefix of theirs, and before others decode on.
- A step that was launched after a failed one is rolled back with it: its decoding rows read the failed step's
  tokens.
- The device cache is emptied once per failure, when nothing refers to the step's tensors any more.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...io_struct import ErrorCode, StepFailures
from ..execution.forward import Runner
from ..memory.device_memory import DeviceCache, is_out_of_memory
from .outputs import Outputs

if TYPE_CHECKING:
    from ..images.batcher import ImageBatcher
    from .batcher import Batcher

logger = logging.getLogger(__name__)

MAX_BUILDS = 3
"""Attempts to build a step before the requests fail that may cause it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception's message; the exception itself would keep the step's tensors alive."""

    message: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception, step: int) -> "Failure":
        """Return the failure of a step; log it, with its traceback unless memory ran out."""
        failure = cls(f"{type(error).__name__}: {error}", is_out_of_memory(error))
        if failure.out_of_memory:
            logger.warning("step %d ran out of memory: %s", step, failure.message)
        else:
            logger.error("step %d failed", step, exc_info=error)
        return failure


class Recovery:
    def __init__(
        self,
        batcher: "Batcher | ImageBatcher",
        outputs: Outputs[Any],
        device_cache: DeviceCache,
        *,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        """``restore`` is called after a step was rolled back."""
        self._failed = self._retried = self._splits = 0
        self._batcher = batcher
        self._outputs = outputs
        self._device_cache = device_cache
        self._restore = restore
        self._failed_builds = 0

    def counts(self) -> StepFailures:
        return StepFailures(
            failed=self._failed,
            retried=self._retried,
            splits=self._splits,
            token_limit=self._batcher.step_limit,
        )

    def step_built(self) -> None:
        self._failed_builds = 0

    def build_failed(self, failure: Failure) -> None:
        self._failed += 1
        self._failed_builds += 1
        if self._failed_builds == MAX_BUILDS:
            self._failed_builds = 0
            self._fail(self._batcher.schedule_failure_candidates(), failure)
        self._device_cache.after_failure(failure.message)

    def step_failed(self, batch: Any, failure: Failure, later: Any | None) -> None:
        self._failed += 1
        if later is not None:
            self._batcher.roll_back_step(later)
            self._retried += 1
        self._batcher.roll_back_step(batch)
        if failure.out_of_memory and self._batcher.halve(batch):
            self._splits += 1
            self._retried += 1
        else:
            self._fail(self._batcher.requests_of(batch), failure)
        self._device_cache.after_failure(failure.message)
        self._restore()

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
        self._fail(self._batcher.requests_of(batch), failure)
        self._device_cache.after_failure(failure.message)

    def _fail(self, requests: list[Any], failure: Failure) -> None:
        if failure.out_of_memory:
            self._outputs.fail(requests, f"out of memory: {failure.message}", ErrorCode.OUT_OF_MEMORY)
        else:
            self._outputs.fail(requests, f"the step failed: {failure.message}")


def restore_tokens(batcher: "Batcher", runner: Runner) -> None:
    """Restore the states and last tokens that rolled back steps have overwritten."""
    batcher.restart_states()
    slots, tokens = batcher.last_tokens()
    if not len(slots):
        return
    try:
        runner.set_last_tokens(slots, tokens)
    except Exception as error:  # the device may be in any state
        logger.error("cannot restore the last tokens: retracting every request", exc_info=error)
        batcher.retract_all()
