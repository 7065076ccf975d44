"""Steps on all ranks: rank 0 sends each step to the workers before it executes its own part.

Invariants:
- A step counts as done when every rank has said so.
- After a failure, every step under way has ended on every rank before it is raised, and the group begins
  anew. So recovery may launch the next step at once.
- Captured graphs hold the connections of the group (NCCL's communicator): all ranks drop them with the group,
  and capture them again with the next one. Not run on several GPUs.
- The failure raised is that of the rank that failed by itself, not of those that waited for it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..execution.forward import ForwardBatch, ForwardOutput, HostOutput, Runner
from ..execution.graphs import DecodeGraphs
from ..parallel.group import RankLostError
from .rpc import Answer, encode_batch

if TYPE_CHECKING:
    from .executor import Executor, Pending


@dataclass(slots=True)
class _Launched:
    runner: "ParallelRunner"
    pending: "Pending[None]"
    own: ForwardOutput

    def fetch(self) -> HostOutput:
        try:
            output = self.own.fetch()
        except Exception as error:
            self.runner.broken(error)
            raise
        self.runner.finish(self.pending)
        return output


class ParallelRunner:
    """The :class:`~..forward.Runner` of an engine of several ranks."""

    def __init__(self, own: Runner, executor: "Executor", graphs: DecodeGraphs | None) -> None:
        self.own = own
        self._graphs = graphs
        self._executor = executor
        self.under_way: list[Pending[None]] = []
        self._failures: dict[int, Exception] = {}
        """Failures of steps that nobody has fetched, by the number of their call."""

    def execute(self, batch: ForwardBatch) -> ForwardOutput:
        header, arrays = encode_batch(batch)
        pending = self._executor.call("execute", msgspec.Raw(header), frames=[arrays])
        self.under_way.append(pending)
        try:
            return _Launched(self, pending, self.own.execute(batch))
        except Exception as error:
            self.broken(error)
            raise

    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        own = self.own
        self._everywhere(
            lambda: own.set_last_tokens(slots, tokens), "set_last_tokens", slots.tolist(), tokens.tolist()
        )

    def synchronize(self) -> None:
        self._everywhere(self.own.synchronize, "synchronize")

    def on_stream(self) -> AbstractContextManager[Any]:
        return self.own.on_stream()

    def finish(self, pending: "Pending[None]") -> None:
        """Return when every rank has executed a step. Raises MemoryError, RuntimeError if one has not."""
        if pending in self.under_way:
            answers = pending.collect()
            self.under_way.remove(pending)
            if (failure := _first_failure(answers)) is not None:
                self._settle()
                raise failure
        elif pending.number in self._failures:
            raise self._failures.pop(pending.number)

    def broken(self, error: Exception) -> None:
        """Settle after rank 0 has failed; raise a worker's failure if ``error`` only follows it."""
        self._executor.parallel.abort()
        self._settle()
        if isinstance(error, RankLostError) and self._failures:
            raise self._failures[min(self._failures)] from error

    def _everywhere(self, own: Callable[[], object], method: str, *arguments: object) -> None:
        with closing(self._executor.call(method, *arguments)) as pending:
            own()
            pending.wait()

    def _settle(self) -> None:
        """Wait until nothing is under way on any rank, and begin anew."""
        self._failures.clear()
        self._executor.parallel.abort()
        for pending in self.under_way:
            if (failure := _first_failure(pending.collect())) is not None:
                self._failures[pending.number] = failure
        self.under_way.clear()
        graphs, parallel = self._graphs, self._executor.parallel
        if graphs is not None:
            graphs.drop()
        self._everywhere(parallel.reset, "recover")
        if graphs is not None:
            self._everywhere(lambda: list(graphs.capture()), "capture")


def _first_failure(answers: dict[int, Answer]) -> Exception | None:
    """Return what rank 0 raises for the first worker that failed by itself, or None."""
    failed = [
        (answer.failure.follows, rank, answer.failure)
        for rank, answer in answers.items()
        if answer.failure is not None
    ]
    if not failed:
        return None
    _, rank, failure = min(failed, key=lambda item: item[:2])
    text = f"rank {rank}: {failure.message}"
    return MemoryError(text) if failure.out_of_memory else RuntimeError(text)
