"""Typed errors: one wire struct, one code per kind of failure, one client exception per code.

A request that fails is answered by :class:`ErrorReply`. ``code`` is for programs, ``message`` for people, ``detail``
carries the numbers (JSON-like values, keys depend on the code and are listed beside it below).
"""

from enum import StrEnum
from typing import Any

import msgspec

from .base import Reply


class ErrorCode(StrEnum):
    """What went wrong, in terms a client can act on."""

    MALFORMED_MESSAGE = "malformed_message"
    """The frames are not a message of this wire (garbage, wrong types, unknown fields). Nothing was done."""
    VERSION_MISMATCH = "version_mismatch"
    """Client and engine speak wires of different major versions. ``detail``: engine and client (``"major.minor"`` each)."""
    INVALID_REQUEST = "invalid_request"
    """A value is out of its range. ``detail``: field, value."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt plus ``max_new_tokens`` exceeds the context. ``detail``: prompt_tokens, max_new_tokens, limit."""
    EXCEEDS_KV_POOL = "exceeds_kv_pool"
    """The request could never fit, even alone. ``detail``: needed_tokens, total_tokens."""
    DUPLICATE_RID = "duplicate_rid"
    """A live generation already has this rid. ``detail``: rid."""
    ID_CONFLICT = "id_conflict"
    """The message id was used before with another body."""
    ANSWER_FORGOTTEN = "answer_forgotten"
    """The message was answered before, so long ago that the answer is no longer stored. Nothing was done again: a new id does it
    once more."""
    QUEUE_FULL = "queue_full"
    """Too many requests are waiting, or weight update groups are being joined. ``detail``: waiting, limit."""
    EPOCH_BEHIND = "epoch_behind"
    """``min_weights_epoch`` is above the engine's. ``detail``: weights_epoch, min_weights_epoch."""
    PAUSED = "paused"
    """The engine is configured to refuse requests while paused."""
    NOT_IDLE = "not_idle"
    """Needs an idle engine. ``detail``: what is pending (running, prefilling, waiting, held_tokens)."""
    BUSY = "busy"
    """Another exclusive command is running. ``detail``: running (its message type), id."""
    NOT_OWNER = "not_owner"
    """Another owner holds the pause; ``force`` overrides. ``detail``: owner."""
    NO_SESSION = "no_session"
    """No such weight session is open: there is none, or the ``session_id`` is of one that has ended."""
    SESSION_OPEN = "session_open"
    """A weight session is open: refused are a second ``begin``, calls and ends that do not name it or disagree with it, and
    whatever would commit it for somebody else. ``detail``: kind, age_s, and session_id where it is the sender's own."""
    WEIGHTS_POISONED = "weights_poisoned"
    """An update failed after its first written byte; only a complete update leaves this state."""
    WEIGHTS_INVALID = "weights_invalid"
    """Weights were released without a copy and not loaded again, or lost in a restart; only a complete update leaves this state."""
    MEMORY_RELEASED = "memory_released"
    """Needs memory that is released; resume it first. ``detail``: released (tags)."""
    GROUP_ERROR = "group_error"
    """A weight update group: unknown, dead, or not joined by every rank in time. ``detail``: group_name, and where known
    address, world_size, rank, ranks_seen."""
    CHECKPOINT_ERROR = "checkpoint_error"
    """A checkpoint cannot be read: missing, truncated, not safetensors. ``detail``: path, reason."""
    WEIGHT_MISMATCH = "weight_mismatch"
    """``detail``: missing, unexpected, mismatched (lists), config (fields that differ)."""
    UNSUPPORTED_MODEL = "unsupported_model"
    """The config asks for something this engine does not do. ``detail``: fields."""
    OUT_OF_MEMORY = "out_of_memory"
    """``detail``: needed_bytes, free_bytes where known. A sample ends with it when memory did not suffice for a single token of
    it; a command, when an allocation of its own failed."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The operation's own deadline passed. ``detail``: what was pending."""
    ENDPOINT_IN_USE = "endpoint_in_use"
    """Another scheduler owns this endpoint."""
    UNSUPPORTED = "unsupported"
    """A known message that this engine does not implement in its present configuration."""
    SHUTTING_DOWN = "shutting_down"
    """The engine is stopping."""
    INTERNAL = "internal"
    """A defect or a failed batch. ``detail``: traceback (text) where there is one."""
    ENGINE_DIED = "engine_died"
    """Raised by clients only: the scheduler process or its socket is gone."""
    ENGINE_RESTARTING = "engine_restarting"
    """Raised by front ends only: the scheduler process is gone and another one is being started. ``detail``: reason."""
    TIMED_OUT = "timed_out"
    """Raised by clients only: no answer within the caller's timeout. The command may still complete."""


class ErrorReply(Reply, kw_only=True):
    """The answer to a request that failed or was refused. ``id`` is ``""`` when the frame had no readable id."""

    code: str
    """One of the error codes; one that a client does not know means what ``internal`` means to it."""
    message: str
    """One sentence for a person."""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)
    """Numbers and names behind the error; the keys are listed beside each code. Empty: there are none."""


class CaesuraError(Exception):
    """Base of every error of this package, on both sides of the wire.

    Attributes:
        code: the :class:`ErrorCode`; as text where an engine of a newer minor version has sent one that is unknown here.
        message: one sentence for a person.
        detail: the numbers, keys by code.
    """

    def __init__(self, code: ErrorCode | str, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def to_reply(self, id: str) -> ErrorReply:
        """The wire form of this error, in answer to message ``id``."""
        return ErrorReply(id=id, code=self.code, message=self.message, detail=self.detail)
