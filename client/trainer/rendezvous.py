"""How the ranks of a weight update group meet: a store of torch.distributed in this process, and engines that are told of it.

Invariants:
- The store listens at the address that the engines are given, and only there where that is an address of this host.
- The group is an ordinary one of torch.distributed: ``PrefixStore`` of the group's name, then the backend's own prefixes.
- Nothing here waits without a limit, nor keeps the process alive.
"""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ...io_struct import InitWeightsUpdateGroupReqInput, InitWeightsUpdateGroupReqOutput
from ...io_struct.weights import PRESENT
from ..exceptions import EngineError, GroupError
from .two_phase import started

if TYPE_CHECKING:
    from ..connection.control_client import ControlClient

Backend = Literal["gloo", "nccl"]

PREFIXES = {"gloo": "cpu/", "nccl": "cuda/"}  # as torch: the first device that a backend registers for
GRACE_S = 5.0
"""Between one side's end of something and the other's."""
_LISTEN_BACKLOG = 128


def invite(
    clients: "Sequence[ControlClient]",
    address: str,
    port: int,
    name: str,
    backend: Backend,
    limits: tuple[float, float],
    *,
    first_rank: int = 1,
    ranks: Sequence[int] | None = None,
) -> list[Future[Any]]:
    """Ask every engine to join, in the order of ranks, without waiting for the replies.

    Args:
        limits: seconds for joining, and for each broadcast.
        first_rank: 0 for a group of engines alone, 1 where this process is rank 0.
        ranks: how many each engine has (its ``tp``). None: one each.
    """
    counts = [1] * len(clients) if ranks is None else list(ranks)
    return [
        started(
            client,
            InitWeightsUpdateGroupReqInput(
                master_address=address,
                master_port=port,
                rank_offset=rank,
                world_size=first_rank + sum(counts),
                group_name=name,
                backend=backend,
                timeout_s=limits[0],
                broadcast_timeout_s=limits[1],
            ),
            InitWeightsUpdateGroupReqOutput,
        )
        for rank, client in zip(accumulate(counts, initial=first_rank), clients, strict=False)
    ]


def await_ranks(joining: Sequence[Future[Any]], timeout_s: float) -> None:
    """Until every rank has joined; raises the error of the first that has not, in their order."""
    done, late = wait(joining, timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
    for future in joining:
        if future in done:
            future.result()
    if late:
        raise GroupError(f"{len(late)} of {len(joining)} ranks did not join within {timeout_s:g} s")


def make_store(address: str, port: int, limit: timedelta) -> Any:
    """A store in this process for groups of engines alone; it may serve any number of them."""
    return rendezvous(address, port, 1, limit)[0]


def mark_present(store: Any, name: str, backend: Backend) -> None:
    """In the store of group ``name``: NCCL's constructor waits for nobody, and engines that see this wait for one another."""
    if backend == "nccl":
        PrefixStore(name, store).set(f"{PRESENT}0", "")


def rendezvous(address: str, port: int, size: int, limit: timedelta) -> tuple[Any, bool]:
    """The store of a new group, and whether ``address`` is one of this host's: then the store listens there alone.

    By itself torch listens on all addresses of the host, so it is given a socket that listens already.
    """
    options: dict[str, Any] = {"is_master": True, "timeout": limit, "wait_for_workers": False}
    try:
        listener = _listening(address, port)
        if listener is None:
            return TCPStore(address, port, size, **options), False
        port = listener.getsockname()[1]
        return TCPStore(address, port, size, master_listen_fd=listener.detach(), **options), True
    except (OSError, RuntimeError) as error:
        raise GroupError(f"cannot serve on {address}:{port}: {error}") from error


def _listening(address: str, port: int) -> socket.socket | None:
    """A socket that listens at ``address``; None where that is no address of this host."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    return listener


def join(store: Any, name: str, backend: Backend, size: int, limit: timedelta, listen: str | None) -> Any:
    """This process's end of the group; gloo listens at ``listen`` (None: where it would by itself)."""
    ranks = PrefixStore(PREFIXES[backend], PrefixStore(f"{name}/", PrefixStore(name, store)))
    if backend == "gloo":
        own: Any = dist.ProcessGroupGloo
        if listen is None or "GLOO_SOCKET_IFNAME" in os.environ:
            return own(ranks, 0, size, limit)
        gloo = own._Options()
        gloo._timeout, gloo._devices = limit, [own.create_device(hostname=listen)]
        return own(ranks, 0, size, gloo)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(ranks, 0, size, options)


def common_backend(clients: "Sequence[ControlClient]", timeout_s: float) -> Backend:
    """NCCL if this process and every engine have CUDA devices, else gloo."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "gloo"
    return backend_of(clients, timeout_s)


def backend_of(engines: "Sequence[ControlClient]", timeout_s: float) -> Backend:
    """NCCL if every engine is on a CUDA device, else gloo."""
    devices = [client.status(timeout=timeout_s).device for client in engines]
    return "nccl" if all(device.startswith("cuda") for device in devices) else "gloo"


def ranks_of(clients: "Sequence[ControlClient]", timeout_s: float) -> list[int]:
    """How many ranks each engine has (its ``tp``)."""
    return [1 + len(client.status(timeout=timeout_s).ranks) for client in clients]


def leave(clients: "Sequence[ControlClient]", name: str, timeout_s: float) -> None:
    for client in clients:
        with contextlib.suppress(EngineError):  # it has left, or is gone
            client.destroy_weights_update_group(name, timeout=timeout_s)


def beside(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  it crosses to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="caesura-group", daemon=True).start()
    return future
