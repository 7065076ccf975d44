"""One exception class per error code, so that callers catch what they can act on.

Invariants: each :class:`~caesura.io_struct.ErrorCode` has one class; a newer engine's code becomes the
``code`` of an :class:`InternalError`. ``detail`` has the engine's numbers (``io_struct/errors.py``).
"""
# ruff: noqa: N818  (the names say what happened, as the codes do; the common base carries the suffix)

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..io_struct import CaesuraError, ErrorCode, ErrorReply, WeightUpdateReqOutput

if TYPE_CHECKING:
    from .connection.image_generation import ImageOutput
    from .connection.results import GenerateOutput


__all__ = [
    "AdapterExists",
    "AnswerForgotten",
    "BaseMismatch",
    "Busy",
    "CheckpointError",
    "DeadlineExceeded",
    "DuplicateRid",
    "EndpointInUse",
    "EngineDied",
    "EngineError",
    "EngineOutOfMemory",
    "EnginePaused",
    "EngineRestarting",
    "EpochBehind",
    "ExceedsKVPool",
    "GroupError",
    "IdConflict",
    "InternalError",
    "InvalidRequest",
    "MalformedMessage",
    "MemoryReleased",
    "NoAdapterSlot",
    "NoRollback",
    "NoSession",
    "NotIdle",
    "NotOwner",
    "PartialUpdate",
    "PromptTooLong",
    "QueueFull",
    "SessionOpen",
    "ShuttingDown",
    "StateFileError",
    "TimedOut",
    "UnknownAdapter",
    "Unsupported",
    "UnsupportedModel",
    "UpdateRefused",
    "VersionMismatch",
    "WeightMismatch",
    "WeightsInvalid",
    "WeightsNotFinite",
    "WeightsPoisoned",
    "raise_for",
]

RETRYABLE: set[str] = set()
"""Codes for conditions of the engine, which can pass; the same call may succeed later."""


class EngineError(CaesuraError):
    """Base of all errors that a client raises.

    Attributes:
        error_code: the code of this class; ``code`` differs only for an unknown code of a newer engine.
        output: the partial result of a generation that failed after its start; else None.
        outputs: all known results of that request's samples, including the failed one.
    """

    error_code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    output: "GenerateOutput | None" = None
    outputs: "tuple[GenerateOutput, ...] | tuple[ImageOutput, ...]" = ()

    def __init_subclass__(cls, code: ErrorCode | None = None, passes: bool = False) -> None:
        """Give a class its code; its condition ``passes`` if the same call may succeed later."""
        super().__init_subclass__()
        if code is not None:
            cls.error_code = code
        if passes:
            RETRYABLE.add(cls.error_code)

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(self.error_code, message, **detail)

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed later, and cannot have been executed already."""
        return self.code in RETRYABLE


class MalformedMessage(EngineError, code=ErrorCode.MALFORMED_MESSAGE):
    """The engine could not read the request: wrong types or unknown fields. Nothing was done."""


class VersionMismatch(EngineError, code=ErrorCode.VERSION_MISMATCH):
    """Client and engine use different major versions of the wire."""


class InvalidRequest(EngineError, code=ErrorCode.INVALID_REQUEST):
    """A value is out of its range."""


class PromptTooLong(EngineError, code=ErrorCode.PROMPT_TOO_LONG):
    """Prompt plus ``max_new_tokens`` exceeds the context length."""


class ExceedsKVPool(EngineError, code=ErrorCode.EXCEEDS_KV_POOL):
    """The request needs more KV than the whole pool has."""


class DuplicateRid(EngineError, code=ErrorCode.DUPLICATE_RID):
    """A live generation already has this rid."""


class UnknownAdapter(EngineError, code=ErrorCode.UNKNOWN_ADAPTER):
    """No adapter of this name is loaded."""


class AdapterExists(EngineError, code=ErrorCode.ADAPTER_EXISTS):
    """An adapter of this name is loaded already."""


class NoAdapterSlot(EngineError, code=ErrorCode.NO_ADAPTER_SLOT, passes=True):
    """Every slot has a pinned adapter, or one that requests use."""


class IdConflict(EngineError, code=ErrorCode.ID_CONFLICT):
    """The message id was used before with a different body."""


class AnswerForgotten(EngineError, code=ErrorCode.ANSWER_FORGOTTEN):
    """The message was answered before and its answer is no longer stored; nothing was done again."""


class QueueFull(EngineError, code=ErrorCode.QUEUE_FULL, passes=True):
    """Too many requests are waiting; try again later."""


class EpochBehind(EngineError, code=ErrorCode.EPOCH_BEHIND, passes=True):
    """The engine's weights are older than ``min_weights_epoch``."""


