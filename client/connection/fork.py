"""Objects that must not be used after a fork: clients, and descriptors by which others see the parent alive.

Invariants: in a forked child every use of them raises at once, before it takes a lock (whose thread may not
exist there); closing and forgetting do nothing. A child holds none of the parent's signs of life.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Process:
    """The process in which ``what`` was made, and in which alone it can be used."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def require(self) -> None:
        if os.getpid() != self._pid:
            reason = f"this {self._what} belongs to process {self._pid}; make a new client after a fork"
            raise RuntimeError(reason)


_lock = threading.RLock()
"""Held during a fork, so that no descriptor is made and copied before it is known here."""
_signs_of_life: set[int] = set()


@contextmanager
def not_forking() -> Iterator[None]:
    """Keep this process from forking inside of the block."""
    with _lock:
        yield


def keep_from_children(descriptor: int) -> None:
    """Give children /dev/null under this number; call it in the :func:`not_forking` block that makes it."""
    _signs_of_life.add(descriptor)


def close_sign_of_life(descriptor: int) -> None:
    with _lock:
        _signs_of_life.discard(descriptor)
        os.close(descriptor)


def _in_child() -> None:
    if _signs_of_life:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _signs_of_life:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        _signs_of_life.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
