"""What the loop does when its time has come: one table of timers, which says how long the loop may sleep and what is due.

Invariants:
- A timer that fails is logged, and is not due again before :data:`HOLD_OFF_S` have passed: neither the loop nor the log
  spins on it.
- A timer says itself when it is due, each time it is asked; nothing has to be told when that changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from .guard import Guard

HOLD_OFF_S = 1.0


@dataclass(slots=True)
class Timer:
    """Something that is due from a moment on, until it has been done."""

    what: str
    """For the log."""
    due: Callable[[], float | None]
    """When, on the monotonic clock. None: it is not set."""
    act: Callable[[], object]
    not_before: float = 0.0
    """On the same clock; after a failure."""


class Timers:
    """All timers of a loop, in the order in which they act."""

    def __init__(self, guard: Guard, timers: Sequence[Timer]) -> None:
        self._guard = guard
        self._timers = timers

    def next_due(self) -> float | None:
        """When the first of them is due, on the monotonic clock; None: none is set."""
        moments = [max(due, timer.not_before) for timer in self._timers if (due := timer.due()) is not None]
        return min(moments, default=None)

    def fire(self, now: float) -> None:
        """Do what is due at ``now``."""
        for timer in self._timers:
            due = timer.due()
            if due is None or max(due, timer.not_before) > now:
                continue
            if not self._guard.run(timer.what, timer.act):
                timer.not_before = monotonic() + HOLD_OFF_S
