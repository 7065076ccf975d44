"""Starting, watching, ending and starting again a child: a fake scheduler that behaves as told."""

import contextlib
import logging
import os
import queue
import re
import shutil
import signal
import socket
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
import support.fake_scheduler
from support import engine_template
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura import __version__
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
    TimedOut,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.launch import restart_policy
from caesura.client.launch.launcher import Child, LaunchedScheduler, command_line, how_it_ended
from caesura.client.launch.restart_policy import RestartPolicy, answers_until_it_ends
from caesura.client.launch.supervise import GAVE_UP_STATUS, status_of
from caesura.client.launch.supervisor import Down, Ended, Serving, Supervisor
from caesura.process.compilers import compiler_below

RUN = f"import runpy; runpy.run_path({support.fake_scheduler.__file__!r}, run_name='__main__')"
FAKE = [sys.executable, "-c", RUN]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def launch(directory, behave="well", **options):
    command = [*FAKE, "--endpoint", f"ipc://{directory}/s", "--behave", behave]
    return LaunchedScheduler(command, directory=directory, **options)


def gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(PATIENCE)
    return not psutil.pid_exists(pid)


def test_the_process_lives_as_long_as_the_block(directory):
    launched = launch(directory)
    with launched as client:
        assert isinstance(client, SchedulerClient)
        assert client.status(timeout=PATIENCE).pid == launched.pid
        assert launched.endpoint == f"ipc://{directory}/s"
        assert launched.returncode is None
    assert launched.returncode == 0
    assert not directory.exists()
    with pytest.raises(EngineDied):
        client.status()
    launched.close()


def test_the_thread_that_sees_the_end_may_end_the_rest(directory):
    child = Child([*FAKE, "--endpoint", f"ipc://{directory}/s"], directory)
    child.wait_ready(PATIENCE)
    finished = threading.Event()

    class Collected:
        def expect_exit(self):
            pass

        def engine_exited(self, reason):
            child.end()
            finished.set()

    collected = Collected()
    child.report_exit_to(collected)
    child.process.kill()
    assert finished.wait(PATIENCE)
    assert not directory.exists()


def test_a_client_kept_alone_keeps_its_engine(directory):
    client = launch(directory).client
    pid = client.status(timeout=PATIENCE).pid
    assert client.generate([1], timeout=PATIENCE).output_ids == [1, 0]
    client.shutdown(timeout=PATIENCE)
    assert gone(pid)
    client.close()


def test_a_refused_start_raises_the_engines_own_error(directory):
    with pytest.raises(CheckpointError) as caught:
        launch(directory, "refuse")
    assert caught.value.detail == {"path": "/nowhere"}
    assert not directory.exists()


def test_a_crash_at_start_tells_exit_code_and_last_words(directory, capsys):
    with pytest.raises(
        EngineDied, match="ended with status 1 before it was ready: RuntimeError: out of paper"
    ) as caught:
        launch(directory, "crash")
    assert caught.value.detail["returncode"] == 1
    assert caught.value.detail["stderr"] == "RuntimeError: out of paper\n"
    assert capsys.readouterr().err == "RuntimeError: out of paper\n"  # and the parent's stderr has it too
    assert not directory.exists()


def test_a_log_file_takes_the_childs_output(directory, tmp_path, capsys):
    log = tmp_path / "engine.log"
    log.write_text("what was there\nand was cut off")
    with pytest.raises(EngineDied, match="out of paper"):
        launch(directory, "crash", log_path=log)
    *before, first, last = log.read_text().splitlines()
    assert (before, last) == (["what was there", "and was cut off"], "RuntimeError: out of paper")
    assert FIRST_LINE.fullmatch(first)
    assert capsys.readouterr().err == ""


FIRST_LINE = re.compile(
    rf"===== \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d caesura {re.escape(__version__)} scheduler, pid (\d+) +on "
    r"ipc://\S+/s ====="
)


@pytest.mark.parametrize("name", ["/dev/null", "fifo"])
def test_a_log_need_not_be_a_file(directory, tmp_path, name):
    path = tmp_path / name
    reader = None
    if name == "fifo":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    launched = launch(directory, log_path=path)
    launched.close()
    if reader is not None:
        (line,) = os.read(reader, 65536).decode().splitlines()
        assert int(FIRST_LINE.fullmatch(line)[1]) == launched.pid
        os.close(reader)


def test_an_unwritable_log_file_leaves_nothing(directory, tmp_path):
    with pytest.raises(FileNotFoundError):
        launch(directory, log_path=tmp_path / "missing" / "engine.log")
    assert not directory.exists()


@pytest.mark.executed
def test_a_start_that_takes_too_long_is_ended(directory):
    before = set(psutil.Process().children())
    with pytest.raises(TimedOut, match="not ready"):
        launch(directory, "hang", startup_timeout=0.2)
    assert set(psutil.Process().children()) <= before


