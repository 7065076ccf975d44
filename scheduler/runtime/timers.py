"""The loop's timers: how long the loop may sleep, and which actions are due.

Invariants:
- A failed timer is logged, and is not due again before :data:`HOLD_OFF_S` have passed, so that the loop does not spin on it.
- A timer computes its due time each time it is asked, so no code has to report a change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from .guard import Guard

HOLD_OFF_S = 1.0


@dataclass(slots=True)
class Timer:
    """An action that is due from a point in time on, until it has been done."""

    what: str
    """Name of the action, for the log."""
    due: Callable[[], float | None]
    """Returns the due time on the monotonic clock; None if the timer is not set."""
    act: Callable[[], object]
    not_before: float = 0.0
    """Earliest time of the next attempt after a failure, on the same clock."""


class Timers:
    """The timers of a loop, in the order in which they fire."""

    def __init__(self, guard: Guard, timers: Sequence[Timer]) -> None:
        self._guard = guard
        self._timers = timers

    def next_due(self) -> float | None:
        """Due time of the first timer, on the monotonic clock; None if no timer is set."""
        moments = [max(due, timer.not_before) for timer in self._timers if (due := timer.due()) is not None]
        return min(moments, default=None)

    def fire(self, now: float) -> None:
        """Run the actions that are due at ``now``."""
        for timer in self._timers:
            due = timer.due()
            if due is None or due > now or timer.not_before > now:
                continue
            if not self._guard.run(timer.what, timer.act):
                timer.not_before = monotonic() + HOLD_OFF_S
