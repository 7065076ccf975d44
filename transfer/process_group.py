"""Process groups of torch.distributed for weights: how ranks meet, how a backend is made, and how it ends.

Invariants:
- A backend is used bare, without torch's registry of process groups: it needs no default group.
- What fails raises in the thread that waits for it. In an engine nothing here may end the process: NCCL's
  watchdog and heartbeat monitor in torch would, so neither is started.
- Joining has one deadline, and each broadcast a timeout of its own, which joining does not shorten.
- A backend ends by :func:`release`. NCCL's is aborted: its kernels wait for a rank that is gone otherwise.
- The store listens at the address that the ranks are given, and only there if it is one of this host.
- Ranks meet as over ``tcp://``: in rank 0's TCPStore, by a ``PrefixStore`` of the group's name, then torch's.
"""

import errno
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..io_struct.weights import PRESENT

Backend = Literal["gloo", "nccl"]
PREFIXES = {"gloo": "cpu/", "nccl": "cuda/"}  # the first device that each backend registers for
VLLM_NCCL = "vllm_nccl"
"""Backend of vLLM's trainers: ranks meet by vLLM's keys, see :mod:`raw_nccl`."""
ON_DEVICE = ("nccl", VLLM_NCCL)
"""Backends whose buffers lie on the engine's device."""
_LISTEN_BACKLOG = 128
_NCCL_IN_TORCH = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # wait() raises in its thread, and no watchdog is started
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Settings of an engine's process; torch reads them whenever a process group is made."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of one process in a group; two equal ones mean the same group."""

    group_name: str
    address: str
    """``host:port`` of the store, which rank 0 holds."""
    world_size: int
    rank: int
    backend: str


def serve_store(address: str, port: int, size: int, timeout: timedelta) -> tuple[Any, bool]:
    """Return the store of a new group, and True if ``address`` is one of this host.

    torch by itself listens everywhere, so it gets a socket that listens already, except for a foreign address
    (NAT).
    """
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
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
        return TCPStore(address, port, size, **options), False
    port = listener.getsockname()[1]
    return TCPStore(address, port, size, master_listen_fd=listener.detach(), **options), True


def keys_of(member: Membership, store: Store) -> tuple[Store, Store]:
    """Return where the ranks of a group say that they are there, and where its backend keeps its keys."""
    own = PrefixStore(member.group_name, store)
    return own, PrefixStore(PREFIXES.get(member.backend, ""), PrefixStore(f"{member.group_name}/", own))


def make_backend(
    member: Membership,
    ranks: Store,
    timeout: timedelta,
    *,
    device: torch.device | None = None,
    interface: str | None = None,
    hostname: str | None = None,
) -> Any:
    """Return the backend of this rank; gloo's waits for every rank, NCCL's ranks meet at the first operation.

    Args:
        timeout: limits the joining of a gloo group, or each operation of an NCCL group.
        device: that of an engine, whose process NCCL must not end.
        interface: network interface to listen on; None leaves the choice to ``hostname``.
        hostname: address for gloo to listen at, unless GLOO_SOCKET_IFNAME is set.
    """
    if member.backend == "nccl":
        if interface is not None:
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # read once, when NCCL begins
        if device is not None:
            os.environ.update(_NCCL_IN_TORCH)
            torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # NCCL looks at this one, not at that of an operation's options
        return dist.ProcessGroupNCCL(ranks, member.rank, member.world_size, nccl)
    gloo: Any = dist.ProcessGroupGloo
    if interface is not None:
        chosen = gloo.create_device(interface=interface)
    elif hostname is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        chosen = gloo.create_device(hostname=hostname)
    else:
        return gloo(ranks, member.rank, member.world_size, timeout)
    options = gloo._Options()
    options._timeout, options._devices = timeout, [chosen]
    return gloo(ranks, member.rank, member.world_size, options)


def broadcast_options(timeout: timedelta | None) -> Any:
    """Return the options of a broadcast from rank 0; None means the timeout of the group."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    if timeout is not None:
        options.timeout = timeout
    return options


def mark_present(store: Any, name: str, backend: Backend) -> None:
    """Mark that the engines of ``name`` meet before a broadcast; other trainers may not answer before it."""
    if backend == "nccl":
        PrefixStore(name, store).set(f"{PRESENT}0", "")


def await_ranks(member: Membership, own: Store, timeout: timedelta) -> None:
    """Record that this rank is there and, if rank 0 has marked the group, wait for all ranks."""
    own.set(f"{PRESENT}{member.rank}", "")
    if own.check([f"{PRESENT}0"]):
        own.wait([f"{PRESENT}{rank}" for rank in range(member.world_size)], timeout)


def ranks_seen(member: Membership, own: Store, ranks: Store) -> list[int] | None:
    """Return the ranks that have left a trace, or None if that cannot be told."""
    store, form = (ranks, "0/{}") if member.backend == "gloo" else (own, PRESENT + "{}")
    try:
        seen = [rank for rank in range(member.world_size) if store.check([form.format(rank)])]
    except RuntimeError:  # the store has gone
        return None
    return seen if member.rank in seen else None  # else this torch uses keys that we do not know


def release(holder: list[Any]) -> None:
    """End the backend in ``holder``, and drop its reference; it may block, so call it in a thread."""
    if holder[0].name() == "nccl":
        holder[0].abort()
    holder.clear()
