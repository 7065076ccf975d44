"""An engine's record of its memory, and conclusions: growth over the cycles of pause and continue."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...io_struct import GetStatusReqOutput, MemoryByTag, MemoryCause, MemoryEvent, MemoryStretch
from ..connection.blocking import ControlClient

TAGS = ("runtime", "weights", "derived", "kv", "reference", "graphs", "answers", "workspace", "other")
"""Parts of the reserved memory, in the order in which they are stacked: what changes least is at the bottom.
"""
assert set(TAGS) == set(MemoryByTag.__struct_fields__)
SETTLED = 10
"""Cycles after which an engine's workspaces have reached their sizes."""
_ENDS: tuple[MemoryCause, ...] = ("continue", "lease_expiry")


@dataclass(frozen=True)
class Growth:
    """Between two continues, in bytes."""

    reserved: int
    kv: int
    """How much of it are pages of the KV pool that were used for the first time."""
    cycles: int


@dataclass(frozen=True)
class MemoryRecord:
    """One engine's memory, as far as it remembers."""

    status: GetStatusReqOutput
    events: Sequence[MemoryEvent]
    """Oldest first, none missing between the first and the last."""
    older: Sequence[MemoryStretch] = ()
    """What came before the first event."""

    @property
    def continues(self) -> list[MemoryEvent]:
        """The ends of pauses: where one cycle can be compared with another."""
        return [event for event in self.events if event.cause in _ENDS]

    @property
    def growth(self) -> "Growth | None":
        """From the tenth continue (with fewer: the first) to the last. None: there are under two."""
        ends = self.continues
        if len(ends) < 2:
            return None
        first = SETTLED - 1 if len(ends) > SETTLED else 0
        kv = ends[-1].by_tag.kv - ends[first].by_tag.kv
        return Growth(ends[-1].reserved - ends[first].reserved, kv, len(ends) - 1 - first)


def fetch(client: ControlClient, known: MemoryRecord | None = None, *, timeout: float | None) -> MemoryRecord:
    """Ask an engine; ``timeout`` (seconds) bounds each of the calls.

    Args:
        known: what an earlier call returned: only what is new since then is asked for.
    """
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
