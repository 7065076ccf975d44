"""``RolloutFleet``: a fleet whose engines Ray places, starts and restarts. Needs ``caesura[ray]``.

Invariants:
- Ray carries addresses, keys and lifetimes; tokens, commands and weights go to the engines directly.
- Actors and placement groups end with :meth:`RolloutFleet.close`; without a name, also with the Ray job. With
  one they are detached, and a fleet of that name in another process can adopt them.
- Engine and actor end together: either takes the other with it, and Ray restarts both. Actors of an engine's
  other nodes are that actor's own, and end with it.
- Beyond its own host an engine listens with CURVE keys only. Its secret key is made and stays with its actor.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import ray
import zmq
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...process import private_directory
from ...process.curve import NODES_VARIABLE, PUBLIC_SUFFIX, SECRET_SUFFIX, key_file
from ...process.engine_options import EngineOptions
from ..exceptions import EngineDied, EngineError, InvalidRequest, TimedOut
from ..launch.launcher import Child, command_line, engine_command, launch_scheduler
from .fleet import Fleet, FleetOptions
from .members import EngineAddress, Member

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

START_S = 600.0
"""Seconds until an engine must be ready, loading included."""
RESTART_LOOK_S = 0.2
"""Seconds between questions to an actor that Ray restarts."""
NAMESPACE = "caesura"
"""Ray's namespace of the actors of named fleets: every job of the cluster finds them there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Resources of the bundles of a placement group, and how Ray spreads them over nodes."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    """Number of devices of a bundle; Ray sets ``CUDA_VISIBLE_DEVICES`` accordingly."""
    bundles: int = 1
    """Number of bundles of one replica, which share its ranks (``tp``) equally."""
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    runtime_env: Mapping[str, Any] | None = None

    @property
    def bundle(self) -> dict[str, float]:
        given = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in given.items() if amount}

    def options(self, group: PlacementGroup, index: int) -> dict[str, Any]:
        """Return the options of an actor in a bundle."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        }
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        return options


@dataclass(frozen=True, slots=True)
class Replica:
    """Address of an actor's engine."""

    endpoint: str
    server_key: str | None
    """CURVE public key of the engine, or None if it listens on its own host only."""
    pid: int
    start: str
    """Random name of this start of the actor."""
    node_ip: str


class NodeActor:
    """Runs the ranks of one further bundle of an engine."""

    def __init__(self, arguments: list[str], secret: str) -> None:
        self._child = Child(engine_command(*arguments), environment={NODES_VARIABLE: secret})


class EngineActor:
    """Starts an engine on the node where Ray has placed it, and watches it."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        *,
        placement: Placement,
        bundle: int,
        client_key: str,
        driver_ip: str,
        startup_timeout: float,
    ) -> None:
        self._client_key = client_key
        self._folder: Path | None = None
        node_ip, server_key = ray.util.get_node_ip_address(), None
        listening: dict[str, Any] = {}
        if node_ip != driver_ip:
            public, secret = zmq.curve_keypair()
            own, own_secret = zmq.curve_keypair()  # the actor watches the engine as a client
            server_key = public.decode()
            self._folder = folder = private_directory.make_with(
                {
                    f"server{SECRET_SUFFIX}": key_file(public, secret),
                    f"actor{SECRET_SUFFIX}": key_file(own, own_secret),
                    f"actor{PUBLIC_SUFFIX}": key_file(own),
                    f"fleet{PUBLIC_SUFFIX}": key_file(client_key.encode()),
                }
            )
            listening = {
                "endpoint": f"tcp://{node_ip}:0",
                "curve_secret_key_file": folder / f"server{SECRET_SUFFIX}",
                "curve_authorized_clients": folder,
                "curve_server_key": server_key,
                "curve_client_key_file": folder / f"actor{SECRET_SUFFIX}",
            }
        try:
            nodes = self._start_nodes(model, placement, bundle, options)
            launching = {**listening, **options, **nodes}
            self._engine = launch_scheduler(model, startup_timeout=startup_timeout, **launching)
        except BaseException:
            self._remove_keys()
            raise
        engine = self._engine
        start = secrets.token_hex(8)
        self._replica = Replica(engine.endpoint, server_key, engine.pid, start, node_ip)
        self._ends = False
        threading.Thread(target=self._watch, name="caesura-replica", daemon=True).start()

    def _start_nodes(
        self, model: str, placement: Placement, bundle: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Have Ray start the ranks of the other bundles, with a new secret; return node 0's options."""
        if placement.bundles == 1:
            return {}
        with socket.create_server((ray.util.get_node_ip_address(), 0)) as free:
            host, port = free.getsockname()[:2]
        place = {"nnodes": placement.bundles, "master_addr": f"{host}:{port}"}
        os.environ[NODES_VARIABLE] = secret = secrets.token_hex(32)
        group = ray.util.get_current_placement_group()
        engine = {name: value for name, value in options.items() if name in EngineOptions.__annotations__}
        self._nodes = [
            ray.remote(NodeActor)
            .options(**placement.options(group, bundle + index))
            .remote(command_line(model, {**engine, **place, "node_rank": index}), secret)
            for index in range(1, placement.bundles)
        ]
        return {**place, "node_rank": 0}

    def replica(self, client_key: str) -> Replica:
        """Return the engine's address, and have it accept ``client_key`` instead of a former fleet's."""
        if self._folder is not None and client_key != self._client_key:
            # replaced at once: the engine may read it at any time
            part = self._folder / f"part{SECRET_SUFFIX}"
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key_file(client_key.encode()))
            part.replace(self._folder / f"fleet{PUBLIC_SUFFIX}")
        self._client_key = client_key
        return self._replica

    def place(self) -> Any:
        """Return Ray's handle of the actor's placement group."""
        return ray.util.get_current_placement_group()

    def close(self) -> None:
        """End the engine in order; the owner kills the actor."""
        self._ends = True
        self._engine.close()
        self._remove_keys()

    def _watch(self) -> None:
        while self._engine.returncode is None:
            self._engine.wait(1.0)
        if not self._ends:
            self._remove_keys()
            os._exit(1)  # Ray starts another actor, which starts another engine

    def _remove_keys(self) -> None:
        if self._folder is not None:
            private_directory.remove(self._folder)


