"""Tensors that rank 0 of a process group of torch.distributed broadcasts: a trainer, or an engine.

- Joining, receiving and leaving happen in threads, each with a deadline; the loop never waits for one.
- A broadcast that was entered must end: what is refused never enters one, and what is broken off leaves the
  group dead. So does what blocks without a timeout of its own (NCCL finding its ranks); its thread is left.
- An engine that is rank 0 sends and receives nothing there; what it receives elsewhere it can relay.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .... import io_struct as wire
from ....io_struct import CaesuraError, ErrorCode
from ....process.contract import is_loopback
from ....transfer import process_group
from ....transfer.raw_nccl import ID_KEY, RawNccl, read_id
from ...runtime.background import Feed, Worker
from ..source import WeightPiece, cut
from ..upload import WriteStream
from .broadcasts import (
    GRACE_S,
    SHARED_BYTES,
    Batch,
    Received,
    Relay,
    Transmission,
    batches_of,
    broadcasts,
    first_line,
    nbytes_of,
    plans_of,
)

MAX_WORLD_SIZE = 16384
"""A backend reserves memory for every rank before the first has come."""
MAX_JOINING = 8
"""Each is a thread that waits for other processes, maybe of a group that was destroyed meanwhile."""
MAX_GROUPS = 64
LEAVE_S = 2.0
"""Longest wait until a process group is destroyed: one that is broken may block until its own timeout."""
_LOOK_S = 1.0  # longest attempt to reach a port, between two looks at whether anybody still wants to
_CLOSE_S = 0.5
_QUESTION = struct.pack("=BIB", 0, 0x3C85F7CE, 7)
"""To a TCPStore: its check of clients, and how many keys it has. Any answer will do."""
_RETRY_S = 0.05  # between two looks at a port where nobody listens yet


class Group:
    """A process group from the first attempt to its end: joining, joined, dead."""

    def __init__(
        self,
        groups: "WeightsUpdateGroups",
        membership: process_group.Membership,
        timeout_s: float,
        broadcast_timeout_s: float,
        nccl_id: bytes | None = None,
    ) -> None:
        """Begin to join, within ``timeout_s``; ``broadcast_timeout_s`` is for each broadcast."""
        self.membership, self._nccl_id = membership, nccl_id
        self._interface, self._wake = groups.interface, groups.wake
        self._timeout_s = timeout_s
        self._broadcast_timeout_s = broadcast_timeout_s
        on_device = membership.backend in process_group.ON_DEVICE
        self._device = groups.device if on_device else torch.device("cpu")
        self._write_stream = groups.write_stream if on_device else None
        self._deadline = monotonic() + timeout_s
        self._failure: CaesuraError | None = None
        self._backend: Any = None
        self.buffers: dict[int, Tensor] = {}
        self._joining: Feed[Any] = Feed(self._join(), self._wake)
        self._leaving: threading.Thread | None = None
        self._worker: Worker | None = None
        self._sending: Transmission | None = None
        self.has_joined = False

    def joined(self) -> bool:
        if not self.has_joined and self._failure is None:
            try:
                self._backend = self._joining.take()
            except CaesuraError as error:
                self._failure = error
            self.has_joined = self._backend is not None
            if self.has_joined:
                self._joining.release()  # its thread has nothing else to do
            elif monotonic() >= self._deadline + GRACE_S:
                self.kill(f"the ranks did not join within {self._timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        return self.has_joined

    def kill(self, reason: str) -> CaesuraError:
        """End the group in a thread, as a broadcast may hold it up; return the error of later calls."""
        self._failure = self._failure or self.error(reason)
        self._joining.cancel()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._backend is not None:
            holder, self._backend = [self._backend], None
            self._leaving = threading.Thread(
                target=process_group.release, args=(holder,), name="caesura-leave", daemon=True
            )
            self._leaving.start()
        self.buffers.clear()
        return self._failure

    def broken(self, reason: str) -> CaesuraError:
        """Mark the ranks as out of step, for good: one has entered a broadcast that another has not."""
        return self.kill(f"{reason}; the group is dead: destroy it and init it again")

    @property
    def is_joining(self) -> bool:
        """True while a thread waits for other ranks, maybe for nobody any more."""
        return self._joining.is_running

    @property
    def is_leaving(self) -> bool:
        return self._leaving is not None and self._leaving.is_alive()

    def error(self, reason: str, **detail: object) -> CaesuraError:
        member = self.membership
        message = (
            f"weight update group {member.group_name!r} at {member.address} (this engine is rank "
            f"{member.rank} of {member.world_size}): {reason}"
        )
        return CaesuraError(ErrorCode.GROUP_ERROR, message, **asdict(member), **detail)

    def require_receiver(self) -> None:
        """Raise ``group_error`` unless every rank is there and this one receives."""
        self._require_joined()
        if self.membership.rank == 0:
            raise self.error("rank 0 sends: this engine receives nothing there")

    def require_sender(self) -> None:
        """Raise ``group_error`` unless every rank is there and this one sends; ``busy`` if it does so now."""
        self._require_joined()
        if self.membership.rank != 0:
            raise self.error("only rank 0 sends")
        if self._sending is not None and self._sending.is_open:
            reason = f"weights are being sent over group {self.membership.group_name!r}"
            raise CaesuraError(ErrorCode.BUSY, reason, running="SendWeightsReqInput")

    def _require_joined(self) -> None:
        if not self.joined():
            raise self.error("not every rank has joined yet")

    def transmit(self, nbytes: int) -> Transmission:
        self.require_sender()
        for slot in (0, 1):
            self._make_room(slot, nbytes)
        self._worker = self._worker or Worker()
        self._sending = Transmission(
            self._backend,
            [self.buffers[slot] for slot in (0, 1)],
            self._write_stream,
            timeout_s=self._broadcast_timeout_s,
            submit=self._worker.submit,
            wake=self._wake,
            broken=self.broken,
        )
        return self._sending

    def relay(self) -> Relay:
        self.require_sender()
        return Relay(self._backend, self._broadcast_timeout_s)

    def receive(
        self, sizes: Sequence[int], relay: Relay | None = None
    ) -> Generator[Tensor | None, None, None]:
        """Receive one broadcast from rank 0 per size in bytes; yield each, valid until the next, or None.

        With a relay also None until it has passed all on. After ``out_of_memory`` no broadcast was entered;
        after ``group_error`` the group is dead.
        """
        stream, timeout_s = self._write_stream, self._broadcast_timeout_s
        plans = list(plans_of(sizes, 0 if stream is None else SHARED_BYTES))
        for slot in (0, 1):
            self._make_room(slot, max((plan.nbytes for plan in plans[slot::2]), default=0))
        self._worker = self._worker or Worker()
        written = [None if stream is None else stream.mark() for _ in (0, 1)]
        limit = timedelta(seconds=timeout_s)
        items = broadcasts(
            self._backend, plans, [self.buffers[0], self.buffers[1]], written, stream, limit, relay
        )
        feed = Feed(items, self._wake, ahead=2, submit=self._worker.submit)
        if relay is not None:  # a buffer may be kept that long by what is relayed from it
            timeout_s += relay.timeout_s
        timer: threading.Timer | None = None
        deadline = monotonic() + timeout_s + GRACE_S

        def look_again() -> None:
            """Look again at the deadline, also where the thread is stuck."""
            nonlocal timer
            left = deadline - monotonic()
            if left <= 0:
                raise self.broken(f"a broadcast did not come within {timeout_s:g} s")
            if stream is not None and (timer is None or timer.finished.is_set()):
                timer = threading.Timer(left, self._wake)
                timer.daemon = True
                timer.start()

        try:
            for number in range(len(plans)):
                while (received := self._taken(feed)) is None:
                    look_again()
                    self.joined()  # not any more where it has been destroyed
                    yield None
                deadline = monotonic() + timeout_s + GRACE_S
                if stream is not None and received.arrived is not None:
                    stream.write_after(received.arrived)
                yield from received.broadcasts
                # The buffer may be filled again, after what was enqueued from it.
                written[number % 2] = None if stream is None else stream.mark()
                feed.release()
            while relay is not None and not feed.ended:
                look_again()
                yield None
        finally:
            if timer is not None:
                timer.cancel()
            feed.cancel()

    def _taken(self, feed: Feed[Received]) -> Received | None:
        try:
            return feed.take()
        except RuntimeError as error:
            raise self.broken(f"a broadcast failed: {first_line(error)}") from error

    def _make_room(self, slot: int, needed: int) -> None:
        if slot in self.buffers and self.buffers[slot].numel() >= needed:
            return
        self.buffers.pop(slot, None)
        try:
            with nullcontext() if self._write_stream is None else self._write_stream.on_stream():
                self.buffers[slot] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            reason = f"no {needed} bytes to receive into"
            raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=needed) from error

    def _join(self) -> Iterator[Any]:
        """Find the store, then the other ranks; in a thread."""
        member, limit = self.membership, timedelta(seconds=self._broadcast_timeout_s)
        if self._nccl_id is not None:
            try:
                yield RawNccl(self._nccl_id, member.rank, member.world_size, self._device)
            except RuntimeError as error:
                raise self.error(first_line(error)) from error
            return
        host, _, port = member.address.rpartition(":")
        self._await_listener(host, int(port))
        try:
            store = TCPStore(host, int(port), member.world_size, is_master=False, timeout=self._time_left())
            own, ranks = process_group.keys_of(member, store)
        except (RuntimeError, ValueError) as error:
            raise self.error(f"its store did not answer: {first_line(error)}") from error
        reason, backend = None, None
        try:
            if member.backend == process_group.VLLM_NCCL:
                store.set_timeout(self._time_left())
                identity = read_id(store.get(ID_KEY))
                yield RawNccl(identity, member.rank, member.world_size, self._device)
                return
            joining = self._time_left() if member.backend == "gloo" else limit
            backend = process_group.make_backend(
                member,
                ranks,
                joining,
                device=self._device,
                interface=self._interface,
                hostname=host if is_loopback(host) else None,
            )
            if member.backend == "nccl":
                process_group.await_ranks(member, own, self._time_left())
                store.set_timeout(limit)  # at the first broadcast the ranks meet in it
            yield backend
        except RuntimeError as error:
            reason = first_line(error)
        if reason is None:
            return
        seen = process_group.ranks_seen(member, own, ranks)
        which = "which ranks have joined is not known" if seen is None else f"only ranks {seen} have joined"
        # The traceback of what is raised keeps this frame, and would keep the store's threads and sockets;
        # that of torch's error would keep the backend's, so it is not its cause.
        if backend is not None:
            process_group.release([backend])
        del store, own, ranks, backend
        raise self.error(f"{which}: {reason}", ranks_seen=seen)

    def _await_listener(self, host: str, port: int) -> None:
        """Probe the port; torch's own retries overshoot the deadline and flood the log."""
        while self._failure is None:
            try:
                limit = min(self._time_left().total_seconds(), _LOOK_S)
                with socket.create_connection((host, port), timeout=limit) as probe:
                    if self._is_answered(probe):
                        return
            except (OSError, UnicodeError) as error:
                if monotonic() + _RETRY_S >= self._deadline:
                    reason = f"nobody could be reached there within {self._timeout_s:g} s: {error}"
                    raise self.error(reason, ranks_seen=[]) from error
            time.sleep(_RETRY_S)
        raise self._failure

    def _is_answered(self, probe: socket.socket) -> bool:
        """Probe the store: a process that hangs still accepts, and torch's store would wait for ever."""
        with contextlib.suppress(ConnectionError):  # also an answer: torch's store says what is wrong
            probe.sendall(_QUESTION)
            while self._failure is None:
                with contextlib.suppress(TimeoutError):
                    probe.recv(1)
                    return True
                if monotonic() >= self._deadline:
                    reason = f"a process listens there, and did not answer within {self._timeout_s:g} s"
                    raise self.error(reason, ranks_seen=[])
        return self._failure is None

    def _time_left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - monotonic(), 0.1))


