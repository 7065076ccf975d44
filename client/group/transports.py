"""How the members of a fleet are given weights within the session of a two-phase update, by transport.

Invariant: a load commits nothing, and has for each member its reply or its error. Over ``distributed`` an error of one is an error
of all, since a broadcast that one rank does not take reaches nobody.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..connection.control_client import ControlClient
from ..connection.options import folder_of
from ..exceptions import EngineError, GroupError, InvalidRequest
from .members import EngineAddress, Member
from .session import Load, everywhere

if TYPE_CHECKING:
    from ..trainer import NamedTensors, WeightUpdateGroup

Transport = Literal["disk", "tensor", "ipc", "distributed"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Weights:
    """New weights, and the way that they take."""

    transport: Transport
    model_path: str | None = None
    tensors: Any = None
    """Named tensors, which can be read more than once."""

    @staticmethod
    def of(
        named_tensors: "NamedTensors | None",
        model_path: str | os.PathLike[str] | None,
        transport: Transport | None,
    ) -> "Weights":
        """From the arguments of an update.

        Raises:
            InvalidRequest: neither tensors nor a path, both, or a transport that does not fit.
        """
        if (named_tensors is None) == (model_path is None):
            raise InvalidRequest("give either named_tensors or model_path", field="named_tensors")
        transport = transport or ("disk" if named_tensors is None else "tensor")
        if (transport == "disk") != (named_tensors is None):
            raise InvalidRequest(
                f"transport = {transport!r} does not fit: disk takes model_path, the others take named_tensors",
                field="transport",
            )
        if named_tensors is None:
            return Weights(transport, model_path=folder_of(model_path))
        from ..trainer import SharedTensors

        keeps = isinstance(named_tensors, SharedTensors | Mapping)
        return Weights(transport, tensors=named_tensors if keeps else list(named_tensors))


class Loader:
    """Loads weights; keeps what the next update can use again."""

    def __init__(self, owner: str) -> None:
        self._broadcast = Broadcast(owner)

    def load(self, weights: Weights, *, flush_cache: bool) -> Load:
        """What gives members these weights. ``flush_cache`` cannot be honoured while requests are frozen in place."""

        async def load(members: Sequence[Member], session: str, timeout: float) -> Mapping[Member, Any]:
            if weights.transport == "distributed":
                return await self._broadcast.load(members, session, timeout, weights.tensors, flush_cache)

            async def one(member: Member) -> Any:
                client, tensors = member.client, weights.tensors
                if weights.transport == "disk":
                    return await client.update_weights_from_disk(
                        weights.model_path or "", session_id=session, flush_cache=flush_cache
                    )
                if weights.transport == "tensor":
                    return await client.update_weights_from_tensor(
                        tensors, session_id=session, flush_cache=flush_cache
                    )
                return await client.update_weights_from_ipc(
                    tensors, session_id=session, flush_cache=flush_cache
                )

            answers = await everywhere(members, one, timeout)
            return {**answers.replies, **answers.failed, **answers.out}

        return load

    async def close(self) -> None:
        """Leave the process group, if there is one."""
        await asyncio.to_thread(self._broadcast.close)


def loader(owner: str) -> Loader:
    """The loader of a fleet whose commands have the token ``owner``."""
    return Loader(owner)


class Broadcast:
    """One process group of this process and the members, made again when they are others, or when it has failed."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._group: WeightUpdateGroup | None = None
        self._clients: dict[str, ControlClient] = {}
        self._incarnations: list[str | None] = []

    async def load(
        self, members: Sequence[Member], session: str, timeout: float, tensors: Any, flush_cache: bool
    ) -> Mapping[Member, Any]:
        """Broadcast ``tensors`` to ``members``."""
        incarnations = [member.client.incarnation for member in members]
        if incarnations != self._incarnations:  # a group of an engine's predecessor reaches nobody
            await asyncio.to_thread(self.close)
            self._incarnations = incarnations
        try:
            replies = await asyncio.to_thread(
                self._load, [member.address for member in members], session, timeout, tensors, flush_cache
            )
        except EngineError as error:
            await asyncio.to_thread(self.close)
            return {member: GroupError(f"the broadcast failed: {error.message}") for member in members}
        return dict(zip(members, replies, strict=True))

    def close(self) -> None:
        """Leave the group, and close its clients. Idempotent."""
        group, self._group = self._group, None
        clients, self._clients = self._clients, {}
        if group is not None:
            with suppress(EngineError):
                group.close()
        for client in clients.values():
            client.close()

    def _load(
        self, addresses: list[EngineAddress], session: str, timeout: float, tensors: Any, flush_cache: bool
    ) -> list[Any]:
        group = self._joined(addresses, timeout)
        return list(group.update(tensors, session_id=session, timeout=timeout, flush_cache=flush_cache))

    def _joined(self, addresses: list[EngineAddress], timeout: float) -> "WeightUpdateGroup":
        from ..trainer import WeightUpdateGroup

        endpoints = [address.endpoint for address in addresses]
        if self._group is not None and list(self._clients) == endpoints:
            return self._group
        self.close()
        for address in addresses:
            client = ControlClient(address.endpoint, owner=self._owner, **address.keys)
            self._clients[address.endpoint] = client
        self._group = WeightUpdateGroup.create(
            list(self._clients.values()),
            master_address=own_address(endpoints),
            group_name=f"fleet-{self._owner}"[:128],
            timeout_s=min(60.0, max(1.0, timeout)),
        )
        return self._group


def own_address(endpoints: Sequence[str]) -> str:
    """This host's address as the engines at ``endpoints`` reach it."""
    for endpoint in endpoints:
        scheme, _, place = endpoint.partition("://")
        host = place.rpartition(":")[0].strip("[]")
        if scheme != "tcp" or host in (LOOPBACK, "localhost", "::1"):
            continue
        family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(
            family, socket.SOCK_DGRAM
        ) as probe:  # connecting sends nothing: it chooses a route
            probe.connect((host, 1))
            return str(probe.getsockname()[0])
    return LOOPBACK
