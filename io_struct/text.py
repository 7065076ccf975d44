"""Text for people: what from a peer is safe at a terminal, and how a line of any process's log begins.

Invariants:
- What :func:`printable` returns cannot move a cursor, colour a terminal, start a line or hide what follows.
- Scheduler, supervisor and front end write to one stderr, so their lines begin in one form and can be sorted by time.
"""

LOG_PREFIX = "%(asctime)s.%(msecs)03d %(levelname)s"
"""For :class:`logging.Formatter`, with :data:`LOG_TIME`: ``2026-08-01 12:00:00.123 INFO``."""
LOG_TIME = "%Y-%m-%d %H:%M:%S"


def printable(text: str) -> str:
    r"""``text`` with everything that is not printable as an escape: ``\x1b``, ``\n``, ``\u202e``, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
