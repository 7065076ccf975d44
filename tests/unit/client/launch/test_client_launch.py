"""Starting, watching and ending a child process; the child is a fake scheduler that behaves as told."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import psutil
import pytest
import support.fake_scheduler
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura import __version__
from caesura.client import (
    EngineDied,
    InvalidRequest,
    SchedulerClient,
    TimedOut,
    launch_scheduler,
)
from caesura.client.launch.launcher import Child, LaunchedScheduler, _command_line, how_it_ended

FAKE = support.fake_scheduler.__file__


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def launch(directory, behave="well", **options):
    command = [sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s", "--behave", behave]
    return LaunchedScheduler(command, directory=directory, **options)


def gone(pid):
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


def test_the_thread_that_sees_the_end_may_be_the_one_that_ends_the_rest(directory):
    child = Child([sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s"], directory)
    child.wait_ready(PATIENCE)
    finished = threading.Event()

    class Collected:
        def ended(self, reason):
            child.end()
            finished.set()

    collected = Collected()
    child.report_exit_to(weakref.WeakMethod(collected.ended))
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


def test_a_log_file_that_cannot_be_written_leaves_nothing_behind(directory, tmp_path):
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


def test_an_end_that_nobody_asked_for_is_logged_and_no_other(tmp_path, caplog):
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


def test_the_child_does_not_outlive_a_parent_that_forgot_to_close(directory):
    parent = textwrap.dedent(f"""
        from caesura.client.launch.launcher import LaunchedScheduler
        launched = LaunchedScheduler({[sys.executable, FAKE, "--endpoint", f"ipc://{directory}/s"]!r})
        print(launched.pid, flush=True)
    """)
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=PATIENCE)
    assert gone(int(done.stdout))


def test_options_become_the_schedulers_arguments():
    given = {"dtype": "float32", "prefix_cache": False, "check_ledger": True, "context_len": 64}
    assert _command_line("m", "ipc:///x/y", given)[1:] == [
        *("-P", "-m", "caesura.scheduler", "--model", "m", "--endpoint", "ipc:///x/y", "--dtype", "float32"),
        *("--no-prefix-cache", "--check-ledger", "--context-len", "64"),
    ]


@pytest.mark.parametrize(
    "model,options,error",
    [
        (None, {}, pytest.raises(TypeError, match="PathLike")),
        (3, {}, pytest.raises(TypeError, match="PathLike")),
        ("/model", {"startup_timeout": float("nan")}, pytest.raises(InvalidRequest, match="startup_timeout")),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_made(model, options, error, tmp_path, monkeypatch):
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
def test_a_keyword_of_another_engine_is_refused_with_the_one_that_was_meant(keyword, meant):
    with pytest.raises(TypeError, match=f"launch_scheduler: {keyword} is not known.*{re.escape(meant)}"):
        launch_scheduler(**{"model": "m", keyword: 1})
