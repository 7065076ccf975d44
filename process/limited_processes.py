"""Processes that work on what strangers send, at the end of a connection, and that the kernel may end.

Invariants:
- A script is started by its path, with its descriptor of the connection, and ends with that. The first
  message has its limits, which it sets itself; an answer is an object of texts.
- Threads that ask at the same time have a process each; a fork has none. One that was interrupted, or did not
  answer, is never asked again: its answer would be another request's.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ProcessEndedError(Exception):
    """A process that has ended, or had to be, before it answered; ``status`` as :mod:`subprocess` has it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process has ended with status {status}")
        self.status = status


class _Process:
    def __init__(
        self, script: Path, start: bytes, environment: Mapping[str, str], stderr: int | None
    ) -> None:
        self._start = start
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and script)
                [sys.executable, "-P", str(script), str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **environment},
                start_new_session=True,  # an interrupt at the terminal is the parent's to handle
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def begin(self) -> None:
        start, self._start = self._start, b""
        if start:
            self._connection.send_bytes(start)

    def ask(self, request: bytes, timeout: float | None) -> dict[str, str]:
        """Return the answer; raises EOFError and OSError."""
        self.begin()
        self._connection.send_bytes(request)
        if not self._connection.poll(timeout):
            raise TimeoutError
        answer: dict[str, str] = json.loads(self._connection.recv_bytes())
        return answer

    def end(self) -> int:
        """End the process, if no limit has; return its status."""
        self._connection.close()
        self._process.kill()
        return self._process.wait()


class LimitedProcesses:
    def __init__(
        self,
        script: Path,
        start: Callable[[], Mapping[str, Any]],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        """``start`` returns a process's first message, to be JSON; processes end with this object."""
        self._script, self._start, self._environment, self._stderr = script, start, environment or {}, stderr
        self._idle: dict[int, list[_Process]] = {}  # by the process that started them
        weakref.finalize(self, _end_all, self._idle)

    def prepare(self) -> None:
        """Let a process begin, which works on its first message while the caller does."""
        process = self._new()
        process.begin()
        self._idle_ones().append(process)

    def ask(self, request: bytes, timeout: float | None = None) -> dict[str, str]:
        """Return the answer; raises ProcessEndedError, also after ``timeout`` seconds."""
        idle = self._idle_ones()
        process = _taken(idle) or self._new()
        try:
            answer = process.ask(request, timeout)
        except (EOFError, OSError) as error:
            raise ProcessEndedError(process.end()) from error
        except BaseException:
            process.end()
            raise
        idle.append(process)
        return answer

    def _new(self) -> _Process:
        start = json.dumps(self._start()).encode()
        return _Process(self._script, start, self._environment, self._stderr)

    def _idle_ones(self) -> list[_Process]:
        return self._idle.setdefault(os.getpid(), [])


def _taken(idle: list[_Process]) -> _Process | None:
    while True:
        try:
            process = idle.pop()  # another thread may have taken the last
        except IndexError:
            return None
        if process.runs:
            return process
        process.end()


def _end_all(idle: dict[int, list[_Process]]) -> None:
    for process in idle.get(os.getpid(), ()):
        process.end()
