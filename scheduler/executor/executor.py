"""The executor: calls a method on all workers of an engine, which are its ranks but rank 0.

Invariants:
- Rank 0 decides everything: workers execute what they are told, in order. So no clock, lease or message can
  mean different things on two ranks.
- :meth:`Executor.call` returns when the call has been sent. Its :class:`Pending` yields while answers are
  missing; if it is closed or forgotten, they are dropped when they come.
- An engine of one rank has no workers: a call sends nothing and its answers, none, are there at once.
- An update that ends early on rank 0 has ended on all ranks before anybody hears of it.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from time import monotonic
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ...io_struct import CaesuraError, RankMemory, RankStatus
from ..execution.forward import Runner
from ..execution.model_runner import ModelRunner
from ..parallel.group import SINGLE, RankLostError, TensorParallel
from ..runtime.engine_config import EngineConfig
from ..runtime.guard import EngineEndsError
from ..weights.changes import UpdateChanges
from ..weights.loader import END, WeightLoader
from ..weights.source import WeightPiece, WeightSource
from . import worker_rendezvous
from .parallel_runner import ParallelRunner
from .rpc import Answer, Memory, Start, encode, raise_failures
from .worker_updates import Written, described
from .workers import Workers

logger = logging.getLogger(__name__)

ANSWER_S = 600.0
"""Longest wait that holds up the loop, in seconds."""
Pieces = Generator[WeightPiece | None, None, None]
_Value = TypeVar("_Value")


class Pending(Generator[None, None, list[_Value]], Generic[_Value]):
    """Answers to one call: yields until all workers have answered; returns their values, ordered by rank."""

    def __init__(
        self, executor: "Executor", number: int, method: str, answers: dict[int, Answer], reply: Any
    ) -> None:
        self.number, self.method = number, method
        self.answers = answers
        self._executor = executor
        self._reply = reply

    @property
    def complete(self) -> bool:
        """True if all workers have answered. Raises EngineEndsError if a worker is lost."""
        self._executor.receive()
        return len(self.answers) == self._executor.workers

    @property
    def failed(self) -> bool:
        """True if a worker has failed. Raises as :attr:`complete`."""
        self._executor.receive()
        return any(answer.failure is not None for answer in self.answers.values())

    def send(self, value: None) -> None:
        """Return if answers are missing; else end with their values, or raise what workers failed with."""
        if self.complete:
            raise StopIteration(self._values())

    def throw(self, *error: Any) -> None:
        self.close()
        super().throw(*error)

    def close(self) -> None:
        """Drop the answers, those to come too. Idempotent."""
        self._executor.forget(self.number)

    __del__ = close

    def settle(self, own: CaesuraError | None) -> Generator[None, None, None]:
        """Wait for all answers; raise what workers failed with, together with ``own``, rank 0's error."""
        while not self.complete:
            yield
        raise_failures(self.answers, own)

    def wait(self, *, until_failure: bool = False) -> list[_Value]:
        """Block until all workers have answered, or ``until_failure`` of one; return their values."""
        self.collect(until_failure=until_failure)
        return self._values()

    def collect(self, *, until_failure: bool = False) -> dict[int, Answer]:
        """Do as :meth:`wait`, but return the answers by rank, failures included."""
        deadline = monotonic() + ANSWER_S
        while not (self.complete or (until_failure and self.failed)):
            self._executor.wait(deadline, self)
        return dict(sorted(self.answers.items()))

    def _values(self) -> list[_Value]:
        raise_failures(self.answers)
        answers = (answer for _, answer in sorted(self.answers.items()))
        return [msgspec.msgpack.decode(answer.value, type=self._reply) for answer in answers]


