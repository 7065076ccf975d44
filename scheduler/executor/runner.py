"""Steps on all ranks: rank 0 sends each step to the others before it executes its own part.

Invariants:
- A step counts as done when every rank has said so: what one rank could not do, none has done.
- After a failure, every step that was under way has ended on every rank before the failure is raised, and the group begins anew.
  So recovery may launch the next step at once.
- Captured graphs hold the connections of the group (NCCL's communicator): all ranks drop them with the group,
  and capture them again with the next one. Not run on several GPUs.
- The failure that is raised is that of the rank that failed by itself, not of those that have waited for it in vain.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..execution.forward import ForwardBatch, ForwardOutput, HostOutput, Runner
from ..execution.graphs import DecodeGraphs
from ..kernels.collectives import RankLostError
from ..parallel.group import TensorParallel
from .messages import Answer, Capture, Recover, SetLastTokens, Step, Synchronize
from .plans import encode_batch
from .workers import Workers, raise_failures


@dataclass(slots=True)
class _Launched:
    """A step of all ranks."""

    runner: "RanksRunner"
    number: int
    own: ForwardOutput

    def fetch(self) -> HostOutput:
        """This rank's results, once all ranks have theirs."""
        try:
            output = self.own.fetch()
        except Exception as error:
            self.runner.broken(error)
            raise
        self.runner.finish(self.number)
        return output


class RanksRunner:
    """The :class:`~..forward.Runner` of an engine of several ranks."""

    def __init__(
        self, own: Runner, workers: Workers, parallel: TensorParallel, graphs: DecodeGraphs | None = None
    ) -> None:
        """``own`` executes this rank's part, with ``graphs`` if it has any."""
        self._own = own
        self._graphs = graphs
        self._workers = workers
        self._parallel = parallel
        self._under_way: list[int] = []
        self._failures: dict[int, Exception] = {}

    def execute(self, batch: ForwardBatch) -> ForwardOutput:
        """Launch one step everywhere."""
        header, arrays = encode_batch(batch)
        number = self._workers.next_number()
        self._workers.send(Step(number=number, plan=msgspec.Raw(header)), [arrays])
        self._under_way.append(number)
        try:
            return _Launched(self, number, self._own.execute(batch))
        except Exception as error:
            self.broken(error)
            raise

    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """See :class:`~..forward.Runner`."""
        number = self._workers.next_number()
        self._workers.send(SetLastTokens(number=number, slots=slots.tolist(), tokens=tokens.tolist()))
        self._with_the_others(number, lambda: self._own.set_last_tokens(slots, tokens))

    def synchronize(self) -> None:
        """Return when the forward streams of all ranks are idle."""
        number = self._workers.next_number()
        self._workers.send(Synchronize(number=number))
        self._with_the_others(number, self._own.synchronize)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Of this rank."""
        return self._own.on_stream()

    def finish(self, number: int) -> None:
        """Return when every rank has executed a step.

        Raises:
            Exception: some rank has not.
        """
        if number in self._under_way:
            answers = self._workers.wait(number)
            self._under_way.remove(number)
            if (failure := _failure_of(answers)) is not None:
                self._settle()
                raise failure
        elif number in self._failures:
            raise self._failures.pop(number)

    def broken(self, error: Exception) -> None:
        """This rank has failed with ``error``, by itself or since another one has; raises that one's failure then."""
        self._parallel.abort()
        self._settle()
        follows = isinstance(error, RankLostError)
        if follows and self._failures:
            raise self._failures[min(self._failures)] from error

    def _with_the_others(self, number: int, own: Callable[[], None]) -> None:
        """This rank's ``own`` part of a call, and the wait for theirs."""
        try:
            own()
        except BaseException:
            self._workers.drop(number)
            raise
        _require(self._workers.wait(number))

    def _settle(self) -> None:
        """Wait until nothing is under way on any rank, and begin anew."""
        self._failures.clear()
        self._parallel.abort()
        for number in self._under_way:
            failure = _failure_of(self._workers.wait(number))
            if failure is not None:
                self._failures[number] = failure
        self._under_way.clear()
        number = self._workers.next_number()
        self._workers.send(Recover(number=number))
        begin_anew(self._parallel, self._graphs)
        _require(self._workers.wait(number))
        if self._graphs is not None:
            number = self._workers.next_number()
            self._workers.send(Capture(number=number))
            for _ in self._graphs.capture():
                pass
            _require(self._workers.wait(number))


def begin_anew(parallel: TensorParallel, graphs: DecodeGraphs | None) -> None:
    """Form the group again, without the graphs that hold connections of the one before."""
    if graphs is not None:
        graphs.drop()
    parallel.reset()


def _failure_of(answers: list[Answer]) -> Exception | None:
    """What this rank raises for the first of those that failed by themselves."""
    failed = [
        (answer.failure.follows, rank, answer.failure)
        for rank, answer in enumerate(answers, 1)
        if answer.failure is not None
    ]
    if not failed:
        return None
    _, rank, failure = min(failed, key=lambda item: item[:2])
    text = f"rank {rank}: {failure.message}"
    return MemoryError(text) if failure.out_of_memory else RuntimeError(text)


def _require(answers: list[Answer]) -> None:
    raise_failures(dict(enumerate(answers, 1)))
