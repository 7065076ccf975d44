"""One exception class per error code, so that callers catch what they can act on.

Invariants:
- Every code of :class:`~caesura.io_struct.ErrorCode` has exactly one class here (checked at import); an unknown code
  from a newer engine becomes :class:`InternalError`, whose ``code`` is then that text.
- ``detail`` carries the engine's numbers untouched; its keys are listed beside each code in ``io_struct/errors.py``.
"""
# ruff: noqa: N818  (the names say what happened, as the codes do; the common base carries the suffix)

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..io_struct import CaesuraError, ErrorCode, ErrorReply

if TYPE_CHECKING:
    from .wire.results import GenerateOutput


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
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.ENGINE_DIED,
        ErrorCode.ENGINE_RESTARTING,
    }
)
"""Conditions of the engine rather than faults of the call, which pass without the caller doing anything about the call."""


class EngineError(CaesuraError):
    """Base of everything a client raises on its own account or for the engine.

    Attributes:
        error_code: of all errors of this class; ``code`` differs from it only for a code of a newer engine.
        output: the partial result, where a generation failed after it began; else None.
        outputs: the results of all samples of that request that are known, the failed one included.
    """

    error_code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    output: "GenerateOutput | None" = None
    outputs: "tuple[GenerateOutput, ...]" = ()

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(self.error_code, message, **detail)

    @property
    def retryable(self) -> bool:
        """The same call may succeed later: the engine's condition has refused it. Not so where it may have been done already
        (:class:`TimedOut`)."""
        return self.code in RETRYABLE


class MalformedMessage(EngineError):
    """The engine could not read the request: wrong types or unknown fields. Nothing was done."""

    error_code = ErrorCode.MALFORMED_MESSAGE


class VersionMismatch(EngineError):
    """Client and engine speak wires of different major versions."""

    error_code = ErrorCode.VERSION_MISMATCH


class InvalidRequest(EngineError):
    """A value is out of its range."""

    error_code = ErrorCode.INVALID_REQUEST


class PromptTooLong(EngineError):
    """Prompt plus new tokens exceed the context."""

    error_code = ErrorCode.PROMPT_TOO_LONG


class ExceedsKVPool(EngineError):
    """The request could never fit into the KV pool, even alone."""

    error_code = ErrorCode.EXCEEDS_KV_POOL


class DuplicateRid(EngineError):
    """A live generation already has this rid."""

    error_code = ErrorCode.DUPLICATE_RID


class IdConflict(EngineError):
    """The message id was used before with another body."""

    error_code = ErrorCode.ID_CONFLICT


class AnswerForgotten(EngineError):
    """The message was answered before, and the engine has not kept the answer; nothing was done again."""

    error_code = ErrorCode.ANSWER_FORGOTTEN


class QueueFull(EngineError):
    """Too many requests are waiting; try again later."""

    error_code = ErrorCode.QUEUE_FULL


class EpochBehind(EngineError):
    """The engine's weights are older than ``min_weights_epoch``."""

    error_code = ErrorCode.EPOCH_BEHIND


class EnginePaused(EngineError):
    """The engine is configured to refuse requests while paused."""

    error_code = ErrorCode.PAUSED


class NotIdle(EngineError):
    """Needs an idle engine; ``detail`` says what is pending."""

    error_code = ErrorCode.NOT_IDLE


class Busy(EngineError):
    """Another exclusive command is running."""

    error_code = ErrorCode.BUSY


class NotOwner(EngineError):
    """Another owner holds the pause; ``force`` overrides."""

    error_code = ErrorCode.NOT_OWNER


class NoSession(EngineError):
    """No such weight session is open: none was begun, or it has ended or expired."""

    error_code = ErrorCode.NO_SESSION


class SessionOpen(EngineError):
    """A weight session is open that the command does not belong to."""

    error_code = ErrorCode.SESSION_OPEN


class WeightsPoisoned(EngineError):
    """An update failed half-way; only a complete update leads out."""

    error_code = ErrorCode.WEIGHTS_POISONED


class WeightsInvalid(EngineError):
    """Weights were released and not loaded again, or lost in a restart; a complete update helps."""

    error_code = ErrorCode.WEIGHTS_INVALID


class MemoryReleased(EngineError):
    """Needs memory that is released; resume it first."""

    error_code = ErrorCode.MEMORY_RELEASED


class GroupError(EngineError):
    """A weight update group is unknown, dead, or was not joined by every rank in time."""

    error_code = ErrorCode.GROUP_ERROR


class CheckpointError(EngineError):
    """A checkpoint is missing, truncated or not safetensors."""

    error_code = ErrorCode.CHECKPOINT_ERROR


class WeightMismatch(EngineError):
    """Names, shapes, dtypes or config fields differ from the model's; all are listed in ``detail``."""

    error_code = ErrorCode.WEIGHT_MISMATCH


class UnsupportedModel(EngineError):
    """The model's config asks for something this engine does not do."""

    error_code = ErrorCode.UNSUPPORTED_MODEL


class EngineOutOfMemory(EngineError):
    """The engine ran out of device or host memory for this request."""

    error_code = ErrorCode.OUT_OF_MEMORY


class DeadlineExceeded(EngineError):
    """The operation's own deadline passed inside the engine."""

    error_code = ErrorCode.DEADLINE_EXCEEDED


class EndpointInUse(EngineError):
    """Another scheduler owns this endpoint."""

    error_code = ErrorCode.ENDPOINT_IN_USE


class Unsupported(EngineError):
    """A known message that this engine does not implement in its present configuration."""

    error_code = ErrorCode.UNSUPPORTED


class ShuttingDown(EngineError):
    """The engine is stopping."""

    error_code = ErrorCode.SHUTTING_DOWN


class InternalError(EngineError):
    """A defect or a failed batch; ``detail["traceback"]`` where there is one."""

    error_code = ErrorCode.INTERNAL


class EngineDied(EngineError):
    """The scheduler process or the connection to it is gone, or this client was closed."""

    error_code = ErrorCode.ENGINE_DIED


class EngineRestarting(EngineError):
    """The scheduler process is gone and its supervisor is starting another one."""

    error_code = ErrorCode.ENGINE_RESTARTING


class TimedOut(EngineError, TimeoutError):
    """No answer within the caller's timeout. The command may still complete.

    Attributes:
        message_id: pass it as ``message_id=`` with the same arguments to attach to the command or its stored answer.
    """

    error_code = ErrorCode.TIMED_OUT

    @property
    def message_id(self) -> str:
        """Of the call that was given up; empty where it had none."""
        return str(self.detail.get("id", ""))


_CLASSES: dict[ErrorCode, type[EngineError]] = {cls.error_code: cls for cls in EngineError.__subclasses__()}
_CODES = {code.value: code for code in ErrorCode}
assert set(_CLASSES) == set(ErrorCode), f"codes without a class: {set(ErrorCode) - set(_CLASSES)}"


def error_for(code: str, message: str, detail: dict[str, Any] | None = None) -> EngineError:
    """The exception of ``code``, not raised; :class:`InternalError` for a code this client does not know."""
    known = _CODES.get(code, ErrorCode.INTERNAL)
    error = _CLASSES[known](message)
    if code and known != code:
        error.code = code
    error.detail = dict(detail or {})
    return error


def is_answer(error: BaseException) -> bool:
    """Whether what failed is over; False where its caller has only stopped waiting: it may still happen."""
    return isinstance(error, Exception) and not isinstance(error, TimedOut)


def raise_for(reply: ErrorReply) -> NoReturn:
    """Raise the exception that ``reply`` stands for."""
    raise error_for(reply.code, reply.message, reply.detail)
