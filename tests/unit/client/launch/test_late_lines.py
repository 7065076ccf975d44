"""Lines of engines between two phases of tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.late_lines import LateLines, lines

from caesura.client.launch import launcher as launch

TESTS = Path(__file__).parents[3]
BETWEEN = """
from caesura.client.launch import launcher as launch


def pytest_runtest_logreport(report):
    launch.show_log(f"after {report.when}\\n")  # pytest captures nothing here
"""
TWO = """
def test_one():
    pass


def test_two():
    raise AssertionError("what came late is shown with me")
"""


def test_lines_wait_for_the_next_phase_and_keep_their_order():
    written: list[str] = []
    late = LateLines(written.append)
    late.show("first\n")
    late.show("second\n")
    assert written == []
    with late.phase():
        assert written == ["first\n", "second\n"]
        late.show("third\n")
        assert written == ["first\n", "second\n", "third\n"]
    late.show("fourth\n")
    assert len(written) == 3
    with late.phase():
        assert written[3:] == ["fourth\n"]


def test_the_lines_of_this_runs_engines_go_that_way():
    assert launch.show_log == lines.show


def test_a_line_within_a_phase_is_captured_at_once(capfd):
    launch.show_log("of an engine\n")
    assert capfd.readouterr().err == "of an engine\n"


def test_a_run_shows_late_lines_with_the_test_that_fails_and_nowhere_else(tmp_path):
    (tmp_path / "between.py").write_text(BETWEEN)
    (tmp_path / "test_two.py").write_text(TWO)
    plugins = [word for name in ("conftest", "between", "no:cacheprovider") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, "test_two.py"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    dots, captured = done.stdout.split("Captured stderr setup")
    assert "after" not in dots + done.stderr
    assert captured.split()[1:3] == ["after", "teardown"], "of the test before"