class DistributedSource:
    """The tensors of one call; the broadcasts are entered when the first piece is asked for."""

    name = "distributed"
    complete = False

    def __init__(
        self,
        group: Group,
        batches: list[Batch],
        request: wire.UpdateWeightsFromDistributedReqInput,
        behind: Group | None = None,
    ) -> None:
        """``behind`` is a group of which this engine is rank 0, and to which everything is relayed."""
        self.request = request
        self.delta = request.delta
        self.relay_error: str | None = None
        """Why the ranks ``behind`` did not get everything, or None."""
        self._behind = behind
        self.specs = [spec for batch in batches for spec in batch]
        self.total_bytes = sum(spec.nbytes for spec in self.specs)
        self._group = group
        self._batches = batches

    def pieces(
        self, bucket_bytes: int, skip: Callable[[str], bool]
    ) -> Generator[WeightPiece | None, None, None]:
        self._group.joined()
        relay = None if self._behind is None else self._behind.relay()
        sizes = [nbytes_of(batch) for batch in self._batches]
        with contextlib.closing(self._group.receive(sizes, relay)) as reception:
            for batch in self._batches:
                while (received := next(reception)) is None:
                    yield None
                for spec in batch:
                    if not skip(spec.name):
                        data = received[spec.offset : spec.offset + spec.nbytes]
                        yield from cut(spec, data, bucket_bytes)
            for _ in reception:
                yield None
        if self._behind is not None and relay is not None and relay.failure is not None:
            self.relay_error = self._behind.broken(relay.failure).message


