"""The memory history of an engine: readings, and what caused them (docs/explanation/memory.md)."""

from typing import Annotated, Literal

import msgspec

from .base import Reply, ReplyRecord
from .control import ControlRequest, MemoryByTag

MemoryCause = Literal[
    "start", "sample", "pause", "continue", "lease_expiry", "flush", "update_begin", "update_commit",
    "update_failed", "release", "resume", "idle", "failure",
]  # fmt: skip
MAX_HISTORY_EVENTS = 256
"""Maximum events in one reply, which take the control loop about a millisecond."""
MAX_EVENT_SEQ = 2**63 - 1
"""Largest event number."""


class MemoryEvent(ReplyRecord, kw_only=True, frozen=True):
    """One reading of the memory, and what caused it."""

    seq: int
    """Event number, counted from 1."""
    at: float
    """Unix time in seconds."""
    until: float
    """Same as ``at``, except for a ``sample``: time of the last of the equal readings that it stands for."""
    cause: MemoryCause
    """``sample``: every few seconds while steps run. ``idle``: the cache was emptied. ``failure``: a step
    failed. ``update_begin``: before the first byte. The others are the ends of commands."""
    detail: str
    """Mode of a pause, transport and label of an update, tags of a release, and so on."""
    step: int
    """Steps started until then."""
    weights_epoch: int
    reserved: int
    allocated: int
    by_tag: MemoryByTag
    """``reserved`` by purpose; weights, KV and reference may be the last event's if no cache was emptied."""
    returned: int | None = None
    """Bytes returned by emptying the cache; 0 if more was allocated meanwhile; None: not emptied."""
    residual: int | None = None
    """``continue`` and ``lease_expiry``: growth of ``reserved`` since the pause began; others None."""


class MemoryStretch(ReplyRecord, kw_only=True, frozen=True):
    """Summary of a period whose events are no longer kept one by one."""

    start: float
    """Unix time of its first event, in seconds."""
    end: float
    """Unix time of its last event, in seconds."""
    events: int
    """Number of events."""
    reserved_min: int
    """Smallest ``reserved`` of its events, in bytes."""
    reserved_max: int
    """Largest ``reserved`` of its events, in bytes."""
    reserved_last: int
    """``reserved`` of its last event, in bytes."""
    pauses: int
    """Number of pauses among its events."""
    returned: int
    """Total bytes returned to the system by emptying the cache."""


class GetMemoryHistoryReqInput(ControlRequest, kw_only=True):
    """Get the memory history. Answered by the control loop in every state; reads no memory figures."""

    after: Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_SEQ)] = 0
    """Only events with a higher ``seq``."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_HISTORY_EVENTS)] = MAX_HISTORY_EVENTS
    """Maximum number of events, the oldest first."""


class GetMemoryHistoryReqOutput(Reply, kw_only=True):
    """Events that are kept, oldest first."""

    events: list[MemoryEvent]
    """In the order of ``seq``; empty if none is newer than ``after``."""
    more: bool
    """True: there are newer events; ask again with ``after`` set to the last of these."""
    older: list[MemoryStretch] = []
    """Summaries of the time before the oldest kept event; empty if ``after`` is later."""
