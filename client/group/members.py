"""One engine of a fleet as the fleet knows it: its client, whether it serves, and which of its weights epochs is which of the fleet's.

Invariants:
- Only a member in state ``serving`` is given requests. It serves the fleet's weights; whoever admits it has made sure of that.
- Every request to a member names the newest weights epoch that the fleet knows of it. An engine that was restarted at the same
  endpoint has an older one, or none that is valid, and refuses: it is never taken for its predecessor.
- Epochs count an engine's own commits. The fleet counts its own, and each member has the table from one to the other. An
  epoch that is not in the table is of weights that somebody else has committed: no token of it is passed on (``flow.py``).
"""

import bisect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..connection.async_client import AsyncSchedulerClient
from ..connection.options import ConnectionOptions

if TYPE_CHECKING:
    from ...io_struct import GetStatusReqOutput

State = Literal["joining", "serving", "fenced", "gone"]
"""``joining``: not yet, or not again, admitted. ``fenced``: it answers, or may, but not with the fleet's weights. ``gone``: its
process has ended, or nobody can reach it."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine of a fleet listens, and what is needed to be heard there."""

    endpoint: str
    """``ipc://PATH`` or ``tcp://HOST:PORT``."""
    curve_server_key: str | os.PathLike[str] | None = None
    """CURVE public key of the engine, or a file with it. None: an engine without keys."""
    curve_client_key_file: str | os.PathLike[str] | None = None
    """File with the key pair of this client."""
    name: str = ""
    """Name of the member in status, errors and routing. Empty: the endpoint."""

    @property
    def keys(self) -> ConnectionOptions:
        """The options of a client that is heard there."""
        if self.curve_server_key is None and self.curve_client_key_file is None:
            return ConnectionOptions()
        return ConnectionOptions(
            curve_server_key=self.curve_server_key, curve_client_key_file=self.curve_client_key_file
        )

    @staticmethod
    def of(given: "EngineAddress | str") -> "EngineAddress":
        """An address, from itself or from an endpoint without keys."""
        return EngineAddress(given) if isinstance(given, str) else given


class Member:
    """An engine of a fleet."""

    def __init__(
        self,
        address: EngineAddress,
        *,
        owner: str | None,
        keepalive_timeout: float | None,
        lease_s: float | None = None,
    ) -> None:
        self.address = address
        self.lease_s = lease_s
        """Lease of the fleet's pauses of it, in seconds. None: they have none."""
        self.name = address.name or address.endpoint
        """Name in status, errors and routing."""
        options = address.keys
        options["keepalive_timeout"] = keepalive_timeout
        self.client = AsyncSchedulerClient(address.endpoint, owner=owner, **options)
        """The connection that requests and commands go through."""
        self.state: State = "joining"
        self.reason = "it has not been admitted yet"
        """Why it is not serving; empty if it is."""
        self.load = 0
        """Samples that it works on or has waiting, as far as this fleet sent them."""
        self.status: GetStatusReqOutput | None = None
        """Its last answer to a status request."""
        self.epoch = 0
        """The newest weights epoch of its own that is known."""
        self._epochs: list[tuple[int, int]] = []

    @property
    def serves(self) -> bool:
        """Whether it is given requests."""
        return self.state == "serving"

    def admit(self, epoch: int, fleet_epoch: int) -> None:
        """From now on it serves; its own ``epoch`` has the weights of the fleet's ``fleet_epoch``."""
        self.committed(epoch, fleet_epoch)
        self.state, self.reason = "serving", ""

    def committed(self, epoch: int, fleet_epoch: int) -> None:
        """Its own ``epoch`` has the weights of the fleet's ``fleet_epoch``."""
        self.epoch = epoch
        self._epochs = [pair for pair in self._epochs if pair[0] < epoch] + [(epoch, fleet_epoch)]

    def leave(self, state: State, reason: str) -> None:
        """From now on it is given nothing more."""
        self.state, self.reason = state, reason

    def restarted(self) -> None:
        """Another process has its endpoint: what was known of the earlier one's epochs holds no more."""
        self._epochs, self.epoch = [], 0

    def fleet_epoch(self, epoch: int) -> int:
        """The fleet's epoch of the weights that this member's ``epoch`` names; of the nearest older one if it is not known."""
        at = bisect.bisect_right(self._epochs, epoch, key=lambda pair: pair[0])
        return self._epochs[max(0, at - 1)][1] if self._epochs else 0

    def has_given(self, epoch: int) -> bool:
        """Return True if the fleet has given this member the weights that its ``epoch`` names."""
        return any(own == epoch for own, _ in self._epochs)

    def own_epoch(self, fleet_epoch: int | None) -> int | None:
        """The least epoch of this member with weights that are as new as ``fleet_epoch``; None if it has none yet."""
        wanted = -1 if fleet_epoch is None else fleet_epoch
        newer = [own for own, of_fleet in self._epochs if of_fleet >= wanted]
        return max(newer[0], self.epoch) if newer else None


def foreign_commit(version: str, epoch: int) -> str:
    """Return the reason why a member that has these weights does not serve."""
    return f"weights {version!r} (its epoch {epoch}) were committed on its own socket, not by this fleet"
