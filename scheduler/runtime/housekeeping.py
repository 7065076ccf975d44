"""What the loop does by the clock: keepalives, expiries, readings of the load, warnings, the emptying of an idle engine.

Invariants:
- A timer is set only while something can become due, so an engine that has nothing to do is not woken.
- Actions run in the loop's thread, between two steps, under the guard of :class:`~.timers.Timers`.
"""

import logging
import shlex
from collections.abc import Callable, Sized
from math import inf
from time import localtime, monotonic, strftime, time

from ..control.lifecycle import Lifecycle
from ..control.weight_updates import WeightUpdates
from ..memory.device_cache import DeviceCache
from ..messaging.command_queue import CommandQueue
from ..messaging.dispatcher import Dispatcher
from ..messaging.router_socket import Router
from ..observability.memory_history import MemoryHistory
from ..observability.throughput import Throughput
from .guard import Guard
from .timers import Timer, Timers

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""How often keepalives are sent to clients that wait for an answer or have a session open, which also shows whether they are
gone; and how often owners of mapped shared memory are checked."""
LONG_PAUSE_S = 60.0
"""A pause that has no lease for so long is warned of, once: nothing but a command ends it."""


class Housekeeping:
    """The timers of an engine's loop, with their actions."""

    def __init__(
        self,
        *,
        router: Router,
        dispatcher: Dispatcher,
        commands: CommandQueue,
        awaited_by: Callable[[], set[bytes]],
        lifecycle: Lifecycle,
        live: Sized,
        updates: WeightUpdates,
        history: MemoryHistory,
        device_cache: DeviceCache,
        throughput: Throughput,
        guard: Guard,
        idle_empty_s: float,
    ) -> None:
        """``awaited_by`` returns the clients that wait for an answer."""
        self._router = router
        self._dispatcher = dispatcher
        self._commands = commands
        self._awaited_by = awaited_by
        self._lifecycle = lifecycle
        self._live = live
        self._updates = updates
        self._history = history
        self._device_cache = device_cache
        self._idle_empty_s = idle_empty_s
        self._idle_since: float | None = None
        self._warned_of: float | None = None
        """:attr:`Lifecycle.unleased_since` of the pause that was warned of."""
        self.next_keepalive = 0.0
        """When the next keepalives are due if anybody waits, on the monotonic clock."""
        self.timers = Timers(
            guard,
            (
                Timer("sending keepalives", self._keepalive_due, self._keep_alive),
                Timer("expiring the weight session", lambda: updates.sessions.expires, updates.expire),
                Timer("expiring the pause lease", self._lease_due, self._expire_lease),
                Timer("warning of a long pause", self._long_pause_due, self._warn_of_long_pause),
                Timer("reading the load", throughput.due, throughput.act),
                Timer("emptying the device cache of the idle engine", self._idle_due, self._empty_idle),
            ),
        )

    def busy(self) -> None:
        """The loop has work: an idle period, if there was one, is over."""
        self._idle_since = None

    def idle(self, now: float) -> None:
        """The loop has nothing to do at ``now``."""
        if self._lifecycle.generation != "running":
            self._idle_since = None  # continue decides whether to empty the device cache of a paused engine
        elif self._idle_since is None:
            self._idle_since = now

    def step_completed(self) -> None:
        """A step's output was processed: sample the memory it took."""
        self._history.sample()

    def _keepalive_due(self) -> float | None:
        waiting = self._live or self._dispatcher.has_unanswered or self._updates.sessions.client is not None
        return self.next_keepalive if waiting or self._updates.keeps_memory else None

    def _keep_alive(self) -> None:
        self.next_keepalive = monotonic() + KEEPALIVE_S
        clients = self._awaited_by()
        if self._updates.sessions.client is not None:
            clients.add(self._updates.sessions.client)
        self._router.keepalive(clients, self._lifecycle.step)
        self._updates.collect()

    def _lease_due(self) -> float | None:
        lease_left = self._lifecycle.lease_left_s
        return None if lease_left is None or self._commands.defers_lease else monotonic() + lease_left

    def _expire_lease(self) -> None:
        lease, owner = self._lifecycle.ownership.lease, self._lifecycle.ownership.sender
        if lease is not None and owner is not None and lease.action == "continue":
            self._updates.expire_with_lease(owner)
        self._lifecycle.expire_lease()

    def _long_pause_due(self) -> float | None:
        since = self._lifecycle.unleased_since
        return None if since is None or since == self._warned_of else since + LONG_PAUSE_S

    def _warn_of_long_pause(self) -> None:
        lifecycle, age = self._lifecycle, self._lifecycle.pause_age_s or 0.0
        self._warned_of = lifecycle.unleased_since
        owner = lifecycle.pause_owner
        token = "" if owner is None else f" --owner {shlex.quote(owner)}"
        logger.warning(
            "paused (%s) since %s by %s, for %.0f s, and no lease ends the pause%s; to continue: "
            "caesura continue --endpoint %s%s",
            lifecycle.pause_mode,
            strftime("%Y-%m-%d %H:%M:%S", localtime(time() - age)),
            lifecycle.paused_by,
            age,
            ""
            if lifecycle.serviceable
            else f", with weights {lifecycle.weights}: a complete update must come first",
            shlex.quote(self._router.endpoint),
            token,
        )

    def _idle_due(self) -> float | None:
        since = self._idle_since
        return None if since is None or since == inf else since + self._idle_empty_s

    def _empty_idle(self) -> None:
        self._idle_since = inf  # once per idle period
        report = self._device_cache.empty("idle")
        self._history.note("idle", returned=report.freed)
