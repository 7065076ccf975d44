"""Makes text from clients safe for terminals: in logs, metrics and messages."""

from ...io_struct import text

MAX_CHARACTERS = 200


def printable(found: str, limit: int = MAX_CHARACTERS) -> str:
    """``found`` with escapes for what is not visible, and not longer than ``limit``."""
    shown = text.printable(found[:limit])
    return shown if len(found) <= limit else f"{shown}… ({len(found)} characters)"
