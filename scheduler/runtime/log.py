"""The engine's log: to stderr, one line per record.

Invariants:
- Only the ``caesura`` logger is touched, never the root logger, and configuring twice leaves one handler.
- Text from clients cannot start a new line or control a terminal: unprintable characters are escaped. A traceback
  follows its record, every line indented by a tab.
- Logging never blocks: lines go through the bounded queue of :class:`QueuedWriter`.
- Repeated warnings and errors of one call site are summarised by their number.
"""

import logging
import sys
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Literal, TextIO

from ...io_struct.text import LOG_PREFIX, LOG_TIME, printable
from ...process.json_log import JsonFormatter
from ...process.queued_writer import FLUSH_S, QueuedWriter

_HANDLER_NAME = "caesura.stderr"
MAX_LINE = 4096
"""Maximum characters of a message, or of one line of a traceback, which may contain text from a client."""
REPEATS = 20
"""Maximum warnings or errors of one call site that are written within :data:`REPEAT_WINDOW_S`."""
REPEAT_WINDOW_S = 10.0
_MAX_SITES = 1024


class LineFormatter(logging.Formatter):
    """``2026-08-01 12:00:00.123 INFO scheduler.loop: message``; with the engine's name, and the rank if it is not 0."""

    def __init__(self, rank: int = 0, name: str = "") -> None:
        where = "".join(
            f" {part}" for part in (printable(name).replace("%", "%%"), f"rank{rank}" if rank else "") if part
        )
        super().__init__(
            f"{LOG_PREFIX}{where} %(caesura_module)s: %(message)s",
            LOG_TIME,
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The record's line."""
        record.caesura_module = record.name.removeprefix("caesura.")
        record.message = _bounded(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # noqa: N802
        """The traceback, indented."""
        return "\n".join("\t" + _bounded(line) for line in super().formatException(ei).split("\n"))


def _bounded(text: str) -> str:
    return (
        printable(text)
        if len(text) <= MAX_LINE
        else f"{printable(text[:MAX_LINE])}… ({len(text)} characters)"
    )


class Repeats:
    """Counts repeated records by call site; thread-safe."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, int], _Site] = {}
        self._lock = threading.Lock()

    def admit(self, name: str, line: int) -> bool:
        """Whether a record of this call site should be written."""
        key, now = (name, line), monotonic()
        with self._lock:
            site = self._sites.get(key)
            if site is None or (site.count <= REPEATS and now - site.since >= REPEAT_WINDOW_S):
                if len(self._sites) >= _MAX_SITES:
                    self._sites.clear()
                site = self._sites[key] = _Site(now)
            site.count += 1
            return site.count <= REPEATS

    def due_s(self) -> float | None:
        """Seconds until the next summary is due; None means that nothing was suppressed."""
        with self._lock:
            held = [site.since for site in self._sites.values() if site.count > REPEATS]
        return max(0.0, min(held) + REPEAT_WINDOW_S - monotonic()) if held else None

    def take(self, *, everything: bool = False) -> list[str]:
        """Return summaries of call sites whose window is over, or of all; resets their counts."""
        now, lines = monotonic(), []
        with self._lock:
            for (name, line), site in list(self._sites.items()):
                if site.count > REPEATS and (everything or now - site.since >= REPEAT_WINDOW_S):
                    del self._sites[name, line]
                    where = f"{name.removeprefix('caesura.')} line {line}"
                    more = site.count - REPEATS
                    lines.append(f"{more} more like these from {where} within {now - site.since:.0f} s")
        return lines


@dataclass(slots=True)
class _Site:
    """A call site that has logged a warning or an error."""

    since: float
    count: int = 0


class LogHandler(logging.Handler):
    """Formats records in the calling thread; a :class:`QueuedWriter` writes them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.name = _HANDLER_NAME
        self._repeats = Repeats()
        self._writer = QueuedWriter(stream, self._repeats, self._notice)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, unless its call site has reached the limit."""
        try:
            if record.levelno >= logging.WARNING and not self._repeats.admit(record.name, record.lineno):
                self._writer.wake()
            else:
                self._writer.put(self.format(record) + "\n")
        except Exception:  # noqa: BLE001  a record that cannot be formatted must not fail the operation that logs it
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """A line without the record's arguments; the default implementation would write to stderr and block."""
        self._writer.put(
            self._notice(f"a log record of {record.name} line {record.lineno} could not be formatted")
        )

    def flush(self) -> None:
        """Write what is queued, within a bounded time; also called at the interpreter's exit."""
        for line in self._repeats.take(everything=True):
            self._writer.put(self._notice(line))
        self._writer.flush(FLUSH_S)

    def _notice(self, text: str) -> str:
        """Return a line of the log itself, in the format of all lines."""
        record = logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": text})
        return self.format(record) + "\n"

    def close(self) -> None:
        """Idempotent."""
        super().close()
        self._writer.close()


def configure(
    level: str | int,
    rank: int = 0,
    stream: TextIO | None = None,
    *,
    log_format: Literal["text", "json"] = "text",
    name: str = "",
) -> None:
    """Send the records of loggers below ``caesura`` to stderr.

    Args:
        level: a name or number of :mod:`logging`.
        rank: shown in every line if it is not 0.
        stream: None means the current ``sys.stderr``.
        name: the engine's name, shown in every line unless empty.

    Raises:
        ValueError: unknown level.
    """
    logger = logging.getLogger("caesura")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    for old in [h for h in logger.handlers if h.name == _HANDLER_NAME]:
        logger.removeHandler(old)
        old.close()
    handler = LogHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonFormatter("scheduler", name, rank) if log_format == "json" else LineFormatter(rank, name)
    )
    logger.addHandler(handler)
    logger.propagate = False  # a root handler would print every line again


def flush() -> None:
    """Wait, for a bounded time, until all records are written."""
    for handler in logging.getLogger("caesura").handlers:
        handler.flush()
