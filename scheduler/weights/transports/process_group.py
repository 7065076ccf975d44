"""The backends of torch.distributed for weight updates: how one is made, how its ranks find each other, how it ends.

Invariants:
- A backend is used bare, without torch's registry of process groups: it needs no default group and leaves no global state.
- What fails raises in the thread that waits for it. Nothing here may end the process: of NCCL's threads in torch, the watchdog
  and the heartbeat monitor would, so neither is started.
- Joining has one deadline, a broadcast has a timeout of its own: what was left of joining limits nothing later.
- A backend ends by :func:`release`, whatever state it is in. NCCL's is aborted: its kernels wait on the device for a rank that
  is gone, and nothing else ends them.

The ranks find each other as those of any group over a ``tcp://`` rendezvous do: a TCPStore at the master, below it a
``PrefixStore`` of the group's name, then the prefixes that torch itself puts before a group's and a device's keys.
"""

import ipaddress
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ....io_struct.weights import PRESENT

_PREFIXES = {"gloo": "cpu/", "nccl": "cuda/"}  # the first device that each backend registers for
_NCCL_IN_TORCH = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # wait() raises in its thread, and no watchdog is started
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read whenever a process group is made."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One engine's place in one group: two inits with equal ones mean the same."""

    group_name: str
    address: str
    """``host:port`` of the store, which rank 0 holds."""
    world_size: int
    rank: int
    backend: str


def keys_of(member: Membership, store: Store) -> tuple[Store, Store]:
    """Of a group: where its ranks say that they are there, and where its backend keeps its keys."""
    own = PrefixStore(member.group_name, store)
    return own, PrefixStore(_PREFIXES[member.backend], PrefixStore(f"{member.group_name}/", own))


def make_backend(
    member: Membership, ranks: Store, device: torch.device, timeout: timedelta, interface: str | None
) -> Any:
    """The backend of this rank; ``timeout`` is that of a gloo group's joining, or of an NCCL group's operations.

    gloo's constructor returns when every rank is there, NCCL's at once: its ranks meet at the first operation.
    """
    if member.backend == "gloo":
        return _gloo(member, ranks, timeout, interface)
    if interface is not None:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # read once, when NCCL begins
    os.environ.update(_NCCL_IN_TORCH)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # NCCL looks at this one, not at that of an operation's options
    return dist.ProcessGroupNCCL(ranks, member.rank, member.world_size, options)


def await_ranks(member: Membership, own: Store, timeout: timedelta) -> None:
    """Say that this rank is there and, where rank 0 has said so in this way, wait for all the others.

    A trainer of another make says nothing, and then nobody waits: it may not answer before the first broadcast.

    Raises:
        RuntimeError: not all of them came.
    """
    own.set(f"{PRESENT}{member.rank}", "")
    if own.check([f"{PRESENT}0"]):
        own.wait([f"{PRESENT}{rank}" for rank in range(member.world_size)], timeout)


def ranks_seen(member: Membership, own: Store, ranks: Store) -> list[int] | None:
    """Which ranks have left a trace; None: cannot be told."""
    store, form = (ranks, "0/{}") if member.backend == "gloo" else (own, PRESENT + "{}")
    try:
        seen = [rank for rank in range(member.world_size) if store.check([form.format(rank)])]
    except RuntimeError:  # the store has gone
        return None
    return seen if member.rank in seen else None  # else the keys are other ones than we know


def release(holder: list[Any]) -> None:
    """In a thread: end the backend in ``holder``. The last reference goes here, or with the broadcast that still holds one."""
    if holder[0].name() == "nccl":
        holder[0].abort()
    holder.clear()


def _gloo(member: Membership, ranks: Store, timeout: timedelta, interface: str | None) -> Any:
    """Listens on the interface that was named, or on loopback where the master is reached over it (all ranks are of this host, then),
    else as torch decides: where GLOO_SOCKET_IFNAME says, or at the address of this host's name."""
    host = member.address.rpartition(":")[0]
    own: Any = dist.ProcessGroupGloo
    if interface is not None:
        device = own.create_device(interface=interface)
    elif _is_loopback(host) and "GLOO_SOCKET_IFNAME" not in os.environ:
        device = own.create_device(hostname=host)
    else:
        return own(ranks, member.rank, member.world_size, timeout)
    options = own._Options()
    options._timeout, options._devices = timeout, [device]
    return own(ranks, member.rank, member.world_size, options)


def _is_loopback(host: str) -> bool:
    """Whether ``host`` means this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
