"""Orders to end: which one decides, and when."""

import os
import signal

import pytest

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.runtime import housekeeping
from caesura.scheduler.runtime.guard import Guard
from caesura.scheduler.runtime.housekeeping import HOLD_OFF_S, Timer, Timers
from caesura.scheduler.runtime.shutdown import FATAL_SIGNALS, Shutdown, name_fatal_signals

LONG = 3600.0


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_nothing_is_asked_for_at_first():
    shutdown = Shutdown(drain=True, drain_timeout_s=LONG)
    shutdown.refuse_work()
    assert (shutdown.requested, shutdown.is_draining, shutdown.left_s) == (False, False, 0.0)


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_an_order_says_how_or_the_configuration_does(configured, asked):
    shutdown = Shutdown(drain=configured, drain_timeout_s=LONG)
    shutdown.request("x", drain=asked)
    assert shutdown.requested
    assert shutdown.is_draining is (configured if asked is None else asked)
    with pytest.raises(CaesuraError) as caught:
        shutdown.refuse_work()
    assert caught.value.code == ErrorCode.SHUTTING_DOWN


def test_a_later_order_can_only_bring_the_end_nearer():
    shutdown = Shutdown(drain_timeout_s=LONG)
    shutdown.request("first", drain=True)
    shutdown.request("later", drain=True, timeout_s=2 * LONG)
    assert (shutdown.reason, shutdown.left_s > LONG) == ("first", False)
    shutdown.request("sooner", drain=True, timeout_s=60.0)
    assert shutdown.reason == "sooner"
    assert shutdown.left_s <= 60.0
    shutdown.request("now", drain=False)
    shutdown.request("too late", drain=True)
    assert (shutdown.reason, shutdown.is_draining) == ("now", False)


def test_the_first_signal_is_as_configured_the_second_means_now(pipe):
    reader, writer = pipe
    shutdown = Shutdown(drain=True, drain_timeout_s=LONG, signal_fd=reader)
    shutdown.on_readable(reader)  # readable no more
    assert not shutdown.requested
    os.write(writer, bytes([signal.SIGHUP]))
    shutdown.on_readable(reader)
    assert (shutdown.reason, shutdown.is_draining) == ("signal SIGHUP", True)
    os.write(writer, bytes([signal.SIGTERM]))
    shutdown.on_readable(reader)
    assert (shutdown.reason, shutdown.is_draining) == ("signal SIGTERM", False)


def test_two_signals_at_once_are_two(pipe):
    reader, writer = pipe
    shutdown = Shutdown(drain=True, drain_timeout_s=LONG, signal_fd=reader)
    os.write(writer, bytes([signal.SIGTERM, signal.SIGINT]))
    shutdown.on_readable(reader)
    assert not shutdown.is_draining


def test_the_launchers_death_means_now(pipe):
    shutdown = Shutdown(drain=True, drain_timeout_s=LONG, lifeline_fd=pipe[0])
    shutdown.on_readable(pipe[0])
    assert shutdown.requested
    assert not shutdown.is_draining
    assert "launcher" in shutdown.reason


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in FATAL_SIGNALS}
    yield lambda handler: [signal.signal(number, handler) for number in FATAL_SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)


def test_only_signals_that_would_kill_are_named(handlers, monkeypatch):
    handlers(signal.SIG_IGN)
    name_fatal_signals(print)
    assert {signal.getsignal(number) for number in FATAL_SIGNALS} == {signal.SIG_IGN}
    handlers(signal.SIG_DFL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        name_fatal_signals(print)
        assert {signal.getsignal(number) for number in FATAL_SIGNALS} == {signal.SIG_DFL}
    name_fatal_signals(print)
    assert signal.SIG_DFL not in {signal.getsignal(number) for number in FATAL_SIGNALS}


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
