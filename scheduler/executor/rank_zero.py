"""Rank 0 of several: what the engine asks of its other ranks, as calls to their processes.

Invariants: those of :class:`~.executor.Executor`. An update that ends early on this rank has ended on all before anybody hears of it.
Answers that nobody waits for to the end are not kept.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ...io_struct import CaesuraError, InitWeightsUpdateGroupReqInput, MemoryTag, RankMemory, RankStatus
from ..execution.forward import Runner
from ..execution.model_runner import ModelRunner
from ..parallel.group import SINGLE, TensorParallel
from ..runtime.config import EngineConfig
from ..runtime.guard import EngineEndsError
from ..weights.loader import END, WeightLoader
from ..weights.reading import Held
from ..weights.source import WeightSource
from .collectives import Founded, device_of
from .executor import Pieces, Settle
from .messages import (
    Abandon,
    Agreed,
    Answer,
    Call,
    Capture,
    Checksums,
    Derive,
    EmptyCache,
    GiveUp,
    JoinGroup,
    Keep,
    LeaveGroup,
    Open,
    Read,
    Release,
    ResetTensors,
    Resume,
    Start,
    Write,
)
from .runner import RanksRunner
from .sources import described
from .workers import Workers, raise_failures

if TYPE_CHECKING:
    from ..execution.build import Agreement

logger = logging.getLogger(__name__)


class RankZero:
    """The :class:`~.executor.Executor` of an engine that has some."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the workers.

        Raises:
            CaesuraError: as :class:`~.workers.Workers`; ``unsupported``, there is no way for them to compute together.
        """
        self._config = config
        self._workers = Workers(config)
        self._parallel: TensorParallel = SINGLE
        self._start = 0
        self.group: Agreement | None = _Agreement(self)

    @property
    def parallel(self) -> TensorParallel:
        """See :class:`~.executor.Executor`; this rank alone before :meth:`begin`."""
        return self._parallel

    @property
    def heard(self) -> Mapping[Any, Callable[[], None]]:
        """See :class:`~.executor.Executor`."""
        return self._workers.heard

    def begin(self, folder: str | None) -> None:
        """See :class:`~.executor.Executor`."""
        self._workers.await_all()
        founded = Founded(self._config)
        here = self._config.tp - self._config.tp_joined

        def start(number: int, rank: int) -> Start:
            config = replace(self._config, device=device_of(self._config, rank))
            sharing = here if rank < here else 1
            return Start(number=number, config=config, folder=folder, group=founded.address, sharing=sharing)

        self._start = self._workers.start(start)
        self._parallel = founded.join()
        self._workers.on_lost = self._parallel.abort
        self._workers.require_all()

    def ready(self) -> None:
        """See :class:`~.executor.Executor`."""
        _require(self._workers.wait(self._start))

    def offered(self, value: int) -> int:
        """The smallest ``value`` of all ranks, to which the others answer as :class:`~.messages.Agreed`."""
        smallest = min([value, *self._workers.offers(self._start)])
        self._workers.send(Agreed(value=smallest))
        return smallest

    @property
    def sharing(self) -> int:
        """Ranks on this host."""
        return self._config.tp - self._config.tp_joined

    def close(self) -> None:
        """See :class:`~.executor.Executor`."""
        self._workers.close()
        self._parallel.close()

    def runner(self, own: Runner) -> Runner:
        """See :class:`~.executor.Executor`."""
        graphs = own.graphs if isinstance(own, ModelRunner) else None
        return RanksRunner(own, self._workers, self._parallel, graphs)

    def pieces(self, source: WeightSource, own: Pieces, loader: WeightLoader) -> Pieces:
        """See :class:`~.executor.Executor`."""
        fresh = not loader.written and loader.is_whole
        described_source, frames = described(source)
        opening = self._workers.next_number()
        self._workers.send(Open(number=opening, source=described_source, fresh=fresh), frames)
        calls, done = [opening], False
        try:
            piece = next(own, END)
            while piece is None and not self._workers.failed(opening):
                yield None
                piece = next(own, END)
            yield from self._each_or_none(opening)
            if piece is END:
                return
            before = len(loader.changed)
            yield piece  # the caller stops the steps before it asks for more
            writing = self._call(lambda number: Write(number=number))
            calls.append(writing)
            for piece in own:
                if self._workers.failed(writing):
                    break
                yield piece
            answers = yield from self._each_or_none(writing)
            elsewhere = (msgspec.msgpack.decode(answer.value, type=set[str]) for answer in answers)
            loader.counts.changed_tensors += len(set().union(*elsewhere) - set(loader.changed[before:]))
            done = True
        finally:
            own.close()
            if not done:
                for number in calls:
                    self._workers.drop(number)
                with suppress(EngineEndsError):  # the loop hears of it anyway
                    self._abandon()

    def derive(self, check_finite: bool) -> Settle:
        """See :class:`~.executor.Executor`."""
        number = self._call(lambda number: Derive(number=number, check_finite=check_finite))
        asked = Asked(self._workers, number, raises=False)

        def settle(own: CaesuraError | None) -> Iterator[None]:
            answers = yield from asked
            raise_failures(dict(enumerate(answers, 1)), own)

        return settle

    def keep(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: Keep(number=number, tags=sorted(tags))))

    def give_up(self, tags: Collection[MemoryTag]) -> None:
        """See :class:`~.executor.Executor`."""
        self._until(self._call(lambda number: GiveUp(number=number, tags=sorted(tags))))

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: Release(number=number, tags=sorted(tags))))

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        number = self._call(lambda number: Resume(number=number, tags=sorted(tags)))
        answers = yield from Asked(self._workers, number, raises=False)
        try:
            raise_failures(dict(enumerate(answers, 1)))
        except CaesuraError:
            yield from self.keep(tags)
            yield from self.release(tags)
            raise

    def capture(self) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: Capture(number=number)))

    def empty(self, place: str) -> Sequence[RankMemory]:
        """See :class:`~.executor.Executor`."""
        answers = self._workers.wait(self._call(lambda number: EmptyCache(number=number, place=place)))
        reports = []
        for rank, answer in enumerate(answers, 1):
            if answer.failure is not None:
                logger.error("rank %d could not empty its device cache: %s", rank, answer.failure.message)
                continue
            before, after = msgspec.msgpack.decode(answer.value, type=tuple[int, int])
            reports.append(RankMemory(rank=rank, reserved_before=before, reserved_after=after))
        return reports

    def checksums(self) -> Generator[None, None, dict[str, str]]:
        """See :class:`~.executor.Executor`."""
        answers = yield from self._answers(self._call(lambda number: Checksums(number=number)))
        return {
            f"{name} of rank {rank}": checksum
            for rank, answer in enumerate(answers, 1)
            for name, checksum in msgspec.msgpack.decode(answer.value, type=dict[str, str]).items()
        }

    def read(self, names: Sequence[str]) -> Generator[None, None, list[list[Held]]]:
        """See :class:`~.executor.Executor`."""
        return _held(self._answers(self._call(lambda number: Read(number=number, names=list(names)))))

    def reset_tensors(self) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: ResetTensors(number=number)))

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Generator[None, None, object]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: JoinGroup(number=number, request=request)))

    def leave_group(self, name: str, reason: str | None = None) -> Iterator[None]:
        """See :class:`~.executor.Executor`."""
        return self._until(self._call(lambda number: LeaveGroup(number=number, name=name, reason=reason)))

    def status(self) -> list[RankStatus]:
        """See :class:`~.executor.Executor`."""
        return [
            RankStatus(
                rank=rank,
                pid=joined.pid,
                host=joined.host.partition("/")[0],
                reserved=memory.reserved,
                allocated=memory.allocated,
                available=memory.available,
            )
            for rank, joined in sorted(self._workers.joined.items())
            if (memory := self._workers.memory.get(rank)) is not None
        ]

    def _call(self, make: Callable[[int], Call]) -> int:
        number = self._workers.next_number()
        self._workers.send(make(number))
        return number

    def _answers(self, number: int) -> "Asked":
        """Of all ranks, none of which has failed."""
        return Asked(self._workers, number)

    def _until(self, number: int) -> Generator[None, None, object]:
        return Asked(self._workers, number)

    def _each_or_none(self, number: int) -> Generator[None, None, list[Answer]]:
        """As :meth:`_answers`, of a part of an update: once a rank has failed it is broken off on the others, since what these wait
        for may never come without that rank."""
        while (answers := self._workers.answers(number)) is None:
            if self._workers.failed(number):
                self._abandon()
                return (yield from self._answers(number))
            yield None
        _require(answers)
        return answers

    def _abandon(self) -> None:
        self._workers.wait(self._call(lambda number: Abandon(number=number)))


class Asked(Generator[None, None, list[Answer]]):
    """The wait for a call: yields until all ranks have answered, and returns their answers in the order of ranks.

    Closed before that, or forgotten, as other generators: the answers go unread.
    """

    def __init__(self, workers: Workers, number: int, *, raises: bool = True) -> None:
        """``raises``: what some ranks have failed with, instead of returning it."""
        self._workers, self._number, self._raises = workers, number, raises

    def send(self, value: None) -> None:
        """Whether they have answered."""
        answers = self._workers.answers(self._number)
        if answers is None:
            return
        if self._raises:
            _require(answers)
        raise StopIteration(answers)

    def throw(self, *error: Any) -> None:
        """Nobody waits any more, for that reason."""
        self.close()
        super().throw(*error)

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        self._workers.drop(self._number)

    __del__ = close


def _held(asked: Asked) -> Generator[None, None, list[list[Held]]]:
    answers = yield from asked
    return [msgspec.msgpack.decode(answer.value, type=list[Held]) for answer in answers]


class _Agreement:
    """Rank 0's side of agreeing on sizes."""

    def __init__(self, ranks: RankZero) -> None:
        self._ranks = ranks

    @property
    def sharing(self) -> int:
        """Ranks on this host."""
        return self._ranks.sharing

    def all_reduce_min(self, value: int) -> int:
        """The smallest ``value`` of all ranks."""
        return self._ranks.offered(value)


def _require(answers: list[Answer]) -> None:
    raise_failures(dict(enumerate(answers, 1)))
