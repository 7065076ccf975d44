"""Background threads for work that may block, and how they wake the loop, which never waits for one.

A thread hands over buffers of its own, at most ``ahead`` at a time, and nothing more after it was cancelled.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Wakeup:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Worker:
    """Thread that runs callables in order: one for each group, as gloo keeps memory for every thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="caesura-worker", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="caesura-feed", daemon=True).start()


class Task(Generic[Item]):
    def __init__(
        self,
        work: Callable[[], Item],
        wake: Callable[[], None],
        *,
        submit: Callable[[Callable[[], None]], object] = in_thread,
    ) -> None:
        began = monotonic()
        self.seconds = 0.0
        self._outcome: tuple[Item] | BaseException | None = None

        def run() -> None:
            try:
                self._outcome = (work(),)
            except BaseException as error:  # noqa: BLE001  result() raises it in the loop's thread
                self._outcome = error
            self.seconds = monotonic() - began
            wake()

        submit(run)

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Item:
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome[0]


class Feed(Generic[Item]):
    """Iterator in a thread, at most ``ahead`` items ahead; the buffers of a *released* item may be reused."""

    def __init__(
        self,
        items: Iterator[Item],
        wake: Callable[[], None],
        *,
        ahead: int = 1,
        submit: Callable[[Callable[[], None]], object] = in_thread,
    ) -> None:
        self._items = items
        self._wake = wake
        self._room = threading.Semaphore(ahead)
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._cancelled = threading.Event()
        submit(self._run)

    @property
    def ended(self) -> bool:
        return self._ended and not self._ready

    @property
    def is_running(self) -> bool:
        """True if the thread runs; after :meth:`cancel`, until its blocking call returns."""
        return not self._ended

    def take(self) -> Item | None:
        """Return the next item, or None if none is ready; after the last, raise the iterator's error."""
        ended = self._ended  # read before the queue, so that an item added in between is not missed
        if self._ready:
            return self._ready.popleft()
        if ended and self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def release(self) -> None:
        self._room.release()

    def cancel(self) -> None:
        self._cancelled.set()
        self._room.release()

    def _run(self) -> None:
        try:
            while True:
                self._room.acquire()
                if self._cancelled.is_set():
                    break
                item = next(self._items, None)
                if item is None or self._cancelled.is_set():
                    break
                self._ready.append(item)
                self._wake()
        except BaseException as error:  # noqa: BLE001  take() raises it in the loop's thread
            self._error = error
        finally:
            self._ended = True
            self._wake()
            # What was broken off between two items would keep what it holds, a process group's connections
            # for instance.
            if isinstance(self._items, Generator):
                self._items.close()
