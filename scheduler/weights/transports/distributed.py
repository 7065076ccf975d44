"""Tensors that a trainer broadcasts over a process group of torch.distributed.

Invariants:
- Joining, receiving and leaving happen in threads (background.py), each with a deadline; the loop never waits for one.
- A broadcast that was entered must end: what is refused never enters one, and what is broken off leaves the group dead.
- At most :data:`MAX_JOINING` threads join, those of groups that were destroyed meanwhile included, and :data:`MAX_GROUPS` groups are known.
- Per group at most two broadcasts are in memory, the one being received and the one being written, in buffers that are
  kept between calls.

The ranks find each other as those of any group over a ``tcp://`` rendezvous do: a TCPStore at the master, below it a
``PrefixStore`` of the group's name, then the prefixes that torch itself puts before a group's and a device's keys. The
backend is used bare, without torch's registry of process groups: it needs no default group and leaves no global state.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from time import monotonic
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ....io_struct import (
    CaesuraError,
    ErrorCode,
    InitWeightsUpdateGroupReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from ...background import Feed, Worker
from ...dtypes import DTYPES
from ..loader import WeightPiece
from ..source import cut

MAX_WORLD_SIZE = 16384
"""A backend reserves memory for every rank before the first has come."""
MAX_JOINING = 8
"""Each is a thread that waits for other processes."""
MAX_GROUPS = 64
_LOOK_S = 1.0  # longest attempt to reach a port, between two looks at whether anybody still wants to
_GRACE_S = 2.0  # for the backend's own timeout to be reported, with the ranks it missed
_CLOSE_S = 0.5
_MAX_BYTES = 1 << 62  # beyond, neither torch nor a reply can hold the number
_RETRY_S = 0.05  # between two looks at a port where nobody listens yet
_PREFIXES = {"gloo": "cpu/", "nccl": "cuda/"}  # the first device that each backend registers for


@dataclass(frozen=True, slots=True)
class Membership:
    """One engine's place in one group: two inits with equal ones mean the same."""

    group_name: str
    address: str
    """``host:port`` of the store, which rank 0 holds."""
    world_size: int
    rank: int
    backend: str


