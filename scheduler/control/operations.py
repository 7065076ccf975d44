"""Commands as generators: the loop advances one until it says what it waits for, then looks for messages.

An operation never blocks, and only one works at a time (``messaging/command_queue.py``).
"""

from collections.abc import Generator, Iterator
from enum import Enum
from typing import TypeVar

from ...io_struct import Reply

SLICE_S = 0.010
"""Longest time in seconds that operations run before the loop receives messages again."""


class Wait(Enum):
    """Why an operation yields."""

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
