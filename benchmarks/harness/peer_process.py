"""One engine's process, spoken to in JSON lines (the protocol is in ``peers/json_lines.py``).

Invariants: the peer and everything it starts is one process group, which is gone when
:meth:`PeerProcess.close` returns; a peer that dies or stays silent past its deadline is an error that shows
the end of its log.
"""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOG_TAIL_LINES = 25


class PeerError(Exception):
    """The peer ended or gave no answer in time; the message ends with the tail of its log."""


class PeerProcess:
    """A process that starts at construction; ``started`` is the monotonic time just before."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._unread = b""
        with log.open("wb") as stderr:
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Return the result of one operation.

        Raises:
            PeerError: the process ended, or ``timeout_s`` passed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure(f"ended before {op!r}") from error
        reply: dict[str, Any] = json.loads(self._read_line(op, timeout_s))
        result: dict[str, Any] = reply["result"]
        return result

    def close(self, grace_s: float = 15.0) -> None:
        """Ask it to end, then end its whole group."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it is gone already
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing is left of the group
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=15.0 if error is None else 0.0)

    def _read_line(self, op: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"no answer to {op!r} within {timeout_s:.0f} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 20)
                if not chunk:
                    raise self._failure(f"ended during {op!r}")
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failure(self, what: str) -> PeerError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return PeerError(f"{what}; log {self._log}:\n{tail}")
