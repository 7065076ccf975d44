"""One engine of a group: its client, its state, and the map from its weights epochs to the group's.

Invariants:
- Only a member in state ``serving`` receives requests: it has the group's weights.
- Every request to a member names the newest weights epoch that the group knows of it. An engine restarted at
  the same endpoint has an older or no valid epoch and refuses: it is never taken for its predecessor.
- An epoch counts an engine's own commits. One that is not in the member's map belongs to weights that
  somebody else has committed: no token of it is passed on (``flow.py``).
"""

import bisect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Unpack

from ..connection.async_channel import Channel, LoopChannel, LoopSocket
from ..connection.async_client import AsyncSchedulerClient
from ..connection.client_options import ChannelOptions, ConnectionOptions

if TYPE_CHECKING:
    from ...io_struct import GetStatusReqOutput
    from .flow import Attempt

State = Literal["joining", "serving", "fenced", "gone"]
"""``joining``: not admitted yet. ``fenced``: it may answer, but not with the group's weights. ``gone``: its
process has ended or cannot be reached."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address and keys of an engine."""

    endpoint: str
    """``ipc://PATH`` or ``tcp://HOST:PORT``."""
    curve_server_key: str | os.PathLike[str] | None = None
    """CURVE public key of the engine, or a file with it. None for an engine without keys."""
    curve_client_key_file: str | os.PathLike[str] | None = None
    """File with the key pair of this client."""
    name: str = ""
    """Name of the member in status, errors and routing. Empty: the endpoint."""

    @property
    def keys(self) -> ConnectionOptions:
        """Key options of a client for this engine."""
        if self.curve_server_key is None and self.curve_client_key_file is None:
            return ConnectionOptions()
        return ConnectionOptions(
            curve_server_key=self.curve_server_key, curve_client_key_file=self.curve_client_key_file
        )

    @staticmethod
    def of(given: "EngineAddress | str") -> "EngineAddress":
        """Return the address itself, or that of an endpoint without keys."""
        return EngineAddress(given) if isinstance(given, str) else given


class MemberClient(AsyncSchedulerClient):
    """A client whose connection is one of many of ``shared``."""

    def __init__(
        self,
        endpoint: str,
        shared: LoopSocket,
        *,
        owner: str | None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        self._socket = shared
        super().__init__(endpoint, owner=owner, **connection)

    def _opened(self, connection: ConnectionOptions) -> Channel:
        return LoopChannel(self.endpoint, ChannelOptions.of(connection), self._socket)


class Member:
    def __init__(
        self,
        address: EngineAddress,
        shared: LoopSocket,
        *,
        owner: str | None,
        keepalive_timeout: float | None,
        lease_s: float | None = None,
    ) -> None:
        self.address = address
        self.lease_s = lease_s
        self.name = address.name or address.endpoint
        options = address.keys
        options["keepalive_timeout"] = keepalive_timeout
        self.client = MemberClient(address.endpoint, shared, owner=owner, **options)
        self.state: State = "joining"
        self.reason = "it has not been admitted yet"
        self.load = 0
        """Number of unfinished samples that this group has sent it; :meth:`Router.charge` changes it."""
        self.copies = 0
        """Number of members that it sends its weights to."""
        self.attempts: dict[Attempt, None] = {}
        """Attempts with such samples, the oldest first."""
        self.status: GetStatusReqOutput | None = None
        self.epoch = 0
        self.adapters: dict[str, int] = {}
        """Epochs of the group's adapters that it has, by name; 0 if one could not be loaded."""
        self._epochs: list[list[int]] = []
        """Runs of commits: the first own epoch and the group's, and how many follow one by one in both."""

    @property
    def serves(self) -> bool:
        return self.state == "serving"

    def admit(self, epoch: int, group_epoch: int) -> None:
        """Let it serve; its own ``epoch`` has the weights of the group's ``group_epoch``."""
        self.committed(epoch, group_epoch)
        self.state, self.reason = "serving", ""

    def committed(self, epoch: int, group_epoch: int) -> None:
        """Record that its own ``epoch`` has the weights of the group's ``group_epoch``."""
        self.epoch = epoch
        while self._epochs and self._epochs[-1][0] >= epoch:
            self._epochs.pop()
        if self._epochs:
            last = self._epochs[-1]
            last[2] = min(last[2], epoch - last[0])
            if (epoch, group_epoch) == (last[0] + last[2], last[1] + last[2]):
                last[2] += 1
                return
        self._epochs.append([epoch, group_epoch, 1])

    def leave(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason

    def restarted(self) -> None:
        self._epochs, self.epoch, self.adapters = [], 0, {}

    def group_epoch(self, epoch: int) -> int:
        """Return the group's epoch for the member's ``epoch``, or that of the nearest older known one."""
        run = self._run(epoch)
        if run is None:
            return self._epochs[0][1] if self._epochs else 0
        own, group, count = run
        return group + min(epoch - own, count - 1)

    def has_given(self, epoch: int) -> bool:
        run = self._run(epoch)
        return run is not None and epoch < run[0] + run[2]

    def own_epoch(self, group_epoch: int | None) -> int | None:
        """Return the lowest own epoch with weights as new as ``group_epoch``, or None if it has none yet."""
        if not self._epochs:
            return None
        _, newest, count = self._epochs[-1]
        return self.epoch if group_epoch is None or group_epoch < newest + count else None

    def _run(self, epoch: int) -> list[int] | None:
        at = bisect.bisect_right(self._epochs, epoch, key=lambda run: run[0])
        return self._epochs[at - 1] if at else None


def foreign_commit(version: str, epoch: int) -> str:
    """Return the reason why a member with these weights does not serve."""
    return f"weights {version!r} (its epoch {epoch}) were committed on its own socket, not by this fleet"
