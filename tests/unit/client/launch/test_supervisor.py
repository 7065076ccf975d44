"""Starting schedulers again, and when not; the child is a fake scheduler that behaves as told."""

import contextlib
import os
import queue
import signal
import socket
import sys

import psutil
import pytest
import support.fake_scheduler
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    Busy,
    CheckpointError,
    EngineDied,
    EngineError,
    EnginePaused,
    InvalidRequest,
    QueueFull,
    SchedulerClient,
    ShuttingDown,
    WeightMismatch,
)
from caesura.client.launch.notify import notify, watchdog_interval_s
from caesura.client.launch.supervisor import (
    GAVE_UP_STATUS,
    Down,
    Ended,
    RestartPolicy,
    Serving,
    Supervisor,
    status_of,
    stop_timeout_s,
)

FAKE = support.fake_scheduler.__file__
QUICK = {"first_delay_s": 0.01, "longest_delay_s": 0.02, "hang_timeout_s": 0.0, "stop_timeout_s": 10.0}


class Watched:
    """A supervisor and what it has told."""

    def __init__(self, tmp_path, behave="well", **policy) -> None:
        self.directory = tmp_path / "run"
        self.directory.mkdir(mode=0o700)
        self.states: queue.Queue = queue.Queue()
        self.supervisor = Supervisor(
            [sys.executable, FAKE, "--behave", behave],
            f"ipc://{self.directory}/s",
            policy=RestartPolicy(**{**QUICK, **policy}),
            directory=self.directory,
        )

    def next(self, kind):
        state = self.states.get(timeout=PATIENCE)
        assert isinstance(state, kind), state
        return state

    def begin(self) -> "Watched":
        self.supervisor.subscribe(self.states.put)
        self.supervisor.begin()
        return self


@pytest.fixture
def watch(tmp_path):
    with contextlib.ExitStack() as cleanup:

        def watched(*arguments, **policy) -> Watched:
            made = Watched(tmp_path, *arguments, **policy)
            cleanup.callback(made.supervisor.close)
            return made

        yield watched


def test_a_killed_scheduler_comes_back_at_the_same_endpoint(watch, caplog):
    watched = watch()
    first = watched.supervisor.start()
    watched.supervisor.subscribe(watched.states.put)
    assert watched.next(Serving) == first
    with SchedulerClient(first.endpoint, connect_timeout=PATIENCE) as client:
        assert client.status(timeout=PATIENCE).pid == first.pid
        os.kill(first.pid, signal.SIGKILL)
        assert "killed by signal 9" in watched.next(Down).reason
        second = watched.next(Serving)
        assert (second.endpoint, second.restarts) == (first.endpoint, 1)
        while True:  # a call may still meet the loss of the first connection
            with contextlib.suppress(EngineDied):
                assert client.status(timeout=PATIENCE).pid == second.pid != first.pid
                break
    lines = [record.message for record in caplog.records if "restart 1 of 5" in record.message]
    assert len(lines) == 1
    assert "killed by signal 9" in lines[0]
    watched.supervisor.close()
    assert watched.next(Ended).error is None
    assert not psutil.pid_exists(second.pid)
    assert not watched.directory.exists()


def test_the_last_words_of_a_crash_are_in_the_reason(watch):
    watched = watch("die-on-generate").begin()
    serving = watched.next(Serving)
    with SchedulerClient(serving.endpoint) as client, pytest.raises(EngineDied) as caught:
        client.generate([1], timeout=PATIENCE)
    assert caught.value.retryable
    assert watched.next(Down).reason == "ended with status 3, last line: last words"
    watched.next(Serving)


@pytest.mark.parametrize(
    ("behave", "kind", "status"), [("refuse", CheckpointError, 1), ("no-such-behaviour", EngineDied, 2)]
)
def test_a_refused_start_is_not_retried(watch, behave, kind, status):
    error = watch(behave).begin().next(Ended).error
    assert isinstance(error, kind)
    assert status_of(error) == status


def test_a_crash_loop_ends_with_the_last_reason(watch):
    watched = watch("crash", max_restarts=2).begin()
    delays = [watched.next(Down).delay_s for _ in range(2)]
    assert delays == [0.01, 0.02]
    error = watched.next(Ended).error
    assert isinstance(error, EngineDied)
    assert "out of paper" in error.message
    assert "restarted 2 times" in error.message
    assert status_of(error) == GAVE_UP_STATUS


def test_restarts_outside_the_window_do_not_count(watch):
    watched = watch(max_restarts=1, window_s=0.0).begin()
    for _ in range(3):
        os.kill(watched.next(Serving).pid, signal.SIGKILL)
        assert watched.next(Down).delay_s == 0.01
    watched.next(Serving)


