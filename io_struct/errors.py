"""Typed errors: one wire struct, one code per kind of failure, one client exception per code.

``code`` is for programs, ``message`` for people, ``detail`` has the numbers; each code lists its keys.
"""

from enum import StrEnum
from typing import Any

import msgspec

from .base import Reply


class ErrorCode(StrEnum):
    """The kinds of failure that a client can react to."""

    MALFORMED_MESSAGE = "malformed_message"
    """The frames are not a valid message; nothing was done. ``detail``: field, where one does not fit."""
    VERSION_MISMATCH = "version_mismatch"
    """Client and engine use different major versions of the wire. ``detail``: engine, client."""
    INVALID_REQUEST = "invalid_request"
    """A value is out of its range. ``detail``: field, value."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """Prompt plus ``max_new_tokens`` is too long. ``detail``: prompt_tokens, max_new_tokens, limit."""
    EXCEEDS_KV_POOL = "exceeds_kv_pool"
    """The request needs more KV than the whole pool has. ``detail``: needed_tokens, total_tokens."""
    DUPLICATE_RID = "duplicate_rid"
    """A live generation already has this rid. ``detail``: rid."""
    ID_CONFLICT = "id_conflict"
    """The message id was used before with a different body."""
    ANSWER_FORGOTTEN = "answer_forgotten"
    """The message was answered, and its answer is no longer stored. To repeat the command, send a new id."""
    QUEUE_FULL = "queue_full"
    """The waiting queue is full, or too many groups are being joined. ``detail``: waiting, limit."""
    EPOCH_BEHIND = "epoch_behind"
    """``min_weights_epoch`` is above the engine's. ``detail``: weights_epoch, min_weights_epoch."""
    PAUSED = "paused"
    """The engine is paused and configured to refuse requests meanwhile."""
    NOT_IDLE = "not_idle"
    """The command needs an idle engine. ``detail``: running, prefilling, waiting, held_tokens."""
    BUSY = "busy"
    """Another exclusive command is running. ``detail``: running (its message type), id."""
    NOT_OWNER = "not_owner"
    """The pause has another owner; ``force`` overrides it. ``detail``: owner."""
    NO_SESSION = "no_session"
    """No such weight update session is open, or the ``session_id`` belongs to one that has ended."""
    SESSION_OPEN = "session_open"
    """A session refuses a ``begin``, calls that do not name or match it, and commits for another sender.
    ``detail``: kind, age_s, and session_id if it is the sender's."""
    WEIGHTS_POISONED = "weights_poisoned"
    """A weight update failed after its first byte. Only a complete update makes the weights valid again."""
    WEIGHTS_INVALID = "weights_invalid"
    """Weights were released without a copy or lost in a restart: only a complete update makes them valid."""
    MEMORY_RELEASED = "memory_released"
    """The command needs memory that is released; resume it first. ``detail``: released (tags)."""
    GROUP_ERROR = "group_error"
    """A weight update group is unknown or dead, or some ranks did not join it in time. ``detail``:
    group_name, and where known address, world_size, rank, ranks_seen."""
    CHECKPOINT_ERROR = "checkpoint_error"
    """A checkpoint is missing, truncated, or not in safetensors format. ``detail``: path, reason."""
    BASE_MISMATCH = "base_mismatch"
    """A delta is of other weights than the engine's, or makes others than it says; nothing was written.
    ``detail``: weights, weights_epoch, and what differs: base_epoch, base_digest, base_version or digest,
    with got."""
    UPDATE_REFUSED = "update_refused"
    """An update changes less than ``min_changed``, or more than ``max_rel_norm``, and was to be refused.
    ``detail``: changed, rel_norm by group."""
    NO_ROLLBACK = "no_rollback"
    """The values before the last commit are not kept, or have another digest. ``detail``: weights_epoch."""
    WEIGHT_MISMATCH = "weight_mismatch"
    """Tensors or config do not match the model. ``detail``: missing, unexpected, mismatched, config."""
    WEIGHTS_NOT_FINITE = "weights_not_finite"
    """``check_finite`` found NaN or infinity. ``detail``: tensors (how many), non_finite (first three)."""
    UNKNOWN_ADAPTER = "unknown_adapter"
    """No adapter of this name is loaded. ``detail``: adapter, loaded (names)."""
    ADAPTER_EXISTS = "adapter_exists"
    """An adapter of this name is loaded, and ``replace`` is false. ``detail``: adapter."""
    NO_ADAPTER_SLOT = "no_adapter_slot"
    """Every slot has a pinned adapter, or one that requests use. ``detail``: slots, pinned, in_use."""
    UNSUPPORTED_MODEL = "unsupported_model"
    """The model config requires something that this engine does not implement. ``detail``: fields."""
    OUT_OF_MEMORY = "out_of_memory"
    """An allocation failed: a command's, or one token's. ``detail``: needed_bytes, free_bytes where known."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    """The operation's own deadline passed. ``detail``: what was not finished."""
    STATE_FILE_ERROR = "state_file_error"
    """The state file fails or is held; a refused commit poisons the weights. ``detail``: path, reason."""
    ENDPOINT_IN_USE = "endpoint_in_use"
    """Another scheduler owns this endpoint."""
    UNSUPPORTED = "unsupported"
    """The engine does not support this message in its configuration."""
    SHUTTING_DOWN = "shutting_down"
    """The engine is shutting down."""
    INTERNAL = "internal"
    """A defect of the engine, or a failed step. ``detail``: traceback (text) where there is one."""
    ENGINE_DIED = "engine_died"
    """Raised by clients only: the scheduler process or its socket is gone."""
    ENGINE_RESTARTING = "engine_restarting"
    """Raised by front ends: the scheduler process has ended, another starts. ``detail``: reason."""
    SESSION_GONE = "session_gone"
    """Raised by front ends: a session of turns has ended. ``detail``: reason."""
    TIMED_OUT = "timed_out"
    """Raised by clients only: no reply within the timeout; the command may still complete. ``detail``: id,
    timeout, and for a generation on a paused engine paused (mode, owner, age_s)."""


class ErrorReply(Reply, kw_only=True):
    """The answer to a request that failed or was refused; ``id`` is ``""`` if the frame had none."""

    code: str
    """One of the error codes. Clients treat an unknown code like ``internal``."""
    message: str
    """One sentence for people."""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)
    """Numbers and names about the error; the keys are listed with each code."""


class CaesuraError(Exception):
    """Base of every error of this package, on both sides of the wire.

    Attributes:
        code: the :class:`ErrorCode`, or the text of one that only a newer engine knows.
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
        """Return the wire form of this error, in answer to message ``id``."""
        return ErrorReply(id=id, code=self.code, message=self.message, detail=self.detail)
