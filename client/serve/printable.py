"""Makes text from clients safe for terminals: in logs, metrics and messages."""

import logging

from ...io_struct import text

MAX_CHARACTERS = 200


def printable(found: str, limit: int = MAX_CHARACTERS) -> str:
    """``found`` with escapes for what is not visible, and not longer than ``limit``."""
    shown = text.printable(found[:limit])
    return shown if len(found) <= limit else f"{shown}… ({len(found)} characters)"


class PrintableFormatter(logging.Formatter):
    """Of log records that may quote clients: tracebacks keep their lines, everything else is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(text.printable, super().format(record).split("\n")))
