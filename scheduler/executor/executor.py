"""What an engine asks of its other ranks, and the answer of an engine that has none.

Invariants:
- Rank 0 decides everything: the others execute what they are told, in order. So no clock, lease or message can mean different
  things on two ranks.
- What is begun on other ranks has begun when a method returns. An iterator is the wait for its end: it yields while nothing has
  come, for the loop to look elsewhere, and raises what went wrong on each rank. Who does not want to wait drops it.
- An engine of one rank does nothing here.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ...io_struct import CaesuraError, InitWeightsUpdateGroupReqInput, MemoryTag, RankMemory, RankStatus
from ..execution.build import Agreement
from ..execution.forward import Runner
from ..parallel.group import SINGLE, TensorParallel
from ..weights.loader import WeightLoader
from ..weights.reading import Held
from ..weights.source import WeightPiece, WeightSource

Pieces = Generator[WeightPiece | None, None, None]
Settle = Callable[[CaesuraError | None], Iterator[None]]
"""Waits for other ranks, given what has gone wrong on this one; raises all of it together."""


class Executor(Protocol):
    """All ranks but rank 0, which asks."""

    @property
    def parallel(self) -> TensorParallel:
        """Rank 0's place among them."""
        ...

    @property
    def group(self) -> Agreement | None:
        """To agree on sizes at start. None: there is nobody."""
        ...

    @property
    def heard(self) -> Mapping[Any, Callable[[], None]]:
        """Sockets and descriptors that wake the engine's loop, and what it does then."""
        ...

    def begin(self, folder: str | None) -> None:
        """Have the others build what a rank is made of, as this one does next; ``folder`` has the weights where it is not the
        configuration's."""
        ...

    def ready(self) -> None:
        """Return when the others have built it.

        Raises:
            CaesuraError: some could not.
        """
        ...

    def close(self) -> None:
        """End them. Idempotent."""
        ...

    def runner(self, own: Runner) -> Runner:
        """Executes each step on all ranks; ``own`` on this one."""
        ...

    def pieces(self, source: WeightSource, own: Pieces, loader: WeightLoader) -> Pieces:
        """``own`` pieces of ``source``, for this rank; they end when all ranks have written theirs.

        The others have opened and checked the same source before the first piece comes, and write when the second is asked for.
        """
        ...

    def derive(self, check_finite: bool) -> Settle:
        """First phase of a commit: derived tensors, and where asked a look for values that are not finite."""
        ...

    def keep(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """As :meth:`ComponentResidencyManager.keep`."""
        ...

    def give_up(self, tags: Collection[MemoryTag]) -> None:
        """As :meth:`ComponentResidencyManager.give_up`, once what was begun before has ended."""
        ...

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """As :meth:`ComponentResidencyManager.release`, graphs included."""
        ...

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """As :meth:`ComponentResidencyManager.resume`: on all of them, or on none."""
        ...

    def capture(self) -> Iterator[None]:
        """Capture graphs; every rank does at the same time."""
        ...

    def empty(self, place: str) -> Sequence[RankMemory]:
        """Empty the allocators of the others; what each has reserved before and after."""
        ...

    def checksums(self) -> Generator[None, None, dict[str, str]]:
        """Of each tensor of the others, by its name and rank."""
        ...

    def read(self, names: Sequence[str]) -> Generator[None, None, list[list[Held]]]:
        """Of each of the others, what it holds of each of these tensors."""
        ...

    def reset_tensors(self) -> Iterator[None]:
        """Overwrite the weights of the others."""
        ...

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Generator[None, None, object]:
        """Have the others join a trainer's process group, behind this rank's place in it."""
        ...

    def leave_group(self, name: str, reason: str | None = None) -> Iterator[None]:
        """Have them leave it; with a ``reason`` it is broken, and still known."""
        ...

    def status(self) -> list[RankStatus]:
        """The others, as they were when they were last heard of."""
        ...


class Alone:
    """An engine of one rank."""

    parallel: TensorParallel = SINGLE
    group: Agreement | None = None
    heard: Mapping[Any, Callable[[], None]] = {}

    def begin(self, folder: str | None) -> None:
        """Nobody is there."""

    def ready(self) -> None:
        """Nobody is there."""

    def close(self) -> None:
        """Nobody is there."""

    def runner(self, own: Runner) -> Runner:
        """``own``."""
        return own

    def pieces(self, source: WeightSource, own: Pieces, loader: WeightLoader) -> Pieces:
        """``own``."""
        return own

    def derive(self, check_finite: bool) -> Settle:
        """Only what has gone wrong here."""
        return _raised

    def keep(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def give_up(self, tags: Collection[MemoryTag]) -> None:
        """Nobody has a copy."""

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def capture(self) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def empty(self, place: str) -> Sequence[RankMemory]:
        """Nobody has reserved anything."""
        return ()

    def checksums(self) -> Generator[None, None, dict[str, str]]:
        """There are none."""
        yield from ()
        return {}

    def read(self, names: Sequence[str]) -> Generator[None, None, list[list[Held]]]:
        """Nobody holds anything."""
        yield from ()
        return []

    def reset_tensors(self) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Generator[None, None, None]:
        """Nothing to wait for."""
        yield from ()

    def leave_group(self, name: str, reason: str | None = None) -> Iterator[None]:
        """Nothing to wait for."""
        return iter(())

    def status(self) -> list[RankStatus]:
        """Nobody."""
        return []


def _raised(own: CaesuraError | None) -> Iterator[None]:
    if own is not None:
        raise own
    return iter(())
