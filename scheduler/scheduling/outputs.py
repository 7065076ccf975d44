"""The end of a sample, whatever a sample is: tokens, or an image.

Invariant I1: a sample is finished here and nowhere else, once, with exactly one terminal result for its
client.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

from ...io_struct import ErrorCode, FinishReason
from ..memory.device_memory import is_out_of_memory
from .live_requests import LiveRequests, SampleT
from .request import Phase, WeightStamp
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from ..messaging.outbox import Outbox

logger = logging.getLogger(__name__)


class Outputs(ABC, Generic[SampleT]):
    def __init__(
        self,
        waiting: WaitingQueue[SampleT],
        live: LiveRequests[SampleT],
        outbox: "Outbox",
        *,
        on_finished: Callable[[SampleT, Any], None],
        stamp: WeightStamp,
    ) -> None:
        """``on_finished`` is called once for each sample, with its result, after its memory was released."""
        self.generated_tokens = 0
        """Tokens, or denoised steps of samples, since the engine's start."""
        self.finished: Counter[str] = Counter()
        """Number of finished samples, by the type of their finish reason."""
        self._waiting = waiting
        self._live = live
        self._outbox = outbox
        self._on_finished = on_finished
        self._stamp = stamp

    @abstractmethod
    def record(self, batch: Any, output: Any) -> None:
        """Record the output of a step, and finish the samples that end."""

    @abstractmethod
    def _result(self, sample: SampleT, reason: FinishReason) -> Any:
        """Return the terminal result, with all that was made and asked for."""

    @abstractmethod
    def _lost_result(self, sample: SampleT, reason: FinishReason) -> Any:
        """Return a terminal result without content, in place of one that cannot be built."""

    @abstractmethod
    def _release(self, sample: SampleT, *, waited: bool, keep_prefix: bool) -> None:
        """Release what a finished sample holds; ``waited``: it was in the queue."""

    def set_stamp(self, stamp: WeightStamp) -> None:
        """Have what is made from now on carry ``stamp``: weights were committed."""
        self._stamp = stamp

    def finish(self, sample: SampleT, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """Finish a sample: build its result, then release what it holds.

        With ``keep_prefix`` what it has computed of its prompt may serve others.
        """
        assert sample.phase is not Phase.FINISHED, "a sample ends once"
        try:
            result = self._result(sample, reason)
        except Exception as error:  # a terminal result must be sent, whatever is wrong with the outputs
            logger.error("request %s: its result could not be built", sample.rid, exc_info=error)
            message = f"its result could not be built: {type(error).__name__}: {error}"
            code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
            result = self._lost_result(sample, FinishReason(type="error", message=message, code=code))
            keep_prefix = False
        waited = sample.phase is Phase.WAITING
        sample.phase = Phase.FINISHED
        self._live.remove(sample)
        self._outbox.add_result(sample.client, result)
        self.finished[result.finish_reason.type] += 1
        if waited:
            self._waiting.forget_finished()
        self._release(sample, waited=waited, keep_prefix=keep_prefix)
        self._on_finished(sample, result)

    def abort(self, samples: Iterable[SampleT], message: str, code: ErrorCode | None = None) -> int:
        """Finish samples now, with what they have; return how many were live."""
        reason = FinishReason(type="abort", message=message, code=code)
        return self._finish_each(samples, reason, keep_prefix=True)

    def abort_all(self, message: str) -> int:
        return self.abort(self._live, message)

    def fail(self, samples: Iterable[SampleT], message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Finish samples with an error after a failed step. They keep what earlier steps made."""
        self._finish_each(samples, FinishReason(type="error", message=message, code=code), keep_prefix=False)

    def _finish_each(self, samples: Iterable[SampleT], reason: FinishReason, *, keep_prefix: bool) -> int:
        count = 0
        for sample in samples:
            if sample.phase is Phase.FINISHED:
                continue
            count += 1
            try:
                self.finish(sample, reason, keep_prefix=keep_prefix)
            except Exception as error:  # the others must be finished, too
                logger.error("request %s could not be released completely", sample.rid, exc_info=error)
        return count
