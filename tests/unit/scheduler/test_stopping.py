"""Orders to end: which one decides, and when."""

import os
import signal

import pytest

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.runtime.guard import Guard
from caesura.scheduler.runtime.housekeeping import Timer, Timers
from caesura.scheduler.runtime.shutdown import FATAL_SIGNALS, Shutdown, name_fatal_signals

LONG = 3600.0


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


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


@pytest.mark.parametrize("at_once", [False, True])
def test_a_first_signal_drains_and_a_second_means_now(pipe, at_once):
    reader, writer = pipe
    shutdown = Shutdown(drain=True, drain_timeout_s=LONG, signal_fd=reader)
    shutdown.on_readable(reader)  # readable no more
    shutdown.refuse_work()
    assert (shutdown.requested, shutdown.left_s) == (False, 0.0)
    os.write(writer, bytes([signal.SIGHUP]))
    if not at_once:
        shutdown.on_readable(reader)
        assert (shutdown.reason, shutdown.is_draining) == ("signal SIGHUP", True)
    os.write(writer, bytes([signal.SIGTERM]))
    shutdown.on_readable(reader)
    assert (shutdown.reason, shutdown.is_draining) == ("signal SIGTERM", False)


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


def test_only_timers_that_are_due_act():
    acted = []
    dues = {"past": 99.0, "now": 100.0, "later": 100.1, "never": None}
    table = Timers(
        Guard(),
        [Timer(name, lambda due=due: due, lambda n=name: acted.append(n)) for name, due in dues.items()],
    )
    assert table.next_due() == 99.0
    table.fire(100.0)
    assert acted == ["past", "now"]
    assert Timers(Guard(), [Timer("never", lambda: None, list)]).next_due() is None


def test_the_guard_lets_through_only_what_is_fatal():
    guard = Guard(fatal=(KeyError,))
    assert guard.run("fine", len, "abc")
    assert not guard.run("wrong", len, 5)
    with pytest.raises(KeyError):
        guard.run("fatal", {}.__getitem__, "x")
    with pytest.raises(SystemExit):
        guard.run("the end", exit)
