"""Steps on a worker: launched in the order in which they come, and answered when they have ended.

Invariants:
- At most one step is under way while the next one is launched, as on rank 0.
- A rank that fails breaks off what other ranks wait for, so none of them waits for it longer than it takes to hear.
"""

from collections import deque
from collections.abc import Callable
from time import monotonic

from ..execution.forward import ForwardOutput, Runner
from ..kernels.collectives import RankLostError
from ..memory.device_memory import is_out_of_memory
from ..parallel.group import TensorParallel
from .messages import Answer, Memory, Step, failure_of
from .plans import decode_batch

_READ_S = 1.0
"""How often the memory is read while steps run."""


class Steps:
    """The steps of one rank."""

    def __init__(
        self,
        runner: Runner,
        parallel: TensorParallel,
        memory: Callable[[], Memory],
        *,
        ready_at_once: bool,
    ) -> None:
        """
        Args:
            memory: reads the rank's memory.
            ready_at_once: a step has run when it is launched.
        """
        self._runner = runner
        self._parallel = parallel
        self._memory = memory
        self._ready_at_once = ready_at_once
        self._read_at = 0.0
        self.launched: deque[tuple[int, ForwardOutput]] = deque()
        """By number, those that have not been answered."""

    def launch(self, step: Step, data: memoryview) -> list[Answer]:
        """Launch a step; returns the answers to those that have ended by then."""
        try:
            output = self._runner.execute(decode_batch(step.plan, data))
        except Exception as error:  # noqa: BLE001  a step may fail in any way; rank 0 decides what to do
            return [*self._finish_all(), self._failed(step.number, error)]
        self.launched.append((step.number, output))
        return [self.finish()] if self._ready_at_once or len(self.launched) > 1 else []

    def finish(self) -> Answer:
        """The answer to the oldest step, waited for."""
        number, output = self.launched.popleft()
        try:
            output.fetch()
        except Exception as error:  # noqa: BLE001  as above: device errors surface here
            return self._failed(number, error)
        answer = Answer(number=number)
        if (now := monotonic()) - self._read_at > _READ_S:
            answer.memory, self._read_at = self._memory(), now
        return answer

    def _finish_all(self) -> list[Answer]:
        return [self.finish() for _ in range(len(self.launched))]

    def _failed(self, number: int, error: Exception) -> Answer:
        self._parallel.abort()
        follows = isinstance(error, RankLostError)
        failure = failure_of(error, out_of_memory=is_out_of_memory(error), follows=follows)
        return Answer(number=number, failure=failure)
