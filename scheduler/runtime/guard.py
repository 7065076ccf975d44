"""Contains unforeseen exceptions: they are logged and answered, and end neither the loop nor other requests.

Everything that the loop does for a message or a timer runs in :meth:`Guard.run`. Steps do not:
``step_recovery.py`` knows their requests, and if the recovery itself fails, the loop ends.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

from ...io_struct import CaesuraError, ErrorCode, ErrorReply
from ..memory.device_memory import is_out_of_memory

logger = logging.getLogger(__name__)


class EngineEndsError(BaseException):
    """The loop ends, and every waiting client gets ``error``; no ``Exception``, as nothing recovers."""

    def __init__(self, error: CaesuraError) -> None:
        super().__init__(error.message)
        self.error = error


class Guard:
    def __init__(self, fatal: tuple[type[Exception], ...] = ()) -> None:
        """Do not catch the types ``fatal``: an engine that checks itself must stop at a failed check."""
        self._fatal = fatal

    def run(self, what: str, act: Callable[..., object], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except self._fatal:
            raise
        except Exception as error:
            logger.error("%s failed", what, exc_info=error)
            return False
        return True


def defect(what: str, message_id: str, error: Exception) -> ErrorReply:
    """Log an unforeseen ``error`` of ``what``, and return the answer to the message that caused it."""
    logger.error("%s failed", what, exc_info=error)
    reply = CaesuraError(
        ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL,
        f"{what} failed: {type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )
    return reply.to_reply(message_id)
