"""An engine's record of its memory, and its growth over the cycles of pause and continue."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...io_struct import GetStatusReqOutput, MemoryByTag, MemoryCause, MemoryEvent, MemoryStretch
from ..connection.blocking import ControlClient

TAGS = ("runtime", "weights", "derived", "kv", "reference", "graphs", "answers", "workspace", "other")
"""Parts of the reserved memory as they are stacked: what changes least is at the bottom."""
assert set(TAGS) == set(MemoryByTag.__struct_fields__)
SETTLED = 10
"""Cycles after which an engine's workspaces have reached their sizes."""
_ENDS: tuple[MemoryCause, ...] = ("continue", "lease_expiry")


@dataclass(frozen=True)
class Growth:
    """Growth between two continues, in bytes."""

    reserved: int
    kv: int
    """Bytes of KV pages that were used for the first time."""
    cycles: int


@dataclass(frozen=True)
class MemoryRecord:
    status: GetStatusReqOutput
    events: Sequence[MemoryEvent]
    """Oldest first, none missing between the first and the last."""
    older: Sequence[MemoryStretch] = ()
    """Summaries of what came before the first event."""

    @property
    def continues(self) -> list[MemoryEvent]:
        """Ends of pauses, at which one cycle can be compared with another."""
        return [event for event in self.events if event.cause in _ENDS]

    @property
    def growth(self) -> "Growth | None":
        """Growth from the tenth (with fewer: the first) continue to the last; None with fewer than two."""
        ends = self.continues
        if len(ends) < 2:
            return None
        first = SETTLED - 1 if len(ends) > SETTLED else 0
        kv = ends[-1].by_tag.kv - ends[first].by_tag.kv
        return Growth(ends[-1].reserved - ends[first].reserved, kv, len(ends) - 1 - first)


def fetch(client: ControlClient, known: MemoryRecord | None = None, *, timeout: float | None) -> MemoryRecord:
    """Ask an engine for what is new since ``known``; ``timeout`` (seconds) bounds each of the calls."""
    events = [] if known is None else list(known.events)
    older = () if known is None else known.older
    last = events[-1].seq if events else 0
    more = True
    while more:
        # Again the one that is known already: a sample is extended while memory is steady.
        reply = client.memory_history(after=max(0, last - 1), timeout=timeout)
        if events and reply.events and reply.events[0].seq == last:
            events.pop()
        elif reply.events and reply.events[0].seq != last + 1:
            events = []  # it has forgotten faster than we asked, or is another engine
        older = reply.older or older
        events += reply.events
        more = reply.more
        last = events[-1].seq if events else 0
    return MemoryRecord(client.status(timeout=timeout), events, older)
