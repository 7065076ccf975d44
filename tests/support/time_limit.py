"""The limit of a test, counted in alarms rather than seconds: a machine that stands still or is busy
lengthens it.

pytest-timeout decides what has a limit and reports a test that exceeds it; the hooks below are its timer.
Tests wait without limits of their own: this one ends them.

Invariants:
- A process that is stopped, or whose machine is, gets at most one alarm for the whole time, however long.
- An alarm counts for less when fixed work takes longer than it once did in this process.
- The timer goes on after a failure: fixtures that hang while they are torn down are ended, too.
"""

import signal
import time
from types import FrameType
from typing import Any

import pytest
import pytest_timeout

ALARMS = 20
"""Alarms of a limit, on a machine as fast as it has been."""
_WORK = range(200_000)


class Slowness:
    """Ratio of the time of fixed work now to the fastest time that it has taken here."""

    def __init__(self) -> None:
        self._fastest_s = min(self._work_s() for _ in range(3))

    def measure(self) -> float:
        """Return how many times slower this process runs now; at least 1."""
        now_s = self._work_s()
        self._fastest_s = min(self._fastest_s, now_s)
        return now_s / self._fastest_s

    def _work_s(self) -> float:
        began = time.perf_counter()
        for _ in _WORK:
            pass
        return time.perf_counter() - began


slowness = Slowness()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    left = float(ALARMS)

    def alarm(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left -= 1 / slowness.measure()
        if left <= 0:
            left = float(ALARMS)
            pytest_timeout.timeout_sigalrm(item, settings)

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout / ALARMS, settings.timeout / ALARMS)
    return True


def pytest_timeout_cancel_timer() -> bool:
    """Go on counting: a test that has failed is still to be torn down."""
    return True


def pytest_runtest_logfinish() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
