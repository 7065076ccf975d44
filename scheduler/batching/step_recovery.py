"""After a failed step: who ends, and what is computed again.

A step may fail while it is built, launched or fetched, or while its results are taken in. Two kinds of failure are told
apart. One that says that memory has run out blames no request: the step is taken back and computed again in halves, the
decoding rows first and the prompts later where not both fit; only the smallest step there is, a single token, ends its
request, when it has failed twice. Any other failure ends the requests of its step.

Invariants:
- Nothing of a step is taken in unless all of its results have arrived. A step that is computed again writes the same KV
  slots, and noise is a function of position, so it samples what it would have sampled.
- What was launched after a failed step is lost with it, for its decoding rows read what the failed one sampled. Its
  requests do not end for that.
- Attempts are bounded: of a step that memory does not suffice for, each is at most half of the one before, and the smallest is
  tried twice; of any other failure there is one; where no step can be built, :data:`MAX_BUILDS`.
- The device cache is emptied once per failure, when nothing refers to the step's tensors any more.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...io_struct import ErrorCode, StepFailures
from ..forward import Runner
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import is_out_of_memory
from .batcher import Batcher, ScheduledBatch
from .chunking import ChunkSizer
from .output_processor import OutputProcessor
from .request import Request

logger = logging.getLogger(__name__)

MAX_BUILDS = 3
"""Attempts to build a step before those end who may be the reason: one that is being started, else those with KV."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an exception has said. Not the exception: its traceback keeps the step's tensors."""

    message: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception, step: int) -> "Failure":
        """``error`` ended the step of this number; it is logged here, with its traceback unless memory ran out."""
        failure = cls(f"{type(error).__name__}: {error}", is_out_of_memory(error))
        if failure.out_of_memory:
            logger.warning("step %d ran out of memory: %s", step, failure.message)
        else:
            logger.error("step %d failed", step, exc_info=error)
        return failure


class Recovery:
    """Puts the scheduler's parts right after a failure, and counts."""

    def __init__(
        self,
        *,
        batcher: Batcher,
        outputs: OutputProcessor,
        runner: Runner,
        chunks: ChunkSizer,
        device_cache: DeviceCache,
    ) -> None:
        """``chunks`` is what the batcher asks for budgets."""
        self._failed = self._retried = self._splits = 0
        self._batcher = batcher
        self._outputs = outputs
        self._runner = runner
        self._chunks = chunks
        self._device_cache = device_cache
        self._unbuilt = 0

    def counts(self) -> StepFailures:
        """Since start, for status."""
        return StepFailures(
            failed=self._failed, retried=self._retried, splits=self._splits, token_limit=self._chunks.limit
        )

    def built(self) -> None:
        """A step was built, or there was nothing to build."""
        self._unbuilt = 0

    def not_built(self, failure: Failure) -> None:
        """The attempt to build a step has failed; nothing is on the books."""
        self._failed += 1
        self._unbuilt += 1
        if self._unbuilt == MAX_BUILDS:
            self._unbuilt = 0
            self._end(self._batcher.suspects(), failure)
        self._device_cache.after_failure(failure.message)

    def lost(self, batch: ScheduledBatch, failure: Failure, later: ScheduledBatch | None) -> None:
        """The results of ``batch`` will not come; ``later`` was launched after it. Neither is in flight any more."""
        self._failed += 1
        if later is not None:
            self._batcher.roll_back_step(later)
            self._retried += 1
        self._batcher.roll_back_step(batch)
        if failure.out_of_memory and not self._failed_alone_before(batch):
            self._chunks.halve(batch.num_tokens)
            self._splits += 1
            self._retried += 1
            logger.warning("steps have at most %d tokens for now", self._chunks.limit)
        else:
            self._end(self._batcher.requests_of(batch), failure)
        self._device_cache.after_failure(failure.message)
        self._restore_last_tokens()

    @contextmanager
    def processing(self, batch: ScheduledBatch, number: int) -> Iterator[None]:
        """Around what takes the results of ``batch`` in: what fails there ends its requests, as some may have changed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  a defect, whatever it is: the other requests must go on
            failure = Failure.of(error, number)
        else:
            return
        self._failed += 1
        self._end(self._batcher.requests_of(batch), failure)
        self._device_cache.after_failure(failure.message)

    def _failed_alone_before(self, batch: ScheduledBatch) -> bool:
        """Whether ``batch``, which was withdrawn, is the smallest step of a request, and has failed twice now."""
        requests = self._batcher.requests_of(batch)
        if batch.num_tokens > 1 or not requests:
            return False
        (request,) = requests
        computed = int(self._batcher.table.scheduled[request.slot])
        before, request.failed_alone_at = request.failed_alone_at, computed
        return before == computed

    def _end(self, requests: list[Request], failure: Failure) -> None:
        if failure.out_of_memory:
            self._outputs.fail(requests, f"out of memory: {failure.message}", ErrorCode.OUT_OF_MEMORY)
        else:
            self._outputs.fail(requests, f"the batch failed: {failure.message}")

    def _restore_last_tokens(self) -> None:
        """The device may have sampled tokens that were not taken in: decoding rows must not read them."""
        slots, tokens = self._batcher.last_tokens()
        if not len(slots):
            return
        try:
            self._runner.set_last_tokens(slots, tokens)
        except Exception as error:  # the device may be in any state
            logger.error("every request is computed again from its tokens", exc_info=error)
            self._batcher.retract_all()