class Group:
    """A process group from the first attempt to its end: joining, joined, dead."""

    def __init__(
        self,
        membership: Membership,
        timeout_s: float,
        device: torch.device,
        wake: Callable[[], None],
        interface: str | None,
    ) -> None:
        self.membership = membership
        self._interface = interface
        self._timeout_s = timeout_s
        self._device = device if membership.backend == "nccl" else torch.device("cpu")
        self._wake = wake
        self._deadline = monotonic() + timeout_s
        self._failure: CaesuraError | None = None
        self._backend: Any = None
        self._buffers: dict[int, Tensor] = {}
        self._joining: Feed[Any] = Feed(self._join(), wake)
        self._leaving: threading.Thread | None = None
        self._receiver: Worker | None = None
        self.has_joined = False
        """Every rank was there once."""

    def joined(self) -> bool:
        """Whether every rank is there.

        Raises:
            CaesuraError: ``group_error``, they were not in time, or the group is dead.
        """
        if not self.has_joined and self._failure is None:
            try:
                self._backend = self._joining.take()
            except CaesuraError as error:
                self._failure = error
            self.has_joined = self._backend is not None
            if self.has_joined:
                self._joining.release()  # its thread has nothing else to do
            elif monotonic() >= self._deadline + _GRACE_S:
                self.kill(f"the ranks did not join within {self._timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        return self.has_joined

    def kill(self, reason: str) -> CaesuraError:
        """End the group: its connections are closed, so that other ranks that wait for this one hear of it.

        A backend's end may have to wait for a broadcast, hence a thread. Returns the error of later calls, with the first reason.
        """
        self._failure = self._failure or self.error(reason)
        self._joining.cancel()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._backend is not None:
            holder, self._backend = [self._backend], None
            self._leaving = threading.Thread(
                target=_release, args=(holder,), name="caesura-leave", daemon=True
            )
            self._leaving.start()
        self._buffers.clear()
        return self._failure

    def broken(self, reason: str) -> CaesuraError:
        """The ranks may be out of step, for good: one of them has entered a broadcast that another has not."""
        return self.kill(f"{reason}; the group is dead: destroy it and init it again")

    @property
    def is_joining(self) -> bool:
        """A thread waits for other ranks, maybe for nobody any more."""
        return self._joining.is_running

    @property
    def is_leaving(self) -> bool:
        """Its end waits for a broadcast."""
        return self._leaving is not None and self._leaving.is_alive()

    def error(self, reason: str, **detail: object) -> CaesuraError:
        """``group_error`` about this group."""
        member = self.membership
        return CaesuraError(
            ErrorCode.GROUP_ERROR,
            f"weight update group {member.group_name!r} at {member.address} (this engine is rank {member.rank} of"
            f" {member.world_size}): {reason}",
            **asdict(member),
            **detail,
        )

    def receive(self, sizes: Sequence[int]) -> Feed[Tensor]:
        """One broadcast from rank 0 per size, in bytes, each as a flat uint8 tensor of this group's device.

        Raises:
            CaesuraError: ``out_of_memory``, there is no room for them; no broadcast was entered.
        """
        for slot in (0, 1):
            needed = max(sizes[slot::2], default=0)
            if slot in self._buffers and self._buffers[slot].numel() >= needed:
                continue
            self._buffers.pop(slot, None)
            try:
                self._buffers[slot] = torch.empty(needed, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise CaesuraError(
                    ErrorCode.OUT_OF_MEMORY, f"no {needed} bytes to receive into", needed_bytes=needed
                ) from error
        views = [self._buffers[number % 2][:size] for number, size in enumerate(sizes)]
        self._receiver = self._receiver or Worker()
        return Feed(self._broadcasts(self._backend, views), self._wake, ahead=2, submit=self._receiver.submit)

    def _broadcasts(self, backend: Any, buffers: list[Tensor]) -> Iterator[Tensor]:
        """In a thread: fill ``buffers``, one broadcast each."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        try:
            for buffer in buffers:
                if buffer.is_cuda:
                    torch.cuda.set_device(buffer.device)
                backend.broadcast([buffer], options).wait()
                if buffer.is_cuda:
                    torch.cuda.current_stream().synchronize()
                yield buffer
        finally:
            del backend  # the traceback of a broadcast that failed keeps this frame, and would keep its threads and sockets

    def _join(self) -> Iterator[Any]:
        """In a thread: find the store, then the other ranks."""
        member = self.membership
        host, _, port = member.address.rpartition(":")
        self._await_listener(host, int(port))
        try:
            store = TCPStore(host, int(port), member.world_size, is_master=False, timeout=self._time_left())
            prefixes = PrefixStore(f"{member.group_name}/", PrefixStore(member.group_name, store))
            ranks = PrefixStore(_PREFIXES[member.backend], prefixes)
        except (RuntimeError, ValueError) as error:
            raise self.error(f"its store did not answer: {_first_line(error)}") from error
        reason = None
        try:
            yield _backend(member, ranks, self._device, self._time_left(), self._interface)
        except RuntimeError as error:
            reason = _first_line(error)
        if reason is None:
            return
        seen = self._ranks_seen(ranks)
        which = "which ranks have joined is not known" if seen is None else f"only ranks {seen} have joined"
        # The traceback of what is raised keeps this frame, and would keep the store's threads and sockets; that of torch's
        # error would keep the backend's, so it is not its cause.
        del store, prefixes, ranks
        raise self.error(f"{which}: {reason}", ranks_seen=seen)

    def _await_listener(self, host: str, port: int) -> None:
        """A look at the port costs little, while torch's own retries overshoot the deadline and flood the log."""
        while self._failure is None:
            try:
                limit = min(self._time_left().total_seconds(), _LOOK_S)
                socket.create_connection((host, port), timeout=limit).close()
            except (OSError, UnicodeError) as error:
                if monotonic() + _RETRY_S >= self._deadline:
                    raise self.error(
                        f"nobody could be reached there within {self._timeout_s:g} s: {error}", ranks_seen=[]
                    ) from error
            else:
                return
            time.sleep(_RETRY_S)
        raise self._failure

    def _ranks_seen(self, ranks: Store) -> list[int] | None:
        """Who has left an address; None: cannot be told."""
        if self.membership.backend != "gloo":
            return None
        try:
            seen = [rank for rank in range(self.membership.world_size) if ranks.check([f"0/{rank}"])]
        except RuntimeError:  # the store has gone
            return None
        return seen if self.membership.rank in seen else None  # else the keys are other ones than we know

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - monotonic(), 0.1))


