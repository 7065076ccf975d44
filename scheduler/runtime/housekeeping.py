"""Work of the loop by the clock: keepalives, expiries, load, warnings, the emptying of an idle engine.

A timer is set only while something can become due, so an engine that has nothing to do is not woken.
"""

import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import localtime, monotonic, strftime, time
from typing import TYPE_CHECKING

from ..control.pause import expire_lease
from .guard import Guard

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

HOLD_OFF_S = 1.0
KEEPALIVE_S = 2.0
"""Seconds between keepalives to clients that wait or have a session open, to find those gone."""
LONG_PAUSE_S = 60.0
"""Seconds after which a pause without a lease is warned of, once: only a command ends it."""


@dataclass(slots=True)
class Timer:
    what: str
    due: Callable[[], float | None]
    act: Callable[[], object]
    not_before: float = 0.0


class Timers:
    def __init__(self, guard: Guard, timers: Sequence[Timer]) -> None:
        self._guard = guard
        self._timers = timers

    def next_due(self) -> float | None:
        moments = [max(due, timer.not_before) for timer in self._timers if (due := timer.due()) is not None]
        return min(moments, default=None)

    def fire(self, now: float) -> None:
        for timer in self._timers:
            due = timer.due()
            if due is None or due > now or timer.not_before > now:
                continue
            if not self._guard.run(timer.what, timer.act):
                timer.not_before = monotonic() + HOLD_OFF_S


class Housekeeping:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._idle_since: float | None = None
        self._warned_of: float | None = None
        self.next_keepalive = 0.0
        self.timers = Timers(
            engine.guard,
            (
                Timer("sending keepalives", self._keepalive_due, self._keep_alive),
                Timer("expiring the weight session", lambda: engine.sessions.expires, engine.updates.expire),
                Timer("expiring the pause lease", self._lease_due, self._expire_lease),
                Timer("warning of a long pause", self._long_pause_due, self._warn_of_long_pause),
                Timer("reading the load", engine.throughput.due, engine.throughput.act),
                Timer("emptying the device cache of the idle engine", self._idle_due, self._empty_idle),
            ),
        )

    def busy(self) -> None:
        self._idle_since = None

    def idle(self, now: float) -> None:
        if self._engine.state.generation != "running":
            self._idle_since = None  # continue decides whether to empty the device cache of a paused engine
        elif self._idle_since is None:
            self._idle_since = now

    def _keepalive_due(self) -> float | None:
        engine = self._engine
        waiting = engine.live or engine.dispatcher.has_unanswered or engine.sessions.client is not None
        return self.next_keepalive if waiting or engine.updates.keeps_memory else None

    def _keep_alive(self) -> None:
        engine = self._engine
        self.next_keepalive = monotonic() + KEEPALIVE_S
        clients = engine.answers.awaited_by()
        if engine.sessions.client is not None:
            clients.add(engine.sessions.client)
        engine.router.keepalive(clients, engine.state.step)
        engine.updates.collect()

    def _lease_due(self) -> float | None:
        engine = self._engine
        lease_left = engine.state.lease_left_s
        return None if lease_left is None or engine.commands.defers_lease else monotonic() + lease_left

    def _expire_lease(self) -> None:
        engine = self._engine
        lease, owner = engine.state.ownership.lease, engine.state.ownership.sender
        if lease is not None and owner is not None and lease.action == "continue":
            engine.updates.expire_with_lease(owner)
        expire_lease(engine)

    def _long_pause_due(self) -> float | None:
        since = self._engine.state.unleased_since
        return None if since is None or since == self._warned_of else since + LONG_PAUSE_S

    def _warn_of_long_pause(self) -> None:
        engine = self._engine
        state, age = engine.state, engine.state.pause_age_s or 0.0
        self._warned_of = state.unleased_since
        owner = state.ownership.owner
        token = "" if owner is None else f" --owner {shlex.quote(owner)}"
        logger.warning(
            "paused (%s) since %s by %s, for %.0f s, and no lease ends the pause%s; to continue: "
            "caesura continue --endpoint %s%s",
            state.pause_mode,
            strftime("%Y-%m-%d %H:%M:%S", localtime(time() - age)),
            state.paused_by,
            age,
            "" if state.serviceable else f", with weights {state.weights}: a complete update must come first",
            shlex.quote(engine.router.endpoint),
            token,
        )

    def _idle_due(self) -> float | None:
        since = self._idle_since
        return None if since is None or since == inf else since + self._engine.config.idle_empty_s

    def _empty_idle(self) -> None:
        engine = self._engine
        self._idle_since = inf  # once per idle period
        report = engine.device_cache.empty("idle")
        engine.history.note("idle", returned=report.freed)