@dataclass(slots=True)
class _Slot:
    name: str
    actor: Any
    group: PlacementGroup
    replica: Replica | None = None
    coming_back: asyncio.Task[None] | None = None


class RolloutFleet(Fleet):
    """A fleet of engines on a Ray cluster; it calls ``ray.init()`` unless the caller has."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        replicas: int,
        *,
        placement: Placement | Mapping[str, Any] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        start_timeout: float = START_S,
        listen: Literal["auto", "tcp"] = "auto",
        name: str | None = None,
        **options: Unpack[FleetOptions],
    ) -> None:
        """Take ``replicas`` engines of ``model``, a Hugging Face folder that every node can read.

        Args:
            placement: a :class:`Placement`, or a dict of its fields.
            engine_options: keywords of :func:`launch_scheduler` for every engine.
            start_timeout: maximum seconds until all replicas are placed and ready.
            listen: ``auto``: engines on this node listen on socket files, others on ``tcp://`` with keys.
                ``tcp``: all do.
            name: the fleet's on the cluster; its engines outlive this process and listen on ``tcp://``.
            options: those of :class:`Fleet`; ``adopt`` takes over the engines of that name and starts missing
                ones.
        """
        if replicas < 1:
            raise InvalidRequest(f"replicas = {replicas} must be at least 1", field="replicas")
        super().__init__(**options)
        if self._adopt and name is None:
            raise InvalidRequest("adopt=True finds engines by the fleet's name: give it", field="name")
        self._name = name
        self._model = os.path.abspath(model)
        self._wanted = replicas
        self._placement = placement if isinstance(placement, Placement) else Placement(**(placement or {}))
        self._engine_options = dict(engine_options or {})
        self._start_timeout = start_timeout
        self._listen = listen
        self._slots: dict[str, _Slot] = {}
        self._count = 0
        self._folder: Path | None = None
        self._client_key = ""
        self.dispatcher.on_lost.append(self._on_lost)

    @property
    def replicas(self) -> int:
        """Number of replicas, serving or not."""
        return len(self._slots)

    async def open(self) -> Self:
        """Place and start all replicas, or find them, and connect to them.

        Raises TimedOut without room in the cluster, EngineError if an engine does not start, InvalidRequest
        if the name is taken, and WeightsInvalid as :meth:`Fleet.open`.
        """
        if not ray.is_initialized():
            ray.init()
        left_behind = self._left_behind()
        if left_behind and not self._adopt:
            raise InvalidRequest(
                f"the cluster has a fleet {self._name!r}: if its process has died, open it with adopt=True",
                field="name",
            )
        public, secret = zmq.curve_keypair()
        self._client_key = public.decode()
        self._folder = private_directory.make_with({f"client{SECRET_SUFFIX}": key_file(public, secret)})
        try:
            if left_behind:
                slots = await self._found(left_behind)
            else:
                self._adopt = False
                slots = self._place(self._wanted)
            self._addresses = await self._located(slots)
            await super().open()
        except BaseException:
            if left_behind:
                self._slots.clear()  # the engines are as they were found: somebody may have weights for them
            await self.close()
            raise
        if left_behind:
            await self.scale(self._wanted)
        return self

    async def close(self) -> None:
        """End all engines and give their resources back. Idempotent."""
        await super().close()
        for name in list(self._slots):
            await self._end(name)
        folder, self._folder = self._folder, None
        if folder is not None:
            private_directory.remove(folder)

    async def scale(self, replicas: int) -> None:
        """Change the number of replicas; TimedOut if the cluster has no room, EngineError if one cannot
        start.

        New ones serve only with the fleet's weights; requests of those that leave continue on others.
        """
        if replicas < 1:
            raise InvalidRequest(f"replicas = {replicas} must be at least 1", field="replicas")
        more = replicas - len(self._slots)
        if more > 0:
            slots = self._place(more)
            try:
                for address in await self._located(slots):
                    await self.add(address)
            except BaseException:
                for slot in slots:
                    if slot.name not in self.dispatcher.members:
                        await self._end(slot.name)
                raise
        leaving = sorted(self._slots, key=lambda name: (self._serves(name), -self._age(name)))
        for name in leaving[: max(0, -more)]:
            if name in self.dispatcher.members:
                await self.remove(name)
            await self._end(name)
        self._wanted = replicas

    def replica(self, name: str) -> Replica | None:
        """Return the address of the engine of that name, or None while it is not known."""
        slot = self._slots.get(name)
        return None if slot is None else slot.replica

    def _serves(self, name: str) -> bool:
        member = self.dispatcher.members.get(name)
        return member is not None and member.serves

    def _age(self, name: str) -> int:
        return int(name.rpartition("-")[2])

    def _address(self, slot: _Slot, replica: Replica) -> EngineAddress:
        slot.replica = replica
        keys: dict[str, Any] = {}
        if replica.server_key is not None and self._folder is not None:
            keys = {
                "curve_server_key": replica.server_key,
                "curve_client_key_file": self._folder / f"client{SECRET_SUFFIX}",
            }
        return EngineAddress(replica.endpoint, name=slot.name, **keys)

    def _place(self, count: int) -> list[_Slot]:
        placement = self._placement
        files = self._listen == "auto" and self._name is None  # who adopts them may be on another node
        lifetime = None if self._name is None else "detached"
        bundles = [placement.bundle] * (count * placement.bundles)
        group = placement_group(bundles, strategy=placement.strategy, lifetime=lifetime)
        slots = []
        for index in range(count):
            name = f"replica-{self._count}"
            self._count += 1
            bundle = index * placement.bundles
            options = placement.options(group, bundle) | {"max_restarts": -1}
            if self._name is not None:
                options |= {
                    "name": f"{self._name}/{name}", "namespace": NAMESPACE, "lifetime": "detached",
                }  # fmt: skip
            actor = (
                ray.remote(EngineActor)
                .options(**options)
                .remote(
                    self._model,
                    self._engine_options,
                    placement=placement,
                    bundle=bundle,
                    client_key=self._client_key,
                    driver_ip=ray.util.get_node_ip_address() if files else "",
                    startup_timeout=self._start_timeout,
                )
            )
            slots.append(_Slot(name, actor, group))
            self._slots[name] = slots[-1]
        return slots

    def _left_behind(self) -> list[str]:
        if self._name is None:
            return []
        of_fleet = f"{self._name}/"
        names = [
            each["name"].removeprefix(of_fleet)
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == NAMESPACE and each["name"].startswith(of_fleet)
        ]
        return sorted(names, key=self._age)

    async def _found(self, names: list[str]) -> list[_Slot]:
        actors = [ray.get_actor(f"{self._name}/{name}", namespace=NAMESPACE) for name in names]
        asked = [actor.place.remote() for actor in actors]
        places = await self._answered(asked)
        self._count = self._age(names[-1]) + 1
        groups = {place.id: place for place in places}
        for name, actor, place in zip(names, actors, places, strict=True):
            self._slots[name] = _Slot(name, actor, groups[place.id])
        return list(self._slots.values())

    async def _located(self, slots: list[_Slot]) -> list[EngineAddress]:
        found = await self._answered([slot.actor.replica.remote(self._client_key) for slot in slots])
        return [self._address(slot, replica) for slot, replica in zip(slots, found, strict=True)]

    async def _answered(self, asked: list[Any]) -> list[Any]:
        try:
            return await asyncio.wait_for(asyncio.gather(*asked), self._start_timeout)
        except TimeoutError:
            raise TimedOut(
                f"{len(asked)} replicas of {self._placement.bundle} were not ready "
                f"within {self._start_timeout:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            raise EngineDied(f"a replica did not start: {error}") from error

    async def _end(self, name: str) -> None:
        slot = self._slots.pop(name)
        with suppress(Exception):  # the actor may be gone in any way; it is killed next
            await asyncio.wait_for(slot.actor.close.remote(), 10.0)
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(slot.actor)
        if not any(other.group is slot.group for other in self._slots.values()):
            remove_placement_group(slot.group)

    def _on_lost(self, member: Member) -> None:
        slot = self._slots.get(member.name)
        if slot is not None and (slot.coming_back is None or slot.coming_back.done()):
            slot.coming_back = self.begin_work(self._come_back(slot, member))

    async def _come_back(self, slot: _Slot, lost: Member) -> None:
        before = slot.replica
        while self._slots.get(slot.name) is slot:
            await asyncio.sleep(RESTART_LOOK_S)
            try:
                replica = await asyncio.wait_for(
                    slot.actor.replica.remote(self._client_key), self._start_timeout
                )
            except (ray.exceptions.RayError, TimeoutError):
                continue
            if before is not None and replica.start == before.start:
                continue  # the actor has not noticed yet
            try:
                async with self.lock:
                    await self.forget(lost)
                await self.add(self._address(slot, replica))
            except (EngineError, TimeoutError) as error:
                logger.warning("%s is not admitted yet: %s", slot.name, error)
                continue
            logger.warning("%s serves again, restarted by Ray", slot.name)
            return