class DistributedSource:
    """The tensors of one call; the broadcasts are entered when the first piece is asked for."""

    name = "distributed"
    complete = False

    def __init__(self, group: Group, batches: list[list[TensorSpec]], settle: Callable[[], None]) -> None:
        """
        Args:
            batches: which tensors come in one broadcast, ``offset`` and ``nbytes`` within it.
            settle: waits until writes of pieces have been executed on the device.
        """
        self.specs = [spec for batch in batches for spec in batch]
        self.total_bytes = sum(spec.nbytes for spec in self.specs)
        self._group = group
        self._batches = batches
        self._settle = settle

    def pieces(
        self, bucket_bytes: int, skip: Callable[[str], bool]
    ) -> Generator[WeightPiece | None, None, None]:
        """Views of the receive buffers."""
        self._group.joined()
        feed = self._group.receive([sum(spec.nbytes for spec in batch) for batch in self._batches])
        try:
            for batch in self._batches:
                while (received := self._take(feed)) is None:
                    yield None
                for spec in batch:
                    if not skip(spec.name):
                        data = received[spec.offset : spec.offset + spec.nbytes]
                        yield from cut(spec, data, bucket_bytes)
                self._settle()
                feed.release()
        finally:
            feed.cancel()

    def _take(self, feed: Feed[Tensor]) -> Tensor | None:
        try:
            return feed.take()
        except RuntimeError as error:
            raise self._group.broken(f"a broadcast failed: {_first_line(error)}") from error


