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
    """Weights epoch at that moment."""
    reserved: int
    """Bytes that the device allocator holds, after whatever happened."""
    allocated: int
    """Bytes that it has handed out."""
    by_tag: MemoryByTag
    """``reserved`` by what holds it. At ``pause``, ``continue`` and ``lease_expiry``, weights, KV and reference are those of
    the last event of another cause."""
    returned: int | None = None
    """Bytes that the system got back from an emptying; may be negative. None: nothing was emptied."""
    residual: int | None = None
    """``continue`` and ``lease_expiry``: reserved bytes more than when the pause began. None: otherwise."""


class MemoryStretch(ReplyRecord, kw_only=True, frozen=True):
    """What is left of events that are no longer kept one by one: a stretch of time."""

    start: float
    """Seconds since the epoch, of its first event."""
    end: float
    """Seconds since the epoch, of its last event."""
    events: int
    """Number of events in it."""
    reserved_min: int
    """Smallest ``reserved`` of its events, in bytes."""
    reserved_max: int
    """Largest ``reserved`` of its events, in bytes."""
    reserved_last: int
    """``reserved`` of its last event, in bytes."""
    pauses: int
    """Number of its events that are pauses."""
    returned: int
    """Bytes that the system got back from emptyings, in sum; negative ones count 0."""


class GetMemoryHistoryReqInput(ControlRequest, kw_only=True):
    """The engine's memory events. Answered by the control loop like status, in every state; reads nothing anew."""

    after: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_SEQ)] = 0
    """Only events with a higher ``seq``."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_HISTORY_EVENTS)] = MAX_HISTORY_EVENTS
    """At most so many events, the oldest first."""


class GetMemoryHistoryReqOutput(Reply, kw_only=True):
    """Some of the events that are kept, oldest first."""

    events: list[MemoryEvent]
    """In the order of ``seq``. Empty: none is newer than ``after``."""
    more: bool
    """True: there are newer ones; ask again, after the last of these."""
    older: list[MemoryStretch] = []
    """What came before the oldest event that is kept; empty where ``after`` is past it."""
