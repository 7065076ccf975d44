"""Ways of sending weights to the members of a group within one session.

Invariant: sending commits nothing. Over ``distributed`` an error of one member is an error of all, since a
broadcast that one rank does not take reaches nobody.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal

from ..connection.blocking import ControlClient
from ..connection.options import folder_of
from ..exceptions import EngineError, GroupError, InvalidRequest
from .members import Member
from .session import Answers, everywhere

if TYPE_CHECKING:
    from ..trainer import NamedTensors, WeightUpdateGroup

Transport = Literal["disk", "tensor", "ipc", "distributed"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Weights:
    transport: Transport
    model_path: str = ""
    tensors: Any = None
    """Named tensors, which can be read more than once."""

    @staticmethod
    def of(
        named_tensors: "NamedTensors | None",
        model_path: str | os.PathLike[str] | None,
        transport: Transport | None,
    ) -> "Weights":
        """Return the weights that the arguments of an update name, or raise InvalidRequest."""
        if (named_tensors is None) == (model_path is None):
            raise InvalidRequest("give either named_tensors or model_path", field="named_tensors")
        transport = transport or ("disk" if named_tensors is None else "tensor")
        if (transport == "disk") != (named_tensors is None):
            raise InvalidRequest(
                f"transport = {transport!r} does not fit: disk takes model_path, the others take "
                "named_tensors",
                field="transport",
            )
        if model_path is not None:
            return Weights(transport, folder_of(model_path))
        from ..trainer import SharedTensors

        rereadable = isinstance(named_tensors, SharedTensors | Mapping)
        return Weights(transport, tensors=named_tensors if rereadable else list(named_tensors or ()))


class WeightSender:
    """Sends weights. Keeps one process group, made anew if the members change or it fails."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._group: WeightUpdateGroup | None = None
        self._clients: list[ControlClient] = []
        self._incarnations: list[str | None] = []

    async def send(
        self, weights: Weights, members: Sequence[Member], session: str, timeout: float, *, flush_cache: bool
    ) -> Answers:
        """Load ``weights`` into the session of every member."""
        tensors = weights.tensors
        options: Any = {"session_id": session, "flush_cache": flush_cache}
        if weights.transport != "distributed":
            given = weights.model_path if tensors is None else tensors
            call = methodcaller(f"update_weights_from_{weights.transport}", given, **options)
            return await everywhere(members, lambda each: call(each.client), timeout)
        incarnations = [member.client.incarnation for member in members]
        if incarnations != self._incarnations:  # the group of a former process reaches nobody
            await asyncio.to_thread(self.close)
            self._incarnations = incarnations
        try:
            replies = await asyncio.to_thread(self._broadcast, members, timeout, tensors, options)
        except EngineError as error:
            await asyncio.to_thread(self.close)
            return Answers(
                failed={member: GroupError(f"the broadcast failed: {error.message}") for member in members}
            )
        return Answers(dict(zip(members, replies, strict=True)))

    def close(self) -> None:
        """Leave the process group and close its clients. Blocks. Idempotent."""
        group, self._group = self._group, None
        clients, self._clients = self._clients, []
        if group is not None:
            with suppress(EngineError):
                group.close()
        for client in clients:
            client.close()

    def _broadcast(
        self, members: Sequence[Member], timeout: float, tensors: Any, options: dict[str, Any]
    ) -> list[Any]:
        from ..trainer import WeightUpdateGroup

        endpoints = [member.address.endpoint for member in members]
        if self._group is None or [client.endpoint for client in self._clients] != endpoints:
            self.close()
            for member in members:
                address = member.address
                client = ControlClient(address.endpoint, owner=self._owner, **address.keys)
                self._clients.append(client)
            self._group = WeightUpdateGroup.create(
                self._clients,
                master_address=own_address(endpoints),
                group_name=f"fleet-{self._owner}"[:128],
                timeout_s=min(60.0, max(1.0, timeout)),
            )
        return list(self._group.update(tensors, timeout=timeout, **options))


def own_address(endpoints: Sequence[str]) -> str:
    """Return this host's address as the engines at ``endpoints`` reach it."""
    for endpoint in endpoints:
        scheme, _, place = endpoint.partition("://")
        host = place.rpartition(":")[0].strip("[]")
        if scheme != "tcp" or host in (LOOPBACK, "localhost", "::1"):
            continue
        family = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    return LOOPBACK
