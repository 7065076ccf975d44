"""A loop that hangs ends its process, and only then. Each case is a process of its own."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from support.waiting import PATIENCE_S as PATIENCE

from caesura.process.contract import EXIT_HUNG
from caesura.scheduler.runtime.watchdog import Heartbeat

SCRIPT = """
    import ctypes, os, sys, threading, time
    from caesura.process import log
    from caesura.scheduler.runtime.watchdog import Heartbeat, Watchdog, exit_within
    log.configure("INFO")
    heartbeat = Heartbeat()
    watchdog = Watchdog(heartbeat, 0.8)
    looks = []
    watchdog._checks = (lambda: looks.append(1),)
    watchdog.start()
    def wait_for_looks(count, then=lambda: None):
        until = len(looks) + count
        while len(looks) < until:
            then()
            time.sleep(0.01)
    def tick():
        heartbeat.ticked = True
"""


def run(body: str, **options) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "hangs",
    [
        "threading.Event().wait()",
        "ctypes.PyDLL(None).sleep(3600)",  # which keeps the GIL
        """
    with heartbeat.long_operation("loading"):
        wait_for_looks(20)
    threading.Event().wait()""",
    ],
    ids=["waiting", "in C", "after a long operation"],
)
def test_a_loop_that_hangs_shows_its_stacks_and_ends(hangs):
    done = run(f"def the_loop():\n    {hangs}\nthe_loop()")
    assert done.returncode == EXIT_HUNG
    assert "in the_loop" in done.stderr
    if "PyDLL" not in hangs:  # else no thread of Python's can say more
        assert "the loop has not ticked for" in done.stderr
        assert "Current thread" in done.stderr  # printed by a thread that holds the GIL
        assert f"exit status {EXIT_HUNG}" in done.stderr


LONG = """
with heartbeat.long_operation("loading"):
    {}
"""
KEEPS_THE_GIL = "ctypes.PyDLL(None).usleep(900_000), ctypes.PyDLL(None).usleep(900_000)"


@pytest.mark.parametrize(
    "alive",
    [
        "wait_for_looks(20, tick)",
        "heartbeat.asleep = True; wait_for_looks(20)",
        LONG.format("wait_for_looks(20)"),
        LONG.format(KEEPS_THE_GIL),
        "watchdog.close(); time.sleep(1.5)",
    ],
    ids=["ticking", "asleep in poll", "a long operation", "a long operation that keeps the GIL", "closed"],
)
def test_watchdog_spares_a_loop_that_ticks_or_need_not(alive):
    done = run(f"{alive}\nwatchdog.close()\nwatchdog._thread.join()\nsys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")


def test_watchdog_spares_a_loop_that_compiles(tmp_path):
    (tmp_path / "nvcc").symlink_to(shutil.which("cat"))
    compiling = f"""
import subprocess
compiler = subprocess.Popen(["{tmp_path}/nvcc"], stdin=subprocess.PIPE)
wait_for_looks(20)
compiler.communicate()
threading.Event().wait()"""
    done = run(compiling)
    assert "the loop waits for kernels that nvcc compiles" in done.stderr
    assert done.returncode == EXIT_HUNG


def test_an_unread_stderr_does_not_keep_a_hung_process():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    os.set_blocking(writer, True)
    script = textwrap.dedent(SCRIPT) + "threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=writer)
    try:
        assert process.wait(PATIENCE) == EXIT_HUNG
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)


def test_the_end_is_bounded():
    done = run("watchdog.close()\nexit_within(0.2)\nctypes.PyDLL(None).sleep(3600)")
    assert done.returncode == EXIT_HUNG


def test_long_operations_nest():
    heartbeat = Heartbeat()
    with heartbeat.long_operation("resume"):
        with heartbeat.long_operation("capture"):
            assert heartbeat.long == "capture"
        assert heartbeat.long == "resume"
        assert not heartbeat.is_due
    assert heartbeat.is_due
    assert heartbeat.ticked
