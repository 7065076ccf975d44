"""A long call made in slices: a thread of its own goes on with it only while somebody waits for that.

Python cannot leave a call in the middle and come back to it; a thread can be stopped in it. So this thread is no second line of
work: either it or its owner runs, never both, and what the call sees is never changed under its hands.

Invariants:
- Between two slices the thread waits at a place where the call has said that it may (:meth:`Sliced.rest`).
- The thread ends with its call, with its owner, or with the process.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

Found = TypeVar("Found")


class _BrokenOffError(BaseException):
    """Nobody waits for the call any more. No :class:`Exception`: what the call contains must not take it for a failure of its own."""


class _Exchange(Generic[Found]):
    """What thread and owner share. The thread has no reference to the owner, so the owner's end can end it."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.stopped = threading.Semaphore(0)
        self.until = 0.0
        self.broken_off = False
        self.outcome: tuple[Found] | BaseException | None = None

    def rest(self) -> None:
        if monotonic() >= self.until:
            self.stopped.release()
            self.wait()

    def wait(self) -> None:
        self.go.acquire()
        if self.broken_off:
            raise _BrokenOffError

    def run(self, work: Callable[[], Found]) -> None:
        try:
            self.wait()
            self.outcome = (work(),)
        except BaseException as error:  # noqa: BLE001  result() raises it in the owner's thread
            self.outcome = error
        finally:
            self.stopped.release()


class Sliced(Generic[Found]):
    """One call."""

    def __init__(self, work: Callable[[Callable[[], None]], Found]) -> None:
        """``work`` is given the function to call wherever it may rest, which has no effect in other threads."""
        exchange: _Exchange[Found] = _Exchange()
        thread: threading.Thread

        def rest() -> None:
            if threading.current_thread() is thread:
                exchange.rest()

        thread = threading.Thread(
            target=exchange.run, args=(partial(work, rest),), name="caesura-sliced", daemon=True
        )
        self._exchange = exchange
        self._end = weakref.finalize(self, _break_off, exchange, thread)
        thread.start()

    @property
    def done(self) -> bool:
        """Whether the call has ended, with a result or an error."""
        return self._exchange.outcome is not None

    def proceed(self, budget_s: float) -> bool:
        """Go on with the call until it rests after ``budget_s`` seconds or has ended; returns whether it has."""
        exchange = self._exchange
        if not self.done:
            exchange.until = monotonic() + budget_s
            exchange.go.release()
            exchange.stopped.acquire()
        return self.done

    def result(self) -> Found:
        """The call's return value; it must be done.

        Raises:
            BaseException: what the call raised.
        """
        outcome = self._exchange.outcome
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]


def _break_off(exchange: _Exchange[Found], thread: threading.Thread) -> None:
    """Let the thread leave its call. At the interpreter's exit, too: a thread that is stopped inside torch then aborts the process."""
    exchange.broken_off = True
    exchange.go.release()
    if thread is not threading.current_thread():
        thread.join()
