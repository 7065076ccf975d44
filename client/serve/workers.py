"""Runs long work off the event loop in a few threads, or on it in slices.

Invariants: as many pieces of work wait for a thread as :data:`MAX_WAITING`, one more is refused; nothing here outlives its server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..exceptions import QueueFull

T = TypeVar("T")
THREADS = 4
MAX_WAITING = 256
SLICE = 32
"""Pieces of a batch, each well below a millisecond, between two chances for others."""


class Workers:
    """Threads of one front end, made when they are needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="caesura-http")
        self._held = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Cancelled: it is not waited for, but counts until it has ended.

        Raises:
            QueueFull: too much is waiting.
        """
        if self._held >= THREADS + MAX_WAITING:
            raise QueueFull(f"{self._held} pieces of text work are waiting; try again later")
        self._held += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._release)
        return await future

    def _release(self, _: object) -> None:
        self._held -= 1


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """``items``, with others served in between."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)
