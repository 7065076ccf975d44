"""The load of an engine over time, for charts: from the start of the server that looks, in bounded memory.

Invariants:
- The last ticks are :data:`TICK_S` apart. Earlier ones are thinned: whenever there are too many, every second one goes.
- Two ticks between which nobody knows what the engine did are marked, so that nothing is drawn from one to the other. The
  mark moves to the next tick when its own is dropped.
"""

from collections import deque

import msgspec

TICKS = 1200
"""Maximum number of recent ticks, and of earlier ones."""
TICK_S = 1.0
"""Seconds between two ticks."""
GAP_S = 10.0
"""Seconds without an answer after which a tick does not continue the one before."""


class Tick(msgspec.Struct, array_like=True):
    """What a chart shows of one moment."""

    at: float
    """Seconds since the epoch."""
    uptime_s: float
    generated_tokens: int
    running: int
    waiting: int
    kv_used: int
    """Tokens whose KV live requests hold."""
    reserved: int
    """Bytes that the device allocator holds."""
    loads: list[int] = []
    """Samples that each replica has to generate; -1 if it does not serve. Empty without replicas."""
    gap: bool = False
    """Nobody knows what the engine did since the tick before."""


class Ticks:
    """The ticks of one engine."""

    def __init__(self) -> None:
        self._recent: deque[Tick] = deque()
        self._early: list[Tick] = []
        self._stride = 1
        self._skipped = 0

    def add(self, tick: Tick) -> None:
        """Add a tick. It replaces the last one if that is less than :data:`TICK_S` after the one before it."""
        recent = self._recent
        tick.gap = bool(recent) and tick.uptime_s - recent[-1].uptime_s > GAP_S
        if len(recent) > 1 and recent[-1].uptime_s - recent[-2].uptime_s < TICK_S:
            tick.gap |= recent.pop().gap
        recent.append(tick)
        if len(recent) > TICKS:
            self._thin(recent.popleft())

    def since(self, at: float) -> list[Tick]:
        """Return the ticks after ``at`` (Unix time), oldest first."""
        return [tick for tick in (*self._early, *self._recent) if tick.at > at]

    def over(self, seconds: float) -> tuple[Tick, Tick] | None:
        """Return the first and the last of the ticks that cover the last ``seconds``, or a little more; None without two."""
        if len(self._recent) < 2 or self._recent[-1].gap:
            return None
        last = first = self._recent[-1]
        for first in reversed(self._recent):
            if first.gap or last.uptime_s - first.uptime_s >= seconds:
                break
        return first, last

    def _thin(self, tick: Tick) -> None:
        self._skipped += 1
        if self._skipped < self._stride:
            self._recent[0].gap |= tick.gap
            return
        self._skipped = 0
        self._early.append(tick)
        if len(self._early) > TICKS:
            for dropped, kept in zip(self._early[1::2], self._early[2::2], strict=False):
                kept.gap |= dropped.gap
            del self._early[1::2]
            self._stride *= 2
