"""Log lines as JSON objects, alike in every process: ``--log-format json``.

Invariant: a line is one JSON object without line breaks, and has ``time``, ``level``, ``process``, ``replica`` and ``message``.
"""

import logging
import os
from datetime import UTC, datetime

import msgspec

from ..io_struct.text import printable

MAX_TEXT = 4096
"""Maximum characters of a message, or of one line of a traceback; what is cut is counted."""


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects. A record's own ``replica`` takes precedence."""

    def __init__(self, process: str, replica: str = "", rank: int = 0) -> None:
        super().__init__()
        self._same = {"process": process, "pid": os.getpid(), "replica": replica, "rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
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


def _bounded(text: str) -> str:
    shown = printable(text[:MAX_TEXT])
    return shown if len(text) <= MAX_TEXT else f"{shown}… ({len(text)} characters)"
