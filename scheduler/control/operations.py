"""Commands as generators: the loop advances one until it says what it waits for, then looks for messages.

An operation never blocks, and only one works at a time (``messaging/command_queue.py``). Many wait for the
engine to stand still: behind the barrier that ends the step in flight, or until nothing keeps it from being
idle.
"""

from collections.abc import Generator, Iterator
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ...io_struct import Reply
from ..runtime.engine_config import PAGE_SIZE

if TYPE_CHECKING:
    from ..runtime.engine import Engine

SLICE_S, LONGEST_SLICE_S = 0.010, 0.1
"""Seconds that operations may run before the loop receives messages again; the first between short steps."""
TICK_SHARE = 0.2
"""Share of the time of a long tick that operations may run."""


def slice_s(tick_s: float) -> float:
    """Return the seconds that operations may run, given those of the tick before."""
    return min(max(SLICE_S, TICK_SHARE * tick_s), LONGEST_SLICE_S)


class Wait(Enum):
    STEP = "step"
    """Until the step in flight is completed or rolled back; the operation has closed the gate for more."""
    SLICE = "slice"
    """There is more work; the loop receives messages first."""
    THREAD = "thread"
    """Until a background thread wakes the loop. The operation keeps its place at the head of the queue."""
    CHANGE = "change"
    """Until the engine changes, for example becomes idle. The next command may run meanwhile."""


Operation = Generator[Wait, None, Reply]
"""A command that may take several ticks; it returns its reply or raises :class:`CaesuraError`."""

_Result = TypeVar("_Result")


def waiting(
    work: Generator[None, None, _Result] | Iterator[None], wait: Wait = Wait.THREAD
) -> Generator[Wait, None, _Result]:
    """Run ``work`` within an operation, yielding ``wait`` whenever it yields; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield wait


def barrier(engine: "Engine") -> Generator[Wait, None, None]:
    """Wait until no step is in flight and the forward stream is idle; the caller has closed the gate."""
    while engine.batcher.in_flight:
        yield Wait.STEP
    engine.batcher.after_barrier = True
    engine.runner.synchronize()


def is_idle(engine: "Engine") -> bool:
    """Return True if nothing is held, in flight or written, nor waits, unless the engine is paused."""
    waiting_blocks = len(engine.waiting) > 0 and engine.state.generation != "paused"
    holding = engine.batcher.num_holding > 0 or engine.batcher.in_flight
    return not (holding or waiting_blocks or engine.sessions.is_working)


def held_kind(engine: "Engine") -> str:
    return "KV" if engine.batcher.images is None else "latents"


def pending(engine: "Engine") -> dict[str, int]:
    """Return counts of the work that keeps the engine from being idle, as details of an error."""
    return {
        "running": engine.batcher.num_running,
        "prefilling": engine.batcher.num_prefilling,
        "waiting": len(engine.waiting),
        "held_tokens": engine.cache.usage().held * PAGE_SIZE,
    }
