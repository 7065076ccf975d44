"""The limit of tests ends those that hang."""

import os
import subprocess
import sys
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