class WeightsUpdateGroups:
    """The groups that this engine is in, by name."""

    def __init__(
        self,
        device: torch.device,
        wake: Callable[[], None],
        settle: Callable[[], None],
        interface: str | None = None,
    ) -> None:
        """
        Args:
            device: of the model.
            wake: makes the loop look again; called from threads.
            settle: waits until the device has executed what was written.
            interface: of the network, whose address is listened on. None: what suits the group (:func:`_gloo`).
        """
        self._interface = interface
        self._joining: list[Group] = []
        self._device = device
        self._wake = wake
        self._settle = settle
        self._groups: dict[str, Group] = {}

    def join(self, request: InitWeightsUpdateGroupReqInput) -> Group:
        """The group of ``request``, which starts to join unless it is there already.

        Raises:
            CaesuraError: ``unsupported``, ``invalid_request``; ``group_error``, the name is another group's, or it is dead;
                ``queue_full``, too many groups are being joined, or are there.
        """
        member = Membership(
            request.group_name,
            f"{request.master_address}:{request.master_port}",
            request.world_size,
            request.rank_offset,
            request.backend or ("nccl" if self._device.type == "cuda" else "gloo"),
        )
        _require_possible(member, self._device)
        group = self._groups.get(member.group_name)
        if group is not None and group.membership != member:
            raise group.error("a group of this name exists with other parameters: destroy it first")
        if group is None:
            self._require_room()
            group = Group(member, request.timeout_s, self._device, self._wake, self._interface)
            self._groups[member.group_name] = group
            self._joining.append(group)
        return group

    def leave(self, name: str) -> Group:
        """Forget a group, in whatever state; returns what is left of it."""
        group = self._find(name)
        group.kill("the group was destroyed")
        return self._groups.pop(name)

    def out_of_step(self, name: str, reason: str) -> None:
        """A call on the group has failed while its trainer broadcasts."""
        if name in self._groups and self._groups[name].has_joined:
            self._groups[name].broken(reason)

    def forget(self, group: Group) -> None:
        """Joining ``group`` has failed: the next init tries again. One that was joined once must be destroyed."""
        name = group.membership.group_name
        if not group.has_joined and self._groups.get(name) is group:
            self.leave(name)

    def open(self, request: UpdateWeightsFromDistributedReqInput) -> DistributedSource:
        """What the trainer will broadcast; no broadcast is entered yet.

        Raises:
            CaesuraError: ``group_error``, the group is unknown, not joined yet, or dead; ``invalid_request``, a spec is not a whole tensor
                of a known dtype.
        """
        group = self._find(request.group_name)
        if not group.joined():
            raise group.error("not every rank has joined yet")
        specs = [_whole(spec) for spec in request.specs]
        if sum(spec.nbytes for spec in specs) > _MAX_BYTES:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "the tensors are larger than any memory", field="specs"
            )
        if request.load_format is None:
            batches = [[spec] for spec in specs]
        else:
            offsets = accumulate((spec.nbytes for spec in specs), initial=0)
            placed = (msgspec.structs.replace(s, offset=at) for s, at in zip(specs, offsets, strict=False))
            batches = [list(placed)]
        return DistributedSource(group, batches, self._settle)

    def close(self) -> None:
        """Leave all of them; waits a moment for those that can be left at once."""
        groups, deadline = [self.leave(name) for name in list(self._groups)], monotonic() + _CLOSE_S
        while any(group.is_leaving for group in groups) and monotonic() < deadline:
            time.sleep(_RETRY_S / 10)

    def _require_room(self) -> None:
        self._joining = [group for group in self._joining if group.is_joining]
        for waiting, limit, what in (
            (len(self._joining), MAX_JOINING, "are being joined"),
            (len(self._groups), MAX_GROUPS, "exist"),
        ):
            if waiting >= limit:
                raise CaesuraError(
                    ErrorCode.QUEUE_FULL,
                    f"{waiting} weight update groups {what}, the limit: destroy some, or wait for their deadline",
                    waiting=waiting,
                    limit=limit,
                )

    def _find(self, name: str) -> Group:
        if name not in self._groups:
            raise CaesuraError(
                ErrorCode.GROUP_ERROR,
                f"there is no weight update group {name!r}: init it first",
                group_name=name,
            )
        return self._groups[name]


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


def _backend(
    member: Membership, ranks: Store, device: torch.device, timeout: timedelta, interface: str | None
) -> Any:
    if member.backend == "gloo":
        return _gloo(member, ranks, timeout, interface)
    if interface is not None:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # read once, when NCCL begins
    # A broadcast that fails must raise in its thread; by default NCCL's watchdog would end the process instead.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(ranks, member.rank, member.world_size, options)


def _release(holder: list[Any]) -> None:
    """In a thread: the last reference goes here, or with the broadcast that still holds one."""
    if holder[0].name() == "nccl":
        holder[0].abort()
    holder.clear()


def _require_possible(member: Membership, device: torch.device) -> None:
    built = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    if not built[member.backend]() or (member.backend == "nccl" and device.type != "cuda"):
        raise CaesuraError(
            ErrorCode.UNSUPPORTED, f"this engine, on {device.type}, cannot use the backend {member.backend!r}"
        )
    for field, value, below in (
        ("world_size", member.world_size, MAX_WORLD_SIZE + 1),
        ("rank_offset", member.rank, member.world_size),
    ):
        if value >= below:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, f"{field} {value} must be below {below}", field=field, value=value
            )


def _whole(spec: TensorSpec) -> TensorSpec:
    """``spec`` as all of its tensor, at the start of a buffer."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or spec.start_row:
        problem = "starts in its midst" if dtype is not None else f"has the unknown dtype {spec.dtype!r}"
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST, f"tensor {spec.name!r} {problem}", field="specs", value=spec.name
        )
    return msgspec.structs.replace(spec, offset=0, nbytes=prod(spec.shape) * dtype.itemsize, buffer=0)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
