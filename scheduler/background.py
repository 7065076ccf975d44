"""Work that may block, beside the loop: a thread that receives, and how it wakes the loop.

Invariants:
- The loop never waits for a thread. It takes what is there, and sleeps in ``poll`` until a message comes or a thread wakes it.
- A thread never touches engine state: it fills buffers of its own and hands them over, at most ``ahead`` at a time.
- A thread that was cancelled hands nothing over any more, however long its blocking call still takes.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Wakeup:
    """A descriptor that is readable while somebody has something for the loop."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        for end in (self.fd, self._writer):
            os.set_blocking(end, False)
        self._closed = False
        self._lock = threading.Lock()

    def set(self) -> None:
        """From any thread; harmless after :meth:`close`."""
        with (
            self._lock,
            contextlib.suppress(BlockingIOError),
        ):  # full: it is readable, which is all that counts
            if not self._closed:
                os.write(self._writer, b"!")

    def clear(self) -> None:
        """By the loop, before it looks at what came."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._writer)


class Worker:
    """A thread that does one thing after the other. Threads are not free: gloo keeps something of every one that it has seen."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="caesura-worker", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        """Do ``work``, which must not raise, after what was submitted before."""
        self._queue.put(work)

    def close(self) -> None:
        """End, after what was submitted before."""
        self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def in_thread(work: Callable[[], None]) -> None:
    """Do ``work`` in a thread of its own, which does not keep the process alive."""
    threading.Thread(target=work, name="caesura-feed", daemon=True).start()


class Task(Generic[Item]):
    """One call in a thread of its own; the loop sleeps until it is done."""

    def __init__(self, work: Callable[[], Item], wake: Callable[[], None]) -> None:
        began = monotonic()
        self.seconds = 0.0
        """How long it took."""
        self._outcome: tuple[Item] | BaseException | None = None

        def run() -> None:
            try:
                self._outcome = (work(),)
            except BaseException as error:  # noqa: BLE001  it crosses to the loop, which raises it
                self._outcome = error
            self.seconds = monotonic() - began
            wake()

        in_thread(run)

    @property
    def done(self) -> bool:
        """There is a result, or an error."""
        return self._outcome is not None

    def result(self) -> Item:
        """What the call returned, once it is done.

        Raises:
            BaseException: what it raised.
        """
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome[0]


class Feed(Generic[Item]):
    """What an iterator yields in another thread, taken by the loop without waiting.

    The iterator runs at most ``ahead`` items before the loop: it goes on to the next one when an earlier one was *released*,
    which says that its buffers may be used again.
    """

    def __init__(
        self,
        items: Iterator[Item],
        wake: Callable[[], None],
        *,
        ahead: int = 1,
        submit: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """``submit`` runs a callable in a thread: one of its own, or a :class:`Worker`'s."""
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
        """Nothing more will come and everything was taken."""
        return self._ended and not self._ready

    @property
    def is_running(self) -> bool:
        """Its thread works, or waits; also after :meth:`cancel`, until a blocking call returns."""
        return not self._ended

    def take(self) -> Item | None:
        """The next item, or None: nothing has come yet, or nothing more will.

        Raises:
            BaseException: what the iterator raised, once all items before it were taken.
        """
        ended = self._ended  # read before the queue: an item put in between is found next time
        if self._ready:
            return self._ready.popleft()
        if ended and self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def release(self) -> None:
        """The oldest item that was taken is not needed any more."""
        self._room.release()

    def cancel(self) -> None:
        """Nobody will take anything any more."""
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
        except BaseException as error:  # noqa: BLE001  it crosses to the loop, which raises it
            self._error = error
        finally:
            self._ended = True
            self._wake()
