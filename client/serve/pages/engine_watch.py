"""The engine's status, looked at every second, and its load over time, for metrics and charts.

Invariants: the engine is asked at most every :data:`FRESH_S`; while it does not answer, its last status is
reported with its age. The last ticks are :data:`TICK_S` apart, earlier ones are thinned by half. A tick has a
gap if nobody knows what the engine did since the one before; if it is dropped, the gap moves to the next.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import TYPE_CHECKING

from ....io_struct import GetStatusReqOutput
from ....io_struct.distribution import SECONDS, Histogram
from ...connection.async_control_client import AsyncControlClient
from ...exceptions import EngineError
from ..context import NOBODY
from .document import Percentiles, ReplicaView, Tick, UpdateTimes

if TYPE_CHECKING:
    from ...group.replicas import ReplicaFleet

FRESH_S = 0.2
ANSWER_S = 2.0
RATE_S = 1.0
TICKS = 1200
"""Maximum number of recent ticks, and of earlier ones."""
TICK_S = 1.0
GAP_S = 10.0
"""Seconds without an answer after which a tick has a gap before it."""
_UPDATE_STAGES = ("pause", "update.receive", "update.copy", "update.derive", "update.flush", "continue")


@dataclass(frozen=True, slots=True)
class Look:
    status: GetStatusReqOutput | None
    """None until the first answer."""
    answered: bool
    age_s: float
    """Age of the status; 0.0 without one."""
    throughput: float


class EngineWatch:
    def __init__(self, fleet: "ReplicaFleet | None" = None) -> None:
        self.fleet = fleet
        self.ticks = Ticks()
        self.last_update: UpdateTimes | None = None
        self._restarts = 0
        self._lock = asyncio.Lock()
        self._status: GetStatusReqOutput | None = None
        self._answered = False
        self._answered_at = self._asked_at = float("-inf")
        self._before_update: GetStatusReqOutput | None = None

    async def sample(self, client: AsyncControlClient) -> None:
        while True:
            await self.look(client)
            await asyncio.sleep(TICK_S)

    async def look(self, client: AsyncControlClient) -> Look:
        """Return the engine's status, at most :data:`FRESH_S` old if it answers. Never raise."""
        async with self._lock:
            if monotonic() - self._asked_at >= FRESH_S:
                await self._ask(client)
        status, age = self._status, monotonic() - self._answered_at
        return Look(status, self._answered, 0.0 if status is None else age, self._throughput())

    @property
    def restarts(self) -> int:
        return self._restarts if self.fleet is None else self.fleet.restarts

    def histograms(self) -> dict[str, Histogram]:
        if self._status is None:
            return {}
        totals = self._status.totals
        counted = {"in the queue": totals.queue_time, "whole sample": totals.latency_s}
        return {name: Histogram(SECONDS, each) for name, each in counted.items() if each.counts}

    def replicas(self) -> list[ReplicaView]:
        members = [] if self.fleet is None else self.fleet.members
        return [
            ReplicaView(name=each.name, state=each.state, reason="" if each.serves else each.reason)
            for each in members
        ]

    async def _ask(self, client: AsyncControlClient) -> None:
        try:
            status = await client.status(owner=NOBODY, timeout=ANSWER_S)
        except EngineError:
            self._answered = False
        else:
            if self._status is not None and status.incarnation != self._status.incarnation:
                self.ticks = Ticks()  # another engine, whose counters start at 0
                self._before_update = None
                self._restarts += 1
            self._status, self._answered, self._answered_at = status, True, monotonic()
            self._keep(status)
        self._asked_at = monotonic()

    def _keep(self, status: GetStatusReqOutput) -> None:
        members = [] if self.fleet is None else self.fleet.members
        self.ticks.add(
            Tick(
                time(),
                status.uptime_s,
                status.generated_tokens,
                status.running_requests + status.prefilling_requests,
                status.waiting_requests,
                status.kv.held,
                status.device_memory.reserved,
                [each.load if each.serves else -1 for each in members],
                drift=status.drift.mean_abs if status.drift is not None and status.drift.tokens else None,
            )
        )
        if status.generation == "running" and status.weights == "valid" and status.session is None:
            self._note_update(status)

    def _note_update(self, status: GetStatusReqOutput) -> None:
        """Note the stages of an update that was committed since the last look at a running engine."""
        before, self._before_update = self._before_update, status
        updates = 0 if before is None else _committed(status) - _committed(before)
        if before is None or updates <= 0:
            return
        earlier = {stage.name: stage.total_s for stage in before.stages}
        now = {stage.name: stage.total_s for stage in status.stages}
        seconds = {name: (now.get(name, 0.0) - earlier.get(name, 0.0)) / updates for name in _UPDATE_STAGES}
        self.last_update = UpdateTimes(at=time(), updates=updates, seconds=seconds)

    def _throughput(self) -> float:
        both = self.ticks.over(RATE_S) if self._answered else None
        if both is None:
            return 0.0
        first, last = both
        seconds = last.uptime_s - first.uptime_s
        return (last.generated_tokens - first.generated_tokens) / seconds if seconds > 0 else 0.0


def _committed(status: GetStatusReqOutput) -> int:
    return sum(update.committed for update in status.totals.updates)


def percentiles(histograms: Mapping[str, Histogram]) -> list[Percentiles]:
    return [
        Percentiles(name=name, count=each.total, p50=p50, p90=p90, p99=p99)
        for name, each in histograms.items()
        for p50, p90, p99 in [[each.quantile(share) or 0.0 for share in (0.5, 0.9, 0.99)]]
        if each.total
    ]


class Ticks:
    """The load of one engine over time, in bounded memory."""

    def __init__(self) -> None:
        self._recent: deque[Tick] = deque()
        self._early: list[Tick] = []
        self._stride = 1
        self._skipped = 0

    def add(self, tick: Tick) -> None:
        """Add a tick; replace the last one if that is less than :data:`TICK_S` after its predecessor."""
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
        """Return the first and the last tick of about the last ``seconds``; None if there are not two."""
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
