"""The limit of tests ends those that hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMIT_S = 1.0


def pytest_on(tmp_path: Path, source: str) -> subprocess.Popen:
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "support.time_limit", "-p", "no:cacheprovider", "-q"]
    return subprocess.Popen(
        [*command, f"--timeout={LIMIT_S}", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_a_stopped_machine_does_not_count_against_the_limit(tmp_path):
    source = (
        "import os, signal\n"
        "def test_stopped():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    sum(range(1000))\n"
    )
    child = pytest_on(tmp_path, source)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    began = time.monotonic()
    while time.monotonic() < began + 3 * LIMIT_S:
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGCONT)
    output, _ = child.communicate()
    assert (child.returncode, "1 passed" in output) == (0, True), output


@pytest.mark.slow
def test_a_hanging_test_and_teardown_are_ended(tmp_path):
    source = """
import threading, pytest
@pytest.fixture
def hangs():
    yield
    threading.Event().wait()
def test_hangs(hangs):
    threading.Event().wait()
"""
    child = pytest_on(tmp_path, source)
    output, _ = child.communicate()
    assert child.returncode == 1
    assert "1 failed, 1 error" in output
    assert output.count("Failed: Timeout") >= 2
