"""A monotonic clock that only a test moves."""

from collections.abc import Iterable

import pytest

from .scripted import EngineDriver


class Clock:
    """Called like ``time.monotonic``; ``now`` is what it says, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float, driver: EngineDriver, ticks: int = 1) -> None:
        """Let time pass, and the loop turn after it."""
        self.now += seconds
        driver.tick(ticks)


def clock_of(monkeypatch: pytest.MonkeyPatch, modules: Iterable[str]) -> Clock:
    """Put one clock in place of ``monotonic`` in these modules of ``caesura.scheduler``."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(f"caesura.scheduler.{module}.monotonic", clock)
    return clock