class Executor:
    def __init__(self, config: EngineConfig) -> None:
        """Start the workers of this host, if the engine has any. Raises as :class:`~.workers.Workers`."""
        self.workers = config.tp - 1
        self.parallel: TensorParallel = SINGLE
        """Group of all ranks; rank 0 alone before :meth:`start`."""
        self._config = config
        self._connection = Workers(config) if self.workers else None
        self._numbers = 0
        self.answers: dict[int, dict[int, Answer]] = {}
        """Answers to each call that somebody waits for, by rank."""
        self._memory: dict[int, Memory] = {}
        self.ends_for_good = False
        """True once the engine has been shut down: its workers on other nodes wait for no other rank 0."""

    @property
    def heard(self) -> Mapping[Any, Callable[[], None]]:
        """Sockets and descriptors that wake the engine's loop, and what it calls then."""
        if self._connection is None:
            return {}
        connection = self._connection
        return {connection.socket: self.receive, connection.alarm.fd: connection.require_all}

    def call(
        self, method: str, *arguments: object, frames: Sequence[bytes | memoryview] = (), reply: Any = None
    ) -> Pending[Any]:
        """Have each :class:`~.worker.Worker` execute ``method``; ``reply`` is the type of its value."""
        self._numbers += 1
        answers: dict[int, Answer] = {}
        if self._connection is not None:
            self.answers[self._numbers] = answers
            self._connection.send([encode((self._numbers, method, arguments)), *frames])
        return Pending(self, self._numbers, method, answers, reply)

    def receive(self) -> None:
        """Take the answers that have come. Raises as :attr:`Pending.complete`."""
        if self._connection is None:
            return
        for rank, answer in self._connection.receive():
            if answer.memory is not None:
                self._memory[rank] = answer.memory
            if (wanted := self.answers.get(answer.number)) is not None:
                wanted[rank] = answer

    def wait(self, deadline: float, pending: Pending[Any]) -> None:
        """Block until something comes for ``pending``. Raises as :meth:`Pending.wait`."""
        assert self._connection is not None
        missing = set(range(1, 1 + self.workers)) - pending.answers.keys()
        self._connection.wait(deadline, f"answer {pending.method}", missing)

    def forget(self, number: int) -> None:
        self.answers.pop(number, None)

    def start(self, folder: str | None) -> Pending[None]:
        """Have the workers build their models, as rank 0 does next, or from the weights in ``folder``."""
        if self._connection is None:
            return self.call("start")
        config = self._config
        self._connection.await_all()
        address, join = worker_rendezvous.found(config)
        start = Start(
            config=config,
            devices=[worker_rendezvous.device_of(config, rank) for rank in range(config.tp)],
            folder=folder,
            group=address,
            sharing=self._connection.sharing,
        )
        started = self.call("start", start)
        try:
            self.parallel = join(self._watch)
        except RankLostError:
            self._connection.require_all()  # says why, if a worker has ended
            raise
        return started

    def _watch(self, group: TensorParallel) -> None:
        """Abort waits for a worker that ends, in a group that is made."""
        assert self._connection is not None, "there are workers"
        self._connection.on_lost = group.lose
        self._connection.require_all()

    @property
    def sharing(self) -> int:
        """Number of ranks on the host of rank 0, once all have joined."""
        return 1 if self._connection is None else self._connection.sharing[0]

    def all_reduce_min(self, value: int) -> int:
        offers: list[int] = self.call("offer", reply=int).wait(until_failure=True)
        smallest = min([value, *offers])
        self.call("agree", smallest)
        return smallest

    def runner(self, own: Runner) -> Runner:
        """Return what executes each step on all ranks, ``own`` on rank 0."""
        if self._connection is None:
            return own
        return ParallelRunner(own, self, own.graphs if isinstance(own, ModelRunner) else None)

    def pieces(
        self,
        source: WeightSource,
        own: Pieces,
        loader: WeightLoader,
        changes: UpdateChanges | None = None,
        *,
        method: Literal["write", "foresee"] = "write",
    ) -> Pieces:
        """Yield ``own`` pieces until all ranks have written; workers write once the second is asked for.

        ``changes`` takes what they change. With ``foresee`` they compare, and write nothing.
        """
        if self._connection is None:
            return own
        return self._pieces(source, own, loader, changes, method)

    def _pieces(
        self,
        source: WeightSource,
        own: Pieces,
        loader: WeightLoader,
        changes: UpdateChanges | None,
        method: str,
    ) -> Pieces:
        fresh = not loader.written and loader.is_whole
        described_source, frames = described(source)
        full = None if changes is None or changes.is_foreseen else changes.full
        opening = self.call("open", described_source, fresh, loader.is_staging, full, frames=frames)
        writing: Pending[Written] | None = None
        done = False
        try:
            piece = next(own, END)
            while piece is None and not opening.failed:
                yield None
                piece = next(own, END)
            yield from self._all_or_none(opening)
            if piece is END:
                return
            before = len(loader.changed)
            yield piece  # the caller stops the steps before it asks for more
            writing = self.call(method, reply=Written)
            for piece in own:
                if writing.failed:
                    break
                yield piece
            elsewhere = yield from self._all_or_none(writing)
            changed = {name for each in elsewhere for name in each.changed}
            loader.counts.changed_tensors += len(changed - set(loader.changed[before:]))
            if changes is not None:
                changes.add_elsewhere(each.compared for each in elsewhere)
                changes.unchanged = [name for name in changes.unchanged if name not in changed]
            done = True
        finally:
            own.close()
            if not done:
                opening.close()
                if writing is not None:
                    writing.close()
                with suppress(EngineEndsError):  # the loop hears of it anyway
                    self.call("abandon").wait()

    def _all_or_none(self, pending: Pending[_Value]) -> Generator[None, None, list[_Value]]:
        """Wait for part of an update; break it off once a rank fails, as others may wait for it for ever."""
        with closing(pending):
            while not pending.complete:
                if pending.failed:
                    self.call("abandon").wait()
                    break
                yield
            return (yield from pending)

    def empty(self, place: str) -> list[RankMemory]:
        reports = []
        for rank, answer in self.call("empty", place).collect().items():
            if answer.failure is not None:
                logger.error("rank %d could not empty its device cache: %s", rank, answer.failure.message)
                continue
            before, after = msgspec.msgpack.decode(answer.value, type=tuple[int, int])
            reports.append(RankMemory(rank=rank, reserved_before=before, reserved_after=after))
        return reports

    def status(self) -> list[RankStatus]:
        joined = {} if self._connection is None else self._connection.joined
        return [
            RankStatus(
                rank=rank,
                pid=worker.pid,
                host=worker.host.partition("/")[0],
                reserved=memory.reserved,
                allocated=memory.allocated,
                available=memory.available,
            )
            for rank, worker in sorted(joined.items())
            if (memory := self._memory.get(rank)) is not None
        ]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(for_good=self.ends_for_good)
        self.parallel.close()