class EnginePaused(EngineError, code=ErrorCode.PAUSED, passes=True):
    """The engine is paused and configured to refuse requests meanwhile."""


class NotIdle(EngineError, code=ErrorCode.NOT_IDLE, passes=True):
    """The command needs an idle engine; ``detail`` lists the unfinished work."""


class Busy(EngineError, code=ErrorCode.BUSY, passes=True):
    """Another exclusive command is running."""


class NotOwner(EngineError, code=ErrorCode.NOT_OWNER):
    """The pause has another owner; ``force`` overrides it."""


class NoSession(EngineError, code=ErrorCode.NO_SESSION):
    """No such weight session is open: none was begun, or it has ended or expired."""


class SessionOpen(EngineError, code=ErrorCode.SESSION_OPEN, passes=True):
    """A weight session is open that the command does not belong to."""


class WeightsPoisoned(EngineError, code=ErrorCode.WEIGHTS_POISONED, passes=True):
    """An update failed after its first byte; only a complete update makes the weights valid again."""


class WeightsInvalid(EngineError, code=ErrorCode.WEIGHTS_INVALID, passes=True):
    """The weights were released, or lost in a restart; a complete update makes them valid."""


class MemoryReleased(EngineError, code=ErrorCode.MEMORY_RELEASED, passes=True):
    """The command needs memory that is released; resume it first."""


class GroupError(EngineError, code=ErrorCode.GROUP_ERROR):
    """A weight update group is unknown, dead, or was not joined by every rank in time."""


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


class CheckpointError(EngineError, code=ErrorCode.CHECKPOINT_ERROR):
    """A checkpoint is missing, truncated or not safetensors."""


class BaseMismatch(EngineError, code=ErrorCode.BASE_MISMATCH):
    """A delta does not fit the engine's weights, which are as they were: send a full update."""


class UpdateRefused(EngineError, code=ErrorCode.UPDATE_REFUSED):
    """An update changes less or more than its bounds allow; ``detail`` has its figures."""


class NoRollback(EngineError, code=ErrorCode.NO_ROLLBACK):
    """The values before the last commit are not kept: only a delta's are, until another change."""


class WeightMismatch(EngineError, code=ErrorCode.WEIGHT_MISMATCH):
    """Names, shapes, dtypes or config fields differ from the model's; all are listed in ``detail``."""


class WeightsNotFinite(EngineError, code=ErrorCode.WEIGHTS_NOT_FINITE):
    """An update has values that are NaN or infinite, and the engine checks for them: it was not committed."""


class UnsupportedModel(EngineError, code=ErrorCode.UNSUPPORTED_MODEL):
    """The model config requires something that this engine does not implement."""


class EngineOutOfMemory(EngineError, code=ErrorCode.OUT_OF_MEMORY):
    """The engine ran out of device or host memory for this request."""


class DeadlineExceeded(EngineError, code=ErrorCode.DEADLINE_EXCEEDED):
    """The operation's own deadline passed inside the engine."""


class StateFileError(EngineError, code=ErrorCode.STATE_FILE_ERROR, passes=True):
    """The engine's state file cannot be read or written, or another engine holds it."""


class EndpointInUse(EngineError, code=ErrorCode.ENDPOINT_IN_USE):
    """Another scheduler owns this endpoint."""


class Unsupported(EngineError, code=ErrorCode.UNSUPPORTED):
    """The engine does not support this message in its configuration."""


class ShuttingDown(EngineError, code=ErrorCode.SHUTTING_DOWN, passes=True):
    """The engine is shutting down."""


class InternalError(EngineError, code=ErrorCode.INTERNAL):
    """A defect of the engine, or a failed step; ``detail["traceback"]`` if there is one."""


class EngineDied(EngineError, code=ErrorCode.ENGINE_DIED, passes=True):
    """The scheduler process has ended, the connection was lost, or this client was closed."""


class EngineRestarting(EngineError, code=ErrorCode.ENGINE_RESTARTING, passes=True):
    """The scheduler process has ended and its supervisor is starting a new one."""


class SessionGone(EngineError, code=ErrorCode.SESSION_GONE):
    """A session of turns was finished, has expired, was evicted, or never was."""


class TimedOut(EngineError, TimeoutError, code=ErrorCode.TIMED_OUT):
    """No reply within the caller's timeout. The command may still complete.

    Attributes:
        message_id: pass it with the same arguments to attach to the command or its answer.
    """

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