def test_a_start_that_times_out_is_retried(watch):
    watched = watch("hang", startup_timeout_s=0.5, max_restarts=1).begin()
    assert "was not ready within 0.5 s" in watched.next(Down).reason
    assert "giving up" in watched.next(Ended).error.message


def test_a_stopped_process_is_killed_and_replaced(watch):
    watched = watch(hang_timeout_s=1.0).begin()
    first = watched.next(Serving)
    os.kill(first.pid, signal.SIGSTOP)
    assert "did not answer its status for 1 s" in watched.next(Down).reason
    assert watched.next(Serving).pid != first.pid
    assert not psutil.pid_exists(first.pid)


def test_hang_timeout_0_disables_the_probe(watch):
    watched = watch(hang_timeout_s=0.0).begin()
    first = watched.next(Serving)
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        watched.states.get(timeout=1.0)
    os.kill(first.pid, signal.SIGKILL)
    watched.next(Down)


@pytest.mark.parametrize(
    "behave,policy,told",
    [
        ("ignore-signals", {"stop_timeout_s": 0.3}, "which was to end, was killed by signal 9 (SIGKILL"),
        ("deaf", {"stop_silence_s": 0.3}, "has neither ended nor answered for 0.3 s after SIGTERM"),
    ],
)
def test_a_scheduler_that_does_not_end_is_killed(watch, caplog, behave, policy, told):
    policy = {"stop_timeout_s": PATIENCE, "hang_timeout_s": PATIENCE, **policy}
    watched = watch(behave, **policy).begin()
    pid = watched.next(Serving).pid
    watched.supervisor.close()
    assert watched.next(Ended).error is None
    assert not psutil.pid_exists(pid)
    assert told in caplog.text
    assert ("nor answered" in caplog.text) == (behave == "deaf")


def test_a_stopped_process_ends_by_the_signal_that_asks_for_it(watch, caplog):
    watched = watch(stop_timeout_s=float("inf")).begin()
    os.kill(watched.next(Serving).pid, signal.SIGSTOP)
    watched.supervisor.close()
    assert watched.next(Ended).error is None
    assert "killed by signal 15" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ([], 60.0),
        (["--drain-timeout-s", "3600"], 60.0),  # it does not drain
        (["--shutdown-mode", "drain"], 90.0),
        (["--shutdown-mode=drain", "--drain-timeout-s=3600"], 3660.0),
        (["--drain-timeout-s", "1", "--shutdown-mode", "drain", "--drain-timeout-s", "7200"], 7260.0),
        (["--shutdown-mode", "drain", "--shutdown-mode", "abort"], 60.0),
        (["--shutdown-mode", "drain", "--drain-timeout-s", "soon"], 60.0),
        (["--shutdown-mode", "drain", "--drain-timeout-s"], 90.0),
        (["--shutdown-mode", "drain", "--drain-timeout-s", "inf"], float("inf")),
    ],
)
def test_the_stop_timeout_exceeds_the_drain_timeout(arguments, seconds):
    assert stop_timeout_s(arguments) == seconds


def test_a_supervisor_between_retries_ends_at_once(watch):
    watched = watch("crash", first_delay_s=3600.0, longest_delay_s=3600.0).begin()
    watched.next(Down)
    watched.supervisor.close()
    assert watched.next(Ended).error is None


def test_delays_double_up_to_the_longest():
    policy = RestartPolicy(first_delay_s=0.5, longest_delay_s=30.0)
    assert [policy.delay(count) for count in (0, 1, 2, 6, 7, 10_000)] == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def test_exceptions_say_whether_a_retry_may_help():
    assert all(kind("x").retryable for kind in (EngineDied, Busy, QueueFull, ShuttingDown, EnginePaused))
    assert not any(kind("x").retryable for kind in (EngineError, InvalidRequest, WeightMismatch))


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path, monkeypatch, abstract):
    name = f"\0caesura-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        manager.settimeout(PATIENCE)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        assert notify("READY=1", "STATUS=fine")
        assert manager.recv(1024) == b"READY=1\nSTATUS=fine"
    assert not notify("READY=1")  # nobody is there any more


def test_without_a_service_manager_nothing_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "relative")
    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("microseconds", "pid", "interval"),
    [
        ("30000000", None, 10.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_the_watchdog_interval_is_a_third_of_the_managers_limit(monkeypatch, microseconds, pid, interval):
    for name, value in (("WATCHDOG_USEC", microseconds), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert watchdog_interval_s() == interval
