"""Renews the leases of a fleet's pauses for as long as the fleet's process lives.

Invariants:
- A thread of its own renews, over connections of its own: the fleet's event loop may belong to a trainer that
  computes for minutes.
- Nothing is connected before a pause has lasted as long as the first renewal.
"""

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import zmq

from ...io_struct import RenewPauseLeaseReqInput, RenewPauseLeaseReqOutput
from ..connection.control_client import ControlClient
from ..exceptions import EngineError
from .members import EngineAddress

if TYPE_CHECKING:
    from concurrent.futures import Future

RENEW_S = 2.0
"""Seconds between renewals; a third of the lease if that is less."""


class LeaseRenewal:
    """The renewals of one fleet."""

    def __init__(self, owner: str, lease_s: float | None) -> None:
        """``lease_s``: None: there are no leases, and nothing is renewed."""
        self._owner = owner
        self._interval_s = None if lease_s is None else min(RENEW_S, lease_s / 3)
        self._paused: tuple[EngineAddress, ...] = ()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, addresses: Iterable[EngineAddress]) -> None:
        """Renew the leases of these engines from now on, and of no others."""
        self._paused = tuple(addresses)
        if self._paused and self._thread is None and self._interval_s is not None:
            self._thread = threading.Thread(target=self._run, name="caesura-fleet-leases", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        clients: dict[EngineAddress, ControlClient] = {}
        asked: dict[EngineAddress, Future[Any]] = {}
        try:
            while not self._ended.wait(self._interval_s):
                paused = self._paused
                for gone in clients.keys() - set(paused):
                    clients.pop(gone).close()
                    asked.pop(gone, None)
                for address in paused:
                    if address in asked and not asked[address].done():
                        continue  # it has not answered yet
                    # The fleet notices itself who is gone; without descriptors the next round tries again.
                    with suppress(EngineError, OSError, zmq.ZMQError):
                        if address not in clients:
                            clients[address] = ControlClient(
                                address.endpoint, owner=self._owner, **address.keys
                            )
                        asked[address] = clients[address].start(
                            RenewPauseLeaseReqInput(), RenewPauseLeaseReqOutput
                        )
        finally:
            for client in clients.values():
                client.close()
