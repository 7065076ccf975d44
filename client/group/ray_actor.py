"""The actor of one replica: an engine process on the node where Ray has placed it.

Invariants:
- Engine and actor end together: an engine that ends takes the actor's process with it, so that Ray restarts
  both, and an actor that is killed takes the engine (its lifeline, ``launch/launcher.py``).
- Beyond its own host an engine listens with CURVE keys only. Its secret key is made here and stays here.
"""

import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from ...process import private_directory
from ...process.curve import PUBLIC_SUFFIX, SECRET_SUFFIX, key_file
from ..exceptions import EndpointInUse
from ..launch.launcher import LaunchedScheduler, launch_scheduler

if TYPE_CHECKING:
    from pathlib import Path

PORT_TRIES = 5


@dataclass(frozen=True, slots=True)
class Replica:
    endpoint: str
    server_key: str | None
    """CURVE public key of the engine, or None if it listens on its own host only."""
    pid: int
    start: str
    """Random name of this start of the actor."""
    node_ip: str


class EngineActor:
    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        *,
        client_key: str,
        driver_ip: str,
        startup_timeout: float,
    ) -> None:
        """
        Args:
        options: keywords of :func:`launch_scheduler`.
        client_key: CURVE public key of the fleet's clients.
        driver_ip: address of the fleet's host, whose engines listen on socket files. Empty: none does.
        """
        self._start = secrets.token_hex(8)
        self._client_key = client_key
        self._folder: Path | None = None
        node_ip = _node_ip()
        try:
            if node_ip == driver_ip:
                server_key = None
                self._engine = launch_scheduler(model, startup_timeout=startup_timeout, **options)
            else:
                server_key, self._engine = self._beyond(model, options, client_key, node_ip, startup_timeout)
        except BaseException:
            self._remove_keys()
            raise
        self._replica = Replica(self._engine.endpoint, server_key, self._engine.pid, self._start, node_ip)
        self._ends = False
        threading.Thread(target=self._watch, name="caesura-replica", daemon=True).start()

    def replica(self, client_key: str) -> Replica:
        """Return the engine's address, and have it accept ``client_key`` instead of a former fleet's."""
        if self._replica.server_key is not None and client_key != self._client_key:
            self._authorize(client_key)
        self._client_key = client_key
        return self._replica

    def place(self) -> Any:
        import ray

        return ray.util.get_current_placement_group()

    def close(self) -> None:
        """End the engine in order; the owner kills the actor."""
        self._ends = True
        self._engine.close()
        self._remove_keys()

    def _beyond(
        self, model: str, options: Mapping[str, Any], client_key: str, node_ip: str, startup_timeout: float
    ) -> tuple[str, LaunchedScheduler]:
        """Start an engine at the node's address for the owner of ``client_key``; return its key, too."""
        public, secret = zmq.curve_keypair()
        own, own_secret = zmq.curve_keypair()  # the actor watches the engine as a client
        files = {
            f"server{SECRET_SUFFIX}": key_file(public, secret),
            f"actor{SECRET_SUFFIX}": key_file(own, own_secret),
            f"actor{PUBLIC_SUFFIX}": key_file(own),
            f"fleet{PUBLIC_SUFFIX}": key_file(client_key.encode()),
        }
        self._folder = folder = private_directory.make_with(files)
        for attempt in range(PORT_TRIES):
            try:
                engine = launch_scheduler(
                    model,
                    endpoint=f"tcp://{node_ip}:{_free_port(node_ip)}",
                    curve_secret_key_file=folder / f"server{SECRET_SUFFIX}",
                    curve_authorized_clients=folder,
                    curve_server_key=public.decode(),
                    curve_client_key_file=folder / f"actor{SECRET_SUFFIX}",
                    startup_timeout=startup_timeout,
                    **options,
                )
            except EndpointInUse:  # another process has taken the port meanwhile
                if attempt + 1 == PORT_TRIES:
                    raise
            else:
                return public.decode(), engine
        raise AssertionError("unreachable")

    def _authorize(self, client_key: str) -> None:
        """Replace the key file of the fleet's clients at once: the engine may read it at any time."""
        assert self._folder is not None
        part = self._folder / f"part{SECRET_SUFFIX}"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key_file(client_key.encode()))
        part.replace(self._folder / f"fleet{PUBLIC_SUFFIX}")

    def _watch(self) -> None:
        while self._engine.returncode is None:
            self._engine.wait(1.0)
        if not self._ends:
            self._remove_keys()
            os._exit(1)  # Ray starts another actor, which starts another engine

    def _remove_keys(self) -> None:
        if self._folder is not None:
            private_directory.remove(self._folder)


def _node_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
