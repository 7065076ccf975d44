"""One exception class per error code, so that callers catch what they can act on.

Invariants:
- Every code of :class:`~caesura.io_struct.ErrorCode` has exactly one class here (checked at import); an
  unknown code from a newer engine becomes :class:`InternalError`, whose ``code`` is then that text.
- ``detail`` carries the engine's numbers untouched; its keys are listed beside each code in
  ``io_struct/errors.py``.
"""
# ruff: noqa: N818  (the names say what happened, as the codes do; the common base carries the suffix)

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..io_struct import CaesuraError, ErrorCode, ErrorReply, WeightUpdateReqOutput

if TYPE_CHECKING:
    from .connection.images import ImageOutput
    from .connection.results import GenerateOutput


RETRYABLE = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.PAUSED,
        ErrorCode.NOT_IDLE,
        ErrorCode.BUSY,
        ErrorCode.SESSION_OPEN,
        ErrorCode.EPOCH_BEHIND,
        ErrorCode.WEIGHTS_POISONED,
        ErrorCode.WEIGHTS_INVALID,
        ErrorCode.MEMORY_RELEASED,
        ErrorCode.STATE_FILE_ERROR,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.ENGINE_DIED,
        ErrorCode.ENGINE_RESTARTING,
    }
)
"""Codes for conditions of the engine, which can pass; the same call may succeed later."""


class EngineError(CaesuraError):
    """Base of all errors that a client raises.

    Attributes:
        error_code: the code of this class; ``code`` differs from it only for an unknown code of a newer
            engine.
        output: the partial result of a generation that failed after its start; else None.
        outputs: all known results of that request's samples, including the failed one.
    """

    error_code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    output: "GenerateOutput | None" = None
    outputs: "tuple[GenerateOutput, ...] | tuple[ImageOutput, ...]" = ()

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(self.error_code, message, **detail)

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed later; False if it may have been executed already
        (:class:`TimedOut`).
        """
        return self.code in RETRYABLE


class MalformedMessage(EngineError):
    """The engine could not read the request: wrong types or unknown fields. Nothing was done."""

    error_code = ErrorCode.MALFORMED_MESSAGE


class VersionMismatch(EngineError):
    """Client and engine use different major versions of the wire."""

    error_code = ErrorCode.VERSION_MISMATCH


class InvalidRequest(EngineError):
    """A value is out of its range."""

    error_code = ErrorCode.INVALID_REQUEST


class PromptTooLong(EngineError):
    """Prompt plus ``max_new_tokens`` exceeds the context length."""

    error_code = ErrorCode.PROMPT_TOO_LONG


class ExceedsKVPool(EngineError):
    """The request needs more KV than the whole pool has."""

    error_code = ErrorCode.EXCEEDS_KV_POOL


class DuplicateRid(EngineError):
    """A live generation already has this rid."""

    error_code = ErrorCode.DUPLICATE_RID


class IdConflict(EngineError):
    """The message id was used before with a different body."""

    error_code = ErrorCode.ID_CONFLICT


class AnswerForgotten(EngineError):
    """The message was answered before and its answer is no longer stored; nothing was done again."""

    error_code = ErrorCode.ANSWER_FORGOTTEN


class QueueFull(EngineError):
    """Too many requests are waiting; try again later."""

    error_code = ErrorCode.QUEUE_FULL


class EpochBehind(EngineError):
    """The engine's weights are older than ``min_weights_epoch``."""

    error_code = ErrorCode.EPOCH_BEHIND


class EnginePaused(EngineError):
    """The engine is paused and configured to refuse requests meanwhile."""

    error_code = ErrorCode.PAUSED


class NotIdle(EngineError):
    """The command needs an idle engine; ``detail`` lists the unfinished work."""

    error_code = ErrorCode.NOT_IDLE


class Busy(EngineError):
    """Another exclusive command is running."""

    error_code = ErrorCode.BUSY


class NotOwner(EngineError):
    """The pause has another owner; ``force`` overrides it."""

    error_code = ErrorCode.NOT_OWNER


class NoSession(EngineError):
    """No such weight session is open: none was begun, or it has ended or expired."""

    error_code = ErrorCode.NO_SESSION


class SessionOpen(EngineError):
    """A weight session is open that the command does not belong to."""

    error_code = ErrorCode.SESSION_OPEN


class WeightsPoisoned(EngineError):
    """An update failed after its first byte; only a complete update makes the weights valid again."""

    error_code = ErrorCode.WEIGHTS_POISONED