class WeightsUpdateGroups:
    def __init__(
        self,
        device: torch.device,
        wake: Callable[[], None],
        *,
        interface: str | None = None,
        write_stream: WriteStream | None = None,
    ) -> None:
        """Listen on ``interface`` or what suits the group; ``wake`` makes the loop look, from threads."""
        self.device, self.wake = device, wake
        self.interface, self.write_stream = interface, write_stream
        self._joining: list[Group] = []
        self._groups: dict[str, Group] = {}

    def join(self, request: wire.InitWeightsUpdateGroupReqInput) -> Group:
        """Return the group of ``request``, which starts to join unless it is there; raises CaesuraError."""
        if request.nccl_unique_id is not None and request.backend != process_group.VLLM_NCCL:
            reason = f"nccl_unique_id is for {process_group.VLLM_NCCL}"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="nccl_unique_id")
        met = request.nccl_unique_id
        member = process_group.Membership(
            request.group_name,
            f"{request.master_address}:{request.master_port}" if met is None else f"NCCL id {met.hex()}",
            request.world_size,
            request.rank_offset,
            request.backend or ("nccl" if self.device.type == "cuda" else "gloo"),
        )
        _require_possible(member, self.device)
        group = self._groups.get(member.group_name)
        if group is not None and group.membership != member:
            raise group.error("a group of this name exists with other parameters: destroy it first")
        if group is None:
            self._require_room()
            group = Group(self, member, request.timeout_s, request.broadcast_timeout_s, met)
            self._groups[member.group_name] = group
            self._joining.append(group)
        return group

    def leave(self, name: str) -> Group:
        """Forget a group, in whatever state; returns what is left of it."""
        self.find(name).kill("the group was destroyed")
        return self._groups.pop(name)

    def out_of_step(self, name: str, reason: str) -> None:
        """Handle a call on the group that failed while its trainer broadcasts."""
        if name in self._groups and self._groups[name].has_joined:
            self._groups[name].broken(reason)

    def forget(self, group: Group) -> None:
        """Forget ``group``, which could not be joined; one that was joined once must be destroyed."""
        name = group.membership.group_name
        if not group.has_joined and self._groups.get(name) is group:
            self.leave(name)

    def open(self, request: wire.UpdateWeightsFromDistributedReqInput) -> DistributedSource:
        """Return the broadcasts, none entered yet; raises ``group_error`` or ``invalid_request``."""
        group = self.find(request.group_name)
        group.require_receiver()
        behind = None if request.relay_to is None else self.find(request.relay_to)
        if behind is not None:
            behind.require_sender()
        return DistributedSource(group, batches_of(request), request, behind)

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
                reason = (
                    f"{waiting} weight update groups {what}, the limit: destroy some, or wait for their "
                    "deadline"
                )
                raise CaesuraError(ErrorCode.QUEUE_FULL, reason, waiting=waiting, limit=limit)

    def find(self, name: str) -> Group:
        if name not in self._groups:
            reason = f"there is no weight update group {name!r}: init it first"
            raise CaesuraError(ErrorCode.GROUP_ERROR, reason, group_name=name)
        return self._groups[name]


def _require_possible(member: process_group.Membership, device: torch.device) -> None:
    is_built = (
        dist.is_nccl_available() if member.backend in process_group.ON_DEVICE else dist.is_gloo_available()
    )
    if not is_built or (member.backend in process_group.ON_DEVICE and device.type != "cuda"):
        reason = f"this engine, on {device.type}, cannot use the backend {member.backend!r}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason)
    for field, value, below in (
        ("world_size", member.world_size, MAX_WORLD_SIZE + 1),
        ("rank_offset", member.rank, member.world_size),
    ):
        if value >= below:
            reason = f"{field} {value} must be below {below}"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=field, value=value)
