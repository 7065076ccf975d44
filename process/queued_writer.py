"""Writes text from a thread of its own, so that who logs never waits for who reads.

Invariants:
- :meth:`QueuedWriter.put` never blocks. Text that does not fit into the queue is dropped and counted; the count is written
  when there is room again. So neither a pipe that is not read nor a stopped terminal blocks a server or an engine.
- Where the stream has a descriptor, the thread writes to that: the lock of a stream's buffer, held by a write that blocks,
  would stop the interpreter's end.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

MAX_QUEUED = 1 << 20
"""Maximum characters that are not written yet."""
FLUSH_S = 1.0
"""Maximum seconds that the end of a process waits for the queue."""


class TimedLines(Protocol):
    """Lines that become due as time passes."""

    def due_s(self) -> float | None:
        """Seconds until the next lines are due; None means that there are none."""

    def take(self) -> list[str]:
        """The lines that are due, without their ends."""


class QueuedWriter:
    """Writes to ``target``, a stream or a descriptor; ``timed`` adds lines of its own when they are due."""

    def __init__(
        self,
        target: TextIO | int,
        timed: TimedLines | None = None,
        as_line: Callable[[str], str] = "{}\n".format,
    ) -> None:
        """``as_line`` makes a line of what the writer has to say itself, and of what ``timed`` says."""
        self._stream = target if not isinstance(target, int) else None
        self._descriptor = target if isinstance(target, int) else None
        if self._stream is not None:
            with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream of Python's own
                self._descriptor = self._stream.fileno()
        self._timed = timed
        self._as_line = as_line
        self._pieces: deque[str] = deque()
        self._queued = 0
        self._dropped = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="caesura-log", daemon=True).start()

    def put(self, text: str) -> None:
        """Queue ``text``, or drop and count it."""
        with self._changed:
            if self._closed or self._queued + len(text) > MAX_QUEUED:
                self._dropped += len(text)
            else:
                self._append(text)

    def wake(self) -> None:
        """Ask ``timed`` again when its lines are due."""
        with self._changed:
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until everything is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pieces and not self._busy, timeout_s)

    def close(self) -> None:
        """Write what is queued, then end the thread; later text is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _append(self, text: str) -> None:
        self._pieces.append(text)
        self._queued += len(text)
        self._changed.notify_all()

    def _run(self) -> None:
        while (text := self._take()) is not None:
            # A closed stream cannot be reported anywhere. After a MemoryError later text may succeed.
            with contextlib.suppress(OSError, ValueError, MemoryError):
                self._write(text)
            with self._changed:
                self._queued -= len(text)
                self._busy = False
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    self._append(self._as_line(f"{dropped} characters dropped: the log was not read in time"))
                self._changed.notify_all()

    def _take(self) -> str | None:
        """Wait for text to write; None means the end."""
        with self._changed:
            while not self._pieces:
                if self._closed:
                    return None
                self._changed.wait(self._timed.due_s() if self._timed else None)
                for line in self._timed.take() if self._timed else ():
                    self._append(self._as_line(line))
            text = "".join(self._pieces)
            self._pieces.clear()
            self._busy = True
            return text

    def _write(self, text: str) -> None:
        if self._descriptor is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._descriptor, data) :]
