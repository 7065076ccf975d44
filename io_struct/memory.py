"""What an engine's memory has been, and why: its history of memory events (semantics: docs/memory.md)."""

from typing import Annotated, Literal

import msgspec

from .base import Reply, ReplyRecord
from .control import ControlRequest, MemoryByTag

MemoryCause = Literal[
    "start", "sample", "pause", "continue", "lease_expiry", "flush", "update_begin", "update_commit",
    "update_failed", "release", "resume", "idle", "failure",
]  # fmt: skip
MAX_HISTORY_EVENTS = 256
"""Events in one answer: a millisecond of the control loop."""
MAX_EVENT_SEQ = 2**63 - 1
"""Largest number of an event."""


class MemoryEvent(ReplyRecord, kw_only=True, frozen=True):
    """One look at the memory, and why somebody looked."""

    seq: int
    """Counts from 1."""
    at: float
    """Seconds since the epoch."""
    until: float
    """``at``, but for a ``sample``: the last of the equal looks that it stands for."""
    cause: MemoryCause
    """``sample``: while steps run, every few seconds. ``idle``: the emptying after a while without work. ``failure``: a step
    raised. ``update_begin``: before the first byte is written. The others are the ends of commands."""
    detail: str
    """Mode of a pause, transport and label of an update, tags of a release, …"""
    step: int
    """Steps launched until then."""
    weights_epoch: int
    reserved: int
    """Bytes that the device allocator holds, after whatever happened."""
    allocated: int
    """Bytes that it has handed out."""
    by_tag: MemoryByTag
    returned: int | None = None
    """Bytes that the system got back from an emptying; may be negative. None: nothing was emptied."""
    residual: int | None = None
    """``continue`` and ``lease_expiry``: reserved bytes more than when the pause began. None: otherwise."""


class MemoryStretch(ReplyRecord, kw_only=True, frozen=True):
    """What is left of events that are no longer kept one by one: a stretch of time."""

    start: float
    """Seconds since the epoch."""
    end: float
    events: int
    reserved_min: int
    reserved_max: int
    reserved_last: int
    pauses: int
    returned: int
    """Bytes, in sum."""


class GetMemoryHistoryReqInput(ControlRequest, kw_only=True):
    """The engine's memory events. Answered by the control loop like status, in every state; reads nothing anew."""

    after: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_SEQ)] = 0
    """Only events with a higher ``seq``."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_HISTORY_EVENTS)] = MAX_HISTORY_EVENTS
    """At most so many events, the oldest first."""


class GetMemoryHistoryReqOutput(Reply, kw_only=True):
    """Some of the events that are kept, oldest first."""

    events: list[MemoryEvent]
    more: bool
    """There are newer ones: ask again, after the last of these."""
    older: list[MemoryStretch] = []
    """What came before the oldest event that is kept; empty where ``after`` is past it."""
