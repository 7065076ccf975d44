"""Where the engine's log goes: stderr, one line per record.

Invariants: only the ``caesura`` logger is touched, never the root logger, and calling twice leaves one handler; what a
client sends cannot start a line of its own (line breaks in messages are escaped). A traceback follows its record,
every line indented by a tab.
"""

import logging
import sys
from typing import TextIO

_HANDLER_NAME = "caesura.stderr"


class LineFormatter(logging.Formatter):
    """``2026-08-01 12:00:00.123 INFO scheduler.loop: message``; the rank is shown where it is not 0."""

    def __init__(self, rank: int = 0) -> None:
        where = f" rank{rank}" if rank else ""
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s{where} %(caesura_module)s: %(message)s",
            "%Y-%m-%d %H:%M:%S",
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The record's line."""
        record.caesura_module = record.name.removeprefix("caesura.")
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)

    def formatException(self, ei: "logging._SysExcInfoType") -> str:  # noqa: N802
        """The traceback, indented."""
        return "\t" + super().formatException(ei).replace("\n", "\n\t")


def configure(level: str | int, rank: int = 0, stream: TextIO | None = None) -> None:
    """Send the records of loggers below ``caesura`` to stderr.

    Args:
        level: a name or number of :mod:`logging`.
        rank: shown in every line where it is not 0.
        stream: None: the present ``sys.stderr``.

    Raises:
        ValueError: unknown level.
    """
    logger = logging.getLogger("caesura")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    for handler in [h for h in logger.handlers if h.name == _HANDLER_NAME]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.name = _HANDLER_NAME
    handler.setFormatter(LineFormatter(rank))
    logger.addHandler(handler)
    logger.propagate = False  # a root handler would print every line again
