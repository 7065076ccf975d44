"""Standard error of serving commands: writers never wait for readers.

Invariants:
- Text goes through the bounded queue of :class:`QueuedWriter`. So a pipe that is not read, or a stopped terminal, blocks
  neither a server nor the restart of a scheduler.
- Of the repeated warnings of one call site, :data:`REPEATS` are written in :data:`REPEAT_WINDOW_S`; the next one has the
  number of the others. So clients cannot fill a disk through a server's log.
"""

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic

from ...process.queued_writer import FLUSH_S, QueuedWriter

REPEATS = 20
REPEAT_WINDOW_S = 10.0
_MAX_PLACES = 1024


class QueuedStream(io.TextIOBase):
    """A text stream over a descriptor, written by a :class:`QueuedWriter`; ``as_line`` makes what is written of each line."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, as_line: Callable[[str], str] | None = None) -> None:
        self._descriptor = descriptor
        self._as_line = as_line
        self._begun = ""
        self._lock = threading.Lock()
        self._writer = (
            QueuedWriter(descriptor)
            if as_line is None
            else QueuedWriter(descriptor, as_line=lambda text: f"{as_line(text)}\n")
        )

    def writable(self) -> bool:
        """As of every such stream."""
        return True

    def fileno(self) -> int:
        """For whoever asks what it is; who writes there may wait."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person may be looking."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """``text`` goes out, or is dropped and counted; at once either way."""
        if not isinstance(text, str):  # that is how others find out what kind of stream this is
            raise TypeError(f"write() takes a str, not {type(text).__name__}")
        if self._as_line is None:
            self._writer.put(text)
            return len(text)
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in filter(None, lines):
                self._writer.put(f"{self._as_line(line)}\n")
        return len(text)

    def settle(self, timeout_s: float) -> bool:
        """Whether all has gone out, waiting for up to ``timeout_s``. ``flush`` does not wait: others call it with every line."""
        if self._begun:
            self.write("\n")
        return self._writer.flush(timeout_s)


@contextlib.contextmanager
def queued_stderr(as_line: Callable[[str], str] | None = None) -> Iterator[None]:
    """Within it ``sys.stderr`` is a :class:`QueuedStream`; where there is none, nothing changes."""
    before = sys.stderr
    try:
        before.flush()
        stream = QueuedStream(before.fileno(), as_line)
    except (OSError, ValueError, AttributeError):  # closed, or a stream of Python's own
        yield
        return
    sys.stderr = stream
    try:
        yield
    finally:
        sys.stderr = before
        stream.settle(FLUSH_S)


class Repeats(logging.Filter):
    """Lets through what one place of the code warns of, but not again and again."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be written; safe from any thread."""
        place, now = (record.name, record.lineno), monotonic()
        with self._lock:
            since, count = self._places.pop(place, (now, 0))
            more = 0
            if now - since >= REPEAT_WINDOW_S:
                since, count, more = now, 0, max(0, count - REPEATS)
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            self._places[place] = since, count + 1
        if more:
            record.msg, record.args = (
                f"{record.getMessage()} (and {more} before it that were not written)",
                (),
            )
        return count < REPEATS
