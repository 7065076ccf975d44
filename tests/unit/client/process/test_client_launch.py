"""Starting, watching and ending a child process; the child is a fake scheduler that behaves as told."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import psutil
import pytest
import support.fake_scheduler
from support.waiting import eventually

from caesura.client import (
    CheckpointError,
    EngineDied,
    SchedulerClient,
    TimedOut,
    launch_scheduler,
)
from caesura.client.process.launch import Child, LaunchedScheduler

FAKE = support.fake_scheduler.__file__
PATIENCE = 30.0


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def launch(directory, behave="well", **options):
    command = [sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s", "--behave", behave]
    return LaunchedScheduler(command, directory=directory, **options)


def gone(pid):
    """Whether the process ends soon (polled: it is no child of this test's process)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(PATIENCE)
    return not psutil.pid_exists(pid)


def test_the_process_serves_within_the_block_and_ends_with_it(directory):
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


def test_without_a_block(directory):
    launched = launch(directory)
    other = SchedulerClient(launched.endpoint)
    assert other.generate([1], timeout=PATIENCE).output_ids == [1, 0]
    other.close()
    launched.close()
    assert gone(launched.pid)


def test_a_client_kept_alone_keeps_its_engine(directory):
    client = launch(directory).client
    pid = client.status(timeout=PATIENCE).pid
    assert client.generate([1], timeout=PATIENCE).output_ids == [1, 0]
    client.shutdown(timeout=PATIENCE)
    assert gone(pid)
    client.close()


def test_the_thread_that_reports_an_exit_may_be_the_one_that_cleans_up(directory):
    """It holds the client while it reports, so it may be the last that does."""
    ended, errors = threading.Event(), []

    class Client:
        def engine_exited(self, reason):
            try:
                child.end()
            except RuntimeError as error:
                errors.append(error)
            ended.set()

    command = [sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s", "--behave", "well"]
    child, client = Child(command, directory, None), Client()
    child.wait_ready(PATIENCE)
    child.report_exit_to(weakref.WeakMethod(client.engine_exited))
    child.process.kill()
    assert ended.wait(PATIENCE)
    assert errors == []
    assert not directory.exists()


def test_a_refused_start_raises_the_engines_own_error(directory):
    with pytest.raises(CheckpointError) as caught:
        launch(directory, "refuse")
    assert caught.value.detail == {"path": "/nowhere"}
    assert not directory.exists()


def test_a_crash_at_start_tells_exit_code_and_last_words(directory, capsys):
    with pytest.raises(
        EngineDied, match=r"before it was ready \(exit code 1\): RuntimeError: out of paper"
    ) as caught:
        launch(directory, "crash")
    assert caught.value.detail["returncode"] == 1
    assert caught.value.detail["stderr"] == "RuntimeError: out of paper\n"
    assert capsys.readouterr().err == "RuntimeError: out of paper\n"  # and the parent's stderr has it too
    assert not directory.exists()


def test_a_log_file_takes_the_childs_output(directory, tmp_path, capsys):
    log = tmp_path / "engine.log"
    with pytest.raises(EngineDied, match="out of paper"):
        launch(directory, "crash", log_path=log)
    assert log.read_text() == "RuntimeError: out of paper\n"
    assert capsys.readouterr().err == ""


def test_a_log_file_that_cannot_be_written_leaves_nothing_behind(directory, tmp_path):
    with pytest.raises(FileNotFoundError):
        launch(directory, log_path=tmp_path / "missing" / "engine.log")
    assert not directory.exists()


def test_a_start_that_takes_too_long_is_ended(directory):
    started, before = time.monotonic(), set(psutil.Process().children())
    with pytest.raises(TimedOut, match="not ready"):
        launch(directory, "hang", startup_timeout=0.2)
    assert time.monotonic() - started < PATIENCE
    assert set(psutil.Process().children()) <= before


def test_death_in_use_fails_waiters_with_the_exit_code(directory, capsys):
    with launch(directory, "die-on-generate") as client:
        with pytest.raises(EngineDied, match=r"while it was in use \(exit code 3\): last words"):
            client.generate([1], timeout=PATIENCE)
        with pytest.raises(EngineDied, match="exit code 3"):  # for good: nothing will listen there again
            client.status(timeout=PATIENCE)


def test_a_killed_engine_is_noticed_without_a_call_in_flight(directory):
    launched = launch(directory)
    handle = launched.client.submit([1])
    assert handle.result(PATIENCE).output_ids == [1, 0]
    os.kill(launched.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="exit code -9"):
        while True:
            launched.client.status(timeout=PATIENCE)
    launched.close()


def test_an_engine_that_ignores_everything_is_killed(directory, monkeypatch):
    monkeypatch.setattr("caesura.client.process.launch.SHUTDOWN_S", 0.2)
    launched = launch(directory, "ignore-signals")
    launched.close()
    assert launched.returncode == -signal.SIGKILL
    assert not directory.exists()


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "pass"], ids=["killed", "forgot-close"])
def test_the_child_never_outlives_its_parent(directory, ending):
    parent = textwrap.dedent(f"""
        import os, sys
        from caesura.client.process.launch import LaunchedScheduler
        launched = LaunchedScheduler({[sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s"]!r})
        print(launched.pid, flush=True)
        {ending}
    """)
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=PATIENCE)
    assert gone(int(done.stdout))


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="kv_pages"):
        launch_scheduler("/model", kv_pages=3)


def test_options_become_the_schedulers_arguments(monkeypatch, tmp_path):
    seen = {}

    class Recorder:
        def __init__(self, command, **options):
            seen.update(options, command=command)

    monkeypatch.setattr("caesura.client.process.launch.LaunchedScheduler", Recorder)
    launch_scheduler(
        tmp_path,
        dtype="float32",
        prefix_cache=False,
        check_ledger=True,
        context_len=64,
        endpoint="ipc:///x/y",
    )
    assert seen["command"][1:] == [
        *(
            "-m",
            "caesura.scheduler",
            "--model",
            str(tmp_path),
            "--endpoint",
            "ipc:///x/y",
            "--dtype",
            "float32",
        ),
        *("--context-len", "64", "--no-prefix-cache", "--check-ledger"),
    ]
    assert seen["directory"] is None  # the caller's endpoint is the caller's to remove


def test_close_waits_for_a_drain_that_hurry_ends(directory, monkeypatch):
    monkeypatch.setattr("caesura.client.process.launch.SHUTDOWN_S", PATIENCE)
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