class WeightsInvalid(EngineError):
    """The weights were released and not loaded again, or lost in a restart; a complete update makes them
    valid.
    """

    error_code = ErrorCode.WEIGHTS_INVALID


class MemoryReleased(EngineError):
    """The command needs memory that is released; resume it first."""

    error_code = ErrorCode.MEMORY_RELEASED


class GroupError(EngineError):
    """A weight update group is unknown, dead, or was not joined by every rank in time."""

    error_code = ErrorCode.GROUP_ERROR


class PartialUpdate(GroupError):
    """Some engines did not take an update that others have committed.

    Attributes:
        replies: the commit of each engine that has it, by its position in the chain.
        errors: why each of the others has not.
    """

    def __init__(
        self, names: Sequence[str], replies: dict[int, WeightUpdateReqOutput], errors: dict[int, CaesuraError]
    ) -> None:
        """Take the ``names`` of all engines, for people."""
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(names)} engines did not take the update, "
            f"first {names[first]}: {errors[first]}"
        )
        self.replies = replies
        self.errors = errors


class CheckpointError(EngineError):
    """A checkpoint is missing, truncated or not safetensors."""

    error_code = ErrorCode.CHECKPOINT_ERROR


class WeightMismatch(EngineError):
    """Names, shapes, dtypes or config fields differ from the model's; all are listed in ``detail``."""

    error_code = ErrorCode.WEIGHT_MISMATCH


class WeightsNotFinite(EngineError):
    """An update has values that are NaN or infinite, and the engine checks for them: it was not committed."""

    error_code = ErrorCode.WEIGHTS_NOT_FINITE


class UnsupportedModel(EngineError):
    """The model config requires something that this engine does not implement."""

    error_code = ErrorCode.UNSUPPORTED_MODEL


class EngineOutOfMemory(EngineError):
    """The engine ran out of device or host memory for this request."""

    error_code = ErrorCode.OUT_OF_MEMORY


class DeadlineExceeded(EngineError):
    """The operation's own deadline passed inside the engine."""

    error_code = ErrorCode.DEADLINE_EXCEEDED


class StateFileError(EngineError):
    """The engine's state file cannot be read or written, or another engine holds it."""

    error_code = ErrorCode.STATE_FILE_ERROR


class EndpointInUse(EngineError):
    """Another scheduler owns this endpoint."""

    error_code = ErrorCode.ENDPOINT_IN_USE


class Unsupported(EngineError):
    """The engine does not support this message in its configuration."""

    error_code = ErrorCode.UNSUPPORTED


class ShuttingDown(EngineError):
    """The engine is shutting down."""

    error_code = ErrorCode.SHUTTING_DOWN


class InternalError(EngineError):
    """A defect of the engine, or a failed step; ``detail["traceback"]`` if there is one."""

    error_code = ErrorCode.INTERNAL


class EngineDied(EngineError):
    """The scheduler process has ended, the connection was lost, or this client was closed."""

    error_code = ErrorCode.ENGINE_DIED


class EngineRestarting(EngineError):
    """The scheduler process has ended and its supervisor is starting a new one."""

    error_code = ErrorCode.ENGINE_RESTARTING


class TimedOut(EngineError, TimeoutError):
    """No reply within the caller's timeout. The command may still complete.

    Attributes:
        message_id: pass it as ``message_id=`` with the same arguments to attach to the command or its answer.
    """

    error_code = ErrorCode.TIMED_OUT

    @property
    def message_id(self) -> str:
        """Message id of the call; empty if it had none."""
        return str(self.detail.get("id", ""))


_CLASSES: dict[ErrorCode, type[EngineError]] = {cls.error_code: cls for cls in EngineError.__subclasses__()}
_CODES = {code.value: code for code in ErrorCode}
assert set(_CLASSES) == set(ErrorCode), f"codes without a class: {set(ErrorCode) - set(_CLASSES)}"


def error_for(code: str, message: str, detail: dict[str, Any] | None = None) -> EngineError:
    """Return the exception for ``code``; :class:`InternalError` for an unknown code."""
    known = _CODES.get(code, ErrorCode.INTERNAL)
    error = _CLASSES[known](message)
    if code and known != code:
        error.code = code
    error.detail = dict(detail or {})
    return error


def is_answer(error: BaseException) -> bool:
    """Return True if the call is finished, False if its caller only stopped waiting."""
    return isinstance(error, Exception) and not isinstance(error, TimedOut)


def raise_for(reply: ErrorReply) -> NoReturn:
    """Raise the exception of an error reply."""
    raise error_for(reply.code, reply.message, reply.detail)