def test_death_in_use_fails_waiters_with_the_exit_code(directory, capsys):
    with launch(directory, "die-on-generate") as client:
        with pytest.raises(EngineDied, match="ended with status 3 while it was in use: last words"):
            client.generate([1], timeout=PATIENCE)
        # for good: nothing will listen there again
        with pytest.raises(EngineDied, match="ended with status 3"):
            client.status(timeout=PATIENCE)


def ends_logged(caplog):
    return eventually(lambda: [each for each in caplog.records if "the scheduler process" in each.message])


def test_only_an_unasked_end_is_logged_as_a_warning(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="caesura")
    for folder in "abc":
        (tmp_path / folder).mkdir(mode=0o700)
    launched = launch(tmp_path / "a")
    os.kill(launched.pid, signal.SIGKILL)
    (told,) = ends_logged(caplog)
    killed = "was killed by signal 9 (SIGKILL: by somebody, or by the kernel for lack of memory)"
    assert told.message == f"the scheduler process (pid {launched.pid}) {killed}"
    assert told.levelname == "WARNING"
    launched.close()
    caplog.clear()
    launched = launch(tmp_path / "b")
    launched.close()
    assert launched.returncode == 0
    launched = launch(tmp_path / "c")
    launched.client.shutdown(timeout=PATIENCE)
    (told,) = ends_logged(caplog)
    assert told.message == f"the scheduler process (pid {launched.pid}) ended with status 0"
    assert told.levelname == "INFO"
    launched.close()


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "ended with status 0"),
        (70, "ended with status 70 (its loop or its shutdown hung)"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-40, "was killed by signal 40 (a real-time signal)"),
        (None, "has not ended"),
    ],
)
def test_how_a_process_has_ended_in_words(returncode, text):
    assert how_it_ended(returncode) == text


def test_an_engine_that_ignores_everything_is_killed(directory, monkeypatch, caplog):
    monkeypatch.setattr("caesura.client.launch.launcher.SHUTDOWN_S", 0.2)
    launched = launch(directory, "ignore-signals")
    launched.close()
    assert launched.returncode == -signal.SIGKILL
    assert f"(pid {launched.pid}) had not ended 0.2 s after SIGTERM, and is killed" in caplog.text
    assert not directory.exists()


def test_a_child_ends_with_a_parent_that_did_not_close(directory):
    parent = textwrap.dedent(f"""
        from caesura.client.launch.launcher import LaunchedScheduler
        launched = LaunchedScheduler({[*FAKE, "--endpoint", f"ipc://{directory}/s"]!r})
        print(launched.pid, flush=True)
    """)
    assert gone(int(engine_template.run(parent).stdout))


def test_options_become_the_schedulers_arguments():
    given = {"dtype": "float32", "prefix_cache": False, "check_ledger": True, "context_len": 64, "tp": None}
    assert command_line("m", given) == [
        *("--model", "m", "--dtype", "float32", "--no-prefix-cache", "--check-ledger", "--context-len", "64"),
    ]


