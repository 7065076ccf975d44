"""Timers: when the loop may sleep until, what is due, and what a failure costs."""

import pytest

from caesura.scheduler.runtime import housekeeping
from caesura.scheduler.runtime.guard import Guard
from caesura.scheduler.runtime.housekeeping import HOLD_OFF_S, Timer, Timers


@pytest.fixture
def now(monkeypatch):
    moments = [100.0]
    monkeypatch.setattr(housekeeping, "monotonic", lambda: moments[0])
    return moments


def test_the_first_that_is_due_says_how_long_to_sleep():
    table = Timers(
        Guard(),
        [Timer("a", lambda: 7.0, list), Timer("b", lambda: None, list), Timer("c", lambda: 5.0, list)],
    )
    assert table.next_due() == 5.0
    assert Timers(Guard(), [Timer("b", lambda: None, list)]).next_due() is None


def test_only_what_is_due_acts():
    acted = []
    table = Timers(
        Guard(),
        [
            Timer("past", lambda: 99.0, lambda: acted.append("past")),
            Timer("now", lambda: 100.0, lambda: acted.append("now")),
            Timer("later", lambda: 100.1, lambda: acted.append("later")),
            Timer("never", lambda: None, lambda: acted.append("never")),
        ],
    )
    table.fire(100.0)
    assert acted == ["past", "now"]


def test_a_failure_holds_one_timer_off_and_no_other(now, caplog):
    acted = []

    def fail() -> None:
        acted.append("bad")
        raise RuntimeError("an injected defect")

    table = Timers(
        Guard(), [Timer("bad", lambda: 1.0, fail), Timer("good", lambda: 1.0, lambda: acted.append("good"))]
    )
    for _ in range(3):
        table.fire(now[0])
    assert acted == ["bad", "good", "good", "good"]
    assert caplog.text.count("bad failed") == 1
    assert Timers.next_due(table) == 1.0, "the other one is due"
    now[0] += HOLD_OFF_S
    table.fire(now[0])
    assert acted[4:] == ["bad", "good"]


def test_the_guard_stops_errors_and_lets_through_what_is_fatal():
    guard = Guard(fatal=(KeyError,))
    assert guard.run("fine", len, "abc")
    assert not guard.run("wrong", len, 5)
    with pytest.raises(KeyError):
        guard.run("fatal", {}.__getitem__, "x")
    with pytest.raises(SystemExit):
        guard.run("the end", exit)
