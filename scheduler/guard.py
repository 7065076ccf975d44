"""What a failure that nobody foresaw may do: it is logged and answered, and ends neither the loop nor anybody else's request.

Invariants:
- Whatever the loop does for a message or a timer runs in :meth:`Guard.run`: its exceptions stop there.
- Steps are not guarded here. ``step_recovery.py`` knows what was in them, and where it fails itself nobody knows what holds KV:
  then the loop ends, which tells everybody.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

from ..io_struct import CaesuraError, ErrorCode, ErrorReply, Message
from .memory.device_memory import is_out_of_memory

logger = logging.getLogger(__name__)


class Guard:
    """Runs what must not end the loop, and counts what would have."""

    def __init__(self, fatal: tuple[type[Exception], ...] = ()) -> None:
        """``fatal`` are let through all the same: an engine that checks itself shall stop where a check fails."""
        self.failures = 0
        self._fatal = fatal

    def run(self, what: str, act: Callable[..., object], *arguments: Any) -> bool:
        """``act(*arguments)``; False: it has raised, which is logged as a failure of ``what``."""
        try:
            act(*arguments)
        except self._fatal:
            raise
        except Exception as error:
            self.failures += 1
            logger.error("%s failed", what, exc_info=error)
            return False
        return True


def defect(what: str, message_id: str, error: Exception) -> ErrorReply:
    """The answer to a message where ``what`` has failed in a way that nobody foresaw."""
    logger.error("%s failed", what, exc_info=error)
    reply = CaesuraError(
        ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL,
        f"{what} failed: {type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )
    return reply.to_reply(message_id)


def checked(answer: object) -> Message:
    """What a handler has returned, if that can be an answer."""
    if not isinstance(answer, Message):
        raise TypeError(f"a handler has returned {type(answer).__name__}, which is no message")
    return answer
