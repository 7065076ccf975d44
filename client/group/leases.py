"""Leases of pauses: a thread that renews a group's, and the count of one that engines may have forgotten.

Invariants: renewals have one thread and connections of their own, made when first due, as the loop may be a
busy trainer's. A :class:`PauseLease` is not over before the engines' own, which the same commands renew.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import zmq

from ...io_struct import RenewPauseLeaseReqInput, RenewPauseLeaseReqOutput
from ...io_struct.control import LeaseAction
from ..connection.async_channel import LoopSocket
from ..exceptions import EngineError
from .members import EngineAddress, MemberClient

ResultT = TypeVar("ResultT")
RENEW_S = 2.0
"""Seconds between renewals; a third of the lease if that is less."""


class LeaseRenewal:
    def __init__(self, owner: str, lease_s: float | None) -> None:
        """``lease_s``: seconds of the leases; None if there are none and nothing is renewed."""
        self._owner = owner
        self._interval_s = None if lease_s is None else min(RENEW_S, lease_s / 3)
        self.held: tuple[EngineAddress, ...] = ()
        """Engines whose leases are renewed."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, addresses: Iterable[EngineAddress]) -> None:
        """Renew the leases of these engines from now on, and of no others."""
        self.held = tuple(addresses)
        if self.held and self._thread is None and self._interval_s is not None:
            run = partial(asyncio.run, self._renew(self._interval_s))
            self._thread = threading.Thread(target=run, name="caesura-fleet-leases", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    async def _renew(self, interval_s: float) -> None:
        clients: dict[EngineAddress, MemberClient] = {}
        shared = LoopSocket()
        asked: dict[EngineAddress, asyncio.Future[Any]] = {}
        try:
            while not await asyncio.to_thread(self._ended.wait, interval_s):
                paused = dict.fromkeys(self.held)
                for gone in clients.keys() - paused.keys():
                    asked.pop(gone, None)
                    await clients.pop(gone).close()
                for address in paused:
                    if address in asked and not asked[address].done():
                        continue  # it has not answered yet
                    # The group itself notices who is gone; without descriptors the next round tries again.
                    with suppress(EngineError, OSError, zmq.ZMQError):
                        if address not in clients:
                            clients[address] = MemberClient(
                                address.endpoint, shared, owner=self._owner, **address.keys
                            )
                        asked[address] = clients[address].start(
                            RenewPauseLeaseReqInput(), RenewPauseLeaseReqOutput
                        )
        finally:
            for client in clients.values():
                await client.close()


@dataclass(slots=True)
class PauseLease:
    """The lease of a server's pause, beside the engines': they may all have died, or have half an update."""

    seconds: float
    action: LeaseAction
    _under_way: int = 0
    _renewed: float = field(default_factory=monotonic)

    @property
    def left_s(self) -> float:
        return self.seconds - (0.0 if self._under_way else monotonic() - self._renewed)

    async def renewed_by(self, command: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Await ``command``, one of the owner's; the lease begins again after it."""
        self._under_way += 1
        try:
            return await command
        finally:
            self._under_way -= 1
            self._renewed = monotonic()
