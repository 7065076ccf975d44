"""Which tests execute which lines: a pytest plugin that traces a few files.

Invariants:
- A test is credited with what runs in its call and its teardown, and in the setup of any test of its file:
  fixtures live longer than the test that happens to come first.
- What runs at import is credited to every test.
- Processes that a test starts are not traced.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Generator
from types import FrameType
from typing import Any

import pytest

Line = tuple[str, int]
"""A module's path in the tree, and a line of it."""


class Reach:
    """The plugin; read ``lines`` and ``seconds`` after the run, and ``failed``."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self.lines: defaultdict[str, set[Line]] = defaultdict(set)
        """By test, by file of tests (setups), and for the empty name (import)."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._seen = self.lines[""]

    def start(self) -> None:
        """From here on, in this thread and in every new one."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._files else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._seen.add((self._files[frame.f_code.co_filename], frame.f_lineno))
        return self._step

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._seen = self.lines[file_of(item.nodeid)]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._seen = self.lines[item.nodeid]
        sys.settrace(self._enter)  # a test may have set another
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def found(self) -> dict[str, Any]:
        return {
            "lines": {name: sorted(lines) for name, lines in self.lines.items()},
            "seconds": {name: value for name, value in self.seconds.items() if name not in self.failed},
            "failed": sorted(self.failed),
        }


class Reached:
    def __init__(self, found: dict[str, Any]) -> None:
        self._lines = {name: {(file, line) for file, line in lines} for name, lines in found["lines"].items()}
        self.seconds: dict[str, float] = found["seconds"]
        """Of each test that passed."""
        self.failed: list[str] = found["failed"]

    def tests(self, module: str, lines: range, paths: Collection[str]) -> list[str]:
        """Tests in ``paths`` (files) that execute one of ``lines`` of ``module``, the fastest first."""
        wanted = {(module, line) for line in lines}
        everybody = bool(wanted & self._lines.get("", set()))
        return [
            test
            for test in sorted(self.seconds, key=lambda test: (self.seconds[test], test))
            if file_of(test) in paths
            and (everybody or any(wanted & self._lines.get(name, set()) for name in (test, file_of(test))))
        ]


def file_of(test: str) -> str:
    return test.split("::", 1)[0]
