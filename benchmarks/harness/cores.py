"""Cores of its own for the process that is measured, as on a host of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class OwnCore:
    """The first usable core for this process, the others for those that it starts; without ``apart``, all cores for all."""

    def __init__(self, *, apart: bool) -> None:
        """
        Raises:
            ValueError: there is only one core.
        """
        first, *others = sorted(os.sched_getaffinity(0))
        if apart and not others:
            raise ValueError("this process may use one core only, so nobody else has any")
        self._first = {first}
        self._others = set(others) if apart else None
        self._keep_to_it()

    @contextmanager
    def starting_others(self) -> Iterator[None]:
        """What the calling thread starts meanwhile keeps to the other cores."""
        if self._others is None:
            yield
            return
        os.sched_setaffinity(0, self._others)
        try:
            yield
        finally:
            self._keep_to_it()

    def _keep_to_it(self) -> None:
        """All threads of this process, also those that were started while others were."""
        if self._others is not None:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), self._first)