@pytest.mark.parametrize(
    "model,options,error",
    [
        (None, {}, pytest.raises(TypeError, match="PathLike")),
        (3, {}, pytest.raises(TypeError, match="PathLike")),
        ("/model", {"startup_timeout": float("nan")}, pytest.raises(InvalidRequest, match="startup_timeout")),
        ("/model", {"node_rank": 1}, pytest.raises(InvalidRequest, match="node_rank = 1 has no client")),
    ],
)
def test_a_wrong_argument_makes_nothing(model, options, error, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with error:
        launch_scheduler(model, **options)
    assert list(tmp_path.iterdir()) == []


def test_close_waits_for_a_drain_that_hurry_ends(directory):
    launched = launch(directory, "drain")
    closing = threading.Thread(target=launched.close, kwargs={"drain": True, "drain_s": 3600.0})
    closing.start()
    eventually((directory / "draining").exists)
    assert launched.returncode is None
    launched.hurry()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert launched.returncode == -signal.SIGTERM
    launched.hurry()  # there is nobody any more


@pytest.mark.parametrize(
    "keyword,meant",
    [
        ("model_path", "did you mean model?"),
        ("tensor_parallel_size", "did you mean tp?"),
        ("tp_size", "did you mean tp?"),
        ("gpu_memory_utilization", "did you mean kv_memory_fraction?"),
        ("mem_fraction_static", "did you mean kv_memory_fraction?"),
        ("max_model_len", "did you mean context_len?"),
        ("max_num_seqs", "did you mean max_running_requests?"),
        ("enforce_eager", "turn cuda_graphs off"),
        ("trust_remote_code", "no code of a checkpoint is ever executed"),
        ("context_lenn", "did you mean context_len?"),
        ("kv_pages", ""),
    ],
)
def test_a_foreign_keyword_is_refused_with_ours(keyword, meant):
    with pytest.raises(TypeError, match=f"launch_scheduler: {keyword} is not known.*{re.escape(meant)}"):
        launch_scheduler(**{"model": "m", keyword: 1})


QUICK = {"first_delay_s": 0.01, "longest_delay_s": 0.02, "hang_timeout_s": 0.0, "stop_timeout_s": 10.0}


class Watched:
    """A supervisor and what it has told."""

    def __init__(self, behave="well", **policy) -> None:
        self.states: queue.Queue = queue.Queue()
        self.supervisor = Supervisor(["--behave", behave], policy=RestartPolicy(**{**QUICK, **policy}))
        self.directory = Path(self.supervisor.endpoint.removeprefix("ipc://")).parent

    def next(self, kind):
        state = self.states.get(timeout=PATIENCE)
        assert isinstance(state, kind), state
        return state

    def begin(self) -> "Watched":
        self.supervisor.subscribe(self.states.put)
        self.supervisor.begin()
        return self


@pytest.fixture
def watch(monkeypatch):
    command = "caesura.client.launch.supervisor.engine_command"
    monkeypatch.setattr(command, lambda *arguments: [*FAKE, *arguments])
    with contextlib.ExitStack() as cleanup:

        def watched(*arguments, **policy) -> Watched:
            made = Watched(*arguments, **policy)
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


@pytest.mark.parametrize(
    ("behave", "kind", "status"), [("refuse", CheckpointError, 1), ("no-such-behaviour", EngineDied, 2)]
)
def test_a_refused_start_is_not_retried(watch, behave, kind, status):
    error = watch(behave).begin().next(Ended).error
    assert isinstance(error, kind)
    assert status_of(error) == status


def test_a_crash_loop_ends_with_the_last_reason(watch):
    watched = watch("crash", max_restarts=2).begin()
    downs = [watched.next(Down) for _ in range(2)]
    assert [down.delay_s for down in downs] == [0.01, 0.02]
    assert all("out of paper" in down.reason for down in downs)
    error = watched.next(Ended).error
    assert isinstance(error, EngineDied)
    assert "out of paper" in error.message
    assert "restarted 2 times" in error.message
    assert status_of(error) == GAVE_UP_STATUS


def test_restarts_outside_the_window_do_not_count(watch):
    watched = watch(max_restarts=1, restart_window_s=0.0).begin()
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


def test_an_engine_that_compiles_kernels_is_not_killed(directory, tmp_path, monkeypatch):
    (tmp_path / "nvcc").symlink_to(shutil.which("cat"))
    os.mkfifo(tmp_path / "input")
    script = f"{tmp_path}/nvcc <{tmp_path}/input; exec sleep 3600"
    child, looks, answered = Child(["sh", "-c", script], directory), [], queue.Queue()

    def counted(pid: int) -> str | None:
        looks.append(pid)
        return compiler_below(pid)

    monkeypatch.setattr(restart_policy, "compiler_below", counted)
    try:
        with (tmp_path / "input").open("w"):
            eventually(lambda: compiler_below(child.process.pid) == "nvcc")

            def probe() -> None:
                answered.put(answers_until_it_ends(child, f"ipc://{directory}/s", {}, 0.2))

            threading.Thread(target=probe).start()
            eventually(lambda: len(looks) >= 8)
            assert answered.empty()
        assert answered.get(timeout=PATIENCE) is False
    finally:
        child.end()


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


def test_a_stopped_process_ends_by_sigterm(watch, caplog):
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
    assert RestartPolicy().stop_s(arguments) == seconds


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


def in_environment(expression: str, **environment: str) -> str:
    """Return what an expression about ``notify`` is in a process with this environment."""
    code = f"from caesura.client.launch.notify import notify, watchdog_interval_s\nprint({expression})"
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("NOTIFY_", "WATCHDOG_"))
    }
    done = engine_template.run(code, env=inherited | environment)
    return done.stdout.strip()


def test_a_service_manager_may_have_an_abstract_address():
    name = f"\0caesura-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        manager.settimeout(PATIENCE)
        notified = {"NOTIFY_SOCKET": name.replace("\0", "@")}
        assert in_environment('notify("READY=1", "STATUS=fine")', **notified) == "True"
        assert manager.recv(1024) == b"READY=1\nSTATUS=fine"
    for environment in (notified, {}, {"NOTIFY_SOCKET": "relative"}):
        assert in_environment('notify("READY=1")', **environment) == "False", environment


def test_the_watchdog_interval_is_a_third_of_the_limit():
    for limit, interval in (("30000000", "10.0"), ("0", "None"), ("soon", "None")):
        assert in_environment("watchdog_interval_s()", WATCHDOG_USEC=limit) == interval
    assert in_environment("watchdog_interval_s()", WATCHDOG_USEC="30000000", WATCHDOG_PID="1") == "None"
    assert in_environment("watchdog_interval_s()") == "None"
