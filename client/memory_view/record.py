"""An engine's record of its memory, its growth over cycles of pause, and its figures in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import localtime, strftime

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


MIB = 1 << 20
MINUS = "\N{MINUS SIGN}"
_WORDS: dict[MemoryCause, str] = {
    "lease_expiry": "lease expiry",
    "update_begin": "update begins",
    "update_commit": "update commits",
    "update_failed": "update failed",
}


def model_label(path: str) -> str:
    parts = path.rstrip("/").split("/")
    cached = next((part for part in reversed(parts) if part.startswith("models--")), None)
    return parts[-1] if cached is None else cached.split("--")[-1]


def size(nbytes: float, *, sign: bool = False) -> str:
    """Return a size in MiB, from 10 GiB on in GiB; with ``sign``, an increase has a plus."""
    unit, scale = ("GiB", MIB << 10) if abs(nbytes) >= 10 * (MIB << 10) else ("MiB", MIB)
    value = round(nbytes / scale, 1) + 0.0  # no minus zero
    text = f"{value:{'+' if sign and value else ''},.1f} {unit}"
    return text.replace("-", MINUS)


def span(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def clock(at: float) -> str:
    return strftime("%H:%M:%S", localtime(at)) + f".{int(at % 1 * 10)}"


def cause(event: MemoryEvent) -> str:
    return _WORDS.get(event.cause, event.cause)
