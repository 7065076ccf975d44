"""The log of every process: formats, repeated warnings, and a stderr whose writers never wait for readers.

Invariants:
- Writing never blocks: text goes through a bounded queue to a thread. Text that does not fit is dropped and
  counted. logging's QueueListener bounds records, not bytes, and cannot be waited for with a limit.
- Text from peers cannot start a line or control a terminal: unprintable characters are escaped. The lines of
  a traceback follow its record, each indented by a tab.
- Of the warnings and errors of one call site, :data:`REPEATS` are written within :data:`REPEAT_WINDOW_S`,
  then their number.
"""

import contextlib
import io
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Literal, TextIO

import msgspec

from ..io_struct.field_errors import printable

MAX_QUEUED = 1 << 20
"""Maximum characters that are not written yet."""
FLUSH_S = 1.0
"""Maximum seconds that the end of a process waits for the queue."""
MAX_LINE = 4096
"""Maximum characters of a message, or of one line of a traceback."""
REPEATS = 20
"""Maximum warnings or errors of one call site that are written within :data:`REPEAT_WINDOW_S`."""
REPEAT_WINDOW_S = 10.0
_MAX_SITES = 1024
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that is being handled, which records name; empty without one."""


class QueuedStream(io.TextIOBase):
    """A text stream whose text a thread writes to ``target``, each line formatted by ``as_line`` if given."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, target: TextIO | int, as_line: Callable[[str], str] | None = None) -> None:
        self._stream = None if isinstance(target, int) else target
        self._descriptor = target if isinstance(target, int) else None
        if self._stream is not None:
            # Not through the stream: the lock of its buffer, held by a write that blocks, would stop the
            # interpreter's end.
            with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream of Python's own
                self._descriptor = self._stream.fileno()
        self._as_line = as_line
        self._begun = ""
        self._pieces: deque[str] = deque()
        self._queued = self._dropped = 0
        self._busy = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="caesura-log", daemon=True).start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the descriptor; whoever writes to it directly may have to wait."""
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def isatty(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Queue ``text``, or drop and count it; never block."""
        if not isinstance(text, str):  # libraries try bytes to find out what kind of stream this is
            raise TypeError(f"write() takes a str, not {type(text).__name__}")
        with self._changed:
            if self._as_line is None:
                self._put(text)
                return len(text)
            *lines, self._begun = (self._begun + text).split("\n")
            for line in filter(None, lines):
                self._put(f"{self._as_line(line)}\n")
        return len(text)

    def settle(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until everything is written; return True if it is (flush never waits)."""
        if self._begun:
            self.write("\n")
        with self._changed:
            return self._changed.wait_for(lambda: not self._pieces and not self._busy, timeout_s)

    def close(self) -> None:
        """Drop later text, and end the thread after what is queued."""
        with self._changed:
            super().close()
            self._changed.notify_all()

    def _put(self, text: str) -> None:
        if self.closed or self._queued + len(text) > MAX_QUEUED:
            self._dropped += len(text)
            return
        self._pieces.append(text)
        self._queued += len(text)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self.closed)
                if not self._pieces:
                    return
                text = "".join(self._pieces)
                self._pieces.clear()
                self._busy = True
            # A closed stream cannot be reported anywhere. After a MemoryError later text may succeed.
            with contextlib.suppress(OSError, ValueError, MemoryError):
                self._write_out(text)
            with self._changed:
                self._queued -= len(text)
                self._busy = False
                if self._dropped:
                    notice = _notice(f"{self._dropped} characters dropped: the log was not read in time")
                    self._dropped = 0
                    line = TextFormatter("log").format(notice)
                    self._put(f"{self._as_line(notice.msg) if self._as_line else line}\n")
                self._changed.notify_all()

    def _write_out(self, text: str) -> None:
        if self._descriptor is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._descriptor, data) :]


@contextlib.contextmanager
def queued_stderr(as_line: Callable[[str], str] | None = None) -> Iterator[None]:
    """Make ``sys.stderr`` a :class:`QueuedStream` within the block; a stderr without a descriptor stays."""
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


class LogHandler(logging.StreamHandler[TextIO | QueuedStream]):
    """Write records to ``stream``, but count what a call site repeats and write the number."""

    def __init__(self, stream: TextIO | QueuedStream) -> None:
        super().__init__(stream)
        self._sites: dict[tuple[str, int], tuple[float, int]] = {}
        """For each call site, the start of its window and the number of its records since then."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, unless its call site has reached the limit. The handler's lock is held."""
        if record.levelno >= logging.WARNING and not self._admits((record.name, record.lineno)):
            return
        super().emit(record)

    def _admits(self, site: tuple[str, int]) -> bool:
        now = monotonic()
        since, count = self._sites.get(site, (now, 0))
        if count <= REPEATS and now - since >= REPEAT_WINDOW_S:
            since, count = now, 0
        if len(self._sites) >= _MAX_SITES:
            self._sites.clear()
        self._sites[site] = since, count + 1
        if count == REPEATS:
            timer = threading.Timer(max(0.0, since + REPEAT_WINDOW_S - now), self._tell, (site, since))
            timer.daemon = True
            # no further thread can be started: the number comes at the end
            with contextlib.suppress(RuntimeError):
                timer.start()
        return count < REPEATS

    def _tell(self, site: tuple[str, int], window: float | None = None) -> None:
        """Write the number of suppressed records, unless ``window`` began before the current one."""
        self.acquire()
        try:
            since, count = self._sites.get(site, (0.0, 0))
            if count > REPEATS and window in (None, since):
                del self._sites[site]
                where = f"{site[0].removeprefix('caesura.')} line {site[1]}"
                took = monotonic() - since
                super().emit(_notice(f"{count - REPEATS} more like these from {where} within {took:.0f} s"))
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Write a line without the record's arguments; logging's own would go to stderr and block."""
        text = f"a log record of {record.name} line {record.lineno} could not be formatted"
        self.stream.write(self.format(_notice(text)) + "\n")

    def settle(self) -> None:
        """Write the numbers of suppressed records, and wait up to :data:`FLUSH_S` for the queue."""
        for site in list(self._sites):
            self._tell(site)
        if isinstance(self.stream, QueuedStream):
            self.stream.settle(FLUSH_S)

    def close(self) -> None:
        self.settle()
        super().close()


def _notice(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": text})


def _bounded(text: str) -> str:
    shown = printable(text[:MAX_LINE])
    return shown if len(text) <= MAX_LINE else f"{shown}… ({len(text)} characters)"


class TextFormatter(logging.Formatter):
    """``2026-08-01 12:00:00.123 INFO WHERE: message``."""

    def __init__(self, where: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s {where}: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.module_path = record.name.removeprefix("caesura.")
        request = request_id.get()
        record.message = _bounded(record.message) + (f" (request {request})" if request else "")
        return super().formatMessage(record)

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # noqa: N802
        return "\n".join("\t" + _bounded(line) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects. A record's own ``replica`` takes precedence."""

    def __init__(self, process: str, replica: str = "", rank: int = 0) -> None:
        super().__init__()
        self._same = {"process": process, "pid": os.getpid(), "replica": replica, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            **self._same,
            "logger": record.name.removeprefix("caesura."),
            "message": _bounded(record.getMessage()),
        }
        if replica := getattr(record, "replica", ""):
            line["replica"] = replica
        if request := request_id.get():
            line["request_id"] = request
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            line["traceback"] = [_bounded(each) for each in lines]
        return msgspec.json.encode(line).decode()

    def wrap(self, text: str) -> str:
        """Return a line that was not logged, such as a warning of the command line, as JSON too."""
        if text.startswith("{"):
            return text
        level = next((name for name in ("ERROR", "WARNING") if text.upper().startswith(f"{name}:")), "INFO")
        return self.format(logging.makeLogRecord({"name": "stderr", "levelname": level, "msg": text}))


@contextlib.contextmanager
def server_log(process: str, log_format: str, where: str) -> Iterator[None]:
    """Send records of all loggers, and all text for stderr, through one queue within the block."""
    json = JsonFormatter(process) if log_format == "json" else None
    with queued_stderr(None if json is None else json.wrap):
        handler = LogHandler(sys.stderr)
        handler.setFormatter(json or TextFormatter(where))
        logging.basicConfig(handlers=[handler])
        try:
            yield
        finally:
            logging.root.removeHandler(handler)
            handler.close()


def configure(
    level: str | int,
    rank: int = 0,
    stream: TextIO | None = None,
    *,
    log_format: Literal["text", "json"] = "text",
    name: str = "",
) -> None:
    """Send the records of loggers below ``caesura`` to stderr; ``rank``, unless 0, and ``name`` are shown."""
    logger = logging.getLogger("caesura")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    for old in [each for each in logger.handlers if isinstance(each, LogHandler)]:
        logger.removeHandler(old)
        old.close()
        old.stream.close()
    shown = printable(name).replace("%", "%%")
    where = " ".join(filter(None, (shown, f"rank{rank}" if rank else "", "%(module_path)s")))
    json = JsonFormatter("scheduler", name, rank) if log_format == "json" else None
    wrap = None if json is None else json.wrap
    handler = LogHandler(QueuedStream(sys.stderr if stream is None else stream, wrap))
    handler.setFormatter(json or TextFormatter(where))
    logger.addHandler(handler)
    logger.propagate = False  # a root handler would print every line again


def flush() -> None:
    """Wait, for a bounded time, until all records of the engine are written."""
    for handler in logging.getLogger("caesura").handlers:
        if isinstance(handler, LogHandler):
            handler.settle()
