"""Text of clients for people's terminals: in logs, in metrics, in messages about it.

Invariant: what comes out has no control characters, so it can neither move a cursor nor forge a line.
"""

import logging
import re
from typing import Any

MAX_CHARACTERS = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROL_BUT_LINES = re.compile(_CONTROL.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))


def printable(text: str, limit: int = MAX_CHARACTERS) -> str:
    """``text`` with escapes for what is not visible, and not longer than ``limit``."""
    shown = _CONTROL.sub(_escape, text[:limit])
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"


def is_printable(text: str) -> bool:
    """Whether there is nothing to escape."""
    return _CONTROL.search(text) is None


class PrintableFormatter(logging.Formatter):
    """Of log records that may quote clients: tracebacks keep their lines, everything else is escaped."""

    def format(self, record: Any) -> str:
        return _CONTROL_BUT_LINES.sub(_escape, super().format(record))


def _escape(found: "re.Match[str]") -> str:
    return found[0].encode("unicode_escape").decode()
