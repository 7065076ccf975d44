"""The trainer's side of a weight update group: rank 0 of a process group whose other ranks are engines.

Invariants:
- No broadcast waits for an engine that does not receive it: the refusal on its socket ends the wait.
- After a failed broadcast the group is dead on both sides; close it and create another.
- Tensors are sent whole and as bytes, so any dtype works. One buffer is filled with one bucket at a time.
- The group is an ordinary one of torch.distributed; one that a trainer has made itself works as well.
"""

import copy
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

import torch
from torch import Tensor

from ... import io_struct as wire
from ...io_struct import CaesuraError
from ...io_struct.field_errors import one_of
from ...io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from ...transfer.process_group import (
    PREFIXES,
    Backend,
    Membership,
    broadcast_options,
    keys_of,
    make_backend,
    mark_present,
)
from ..connection.channel import at_once, finished, wait_for
from ..connection.client_options import UpdateOptions, must_be, update_fields
from ..exceptions import EngineError, GroupError, InvalidRequest, Unsupported, is_answer
from . import rendezvous
from .buckets import AnyTensor, NamedTensors, Sendable, bucket_size, flat_bytes, manifest, pairs
from .sending import Sender, in_one_session, with_base
from .two_phase import started

if TYPE_CHECKING:
    from ..connection.blocking import ControlClient

LoadFormat = Literal["flattened_bucket"] | None
Named = tuple[str, AnyTensor]
ItemT = TypeVar("ItemT")

_LOOK_S = 0.05
"""Seconds between looks for an engine's answer, during a broadcast whose end is announced."""
_POLL_S = 0.0005
_MAX_POLL_S = 0.005
# Within a broadcast's time so far: looking costs a trainer CPU, and an end that is seen late costs time
_POLLS = 16
_CLOSE_S = 1.0


class WeightUpdateGroup:
    """A process group whose rank 0 is this trainer and whose other ranks are engines."""

    def __init__(
        self,
        process_group: Any,
        *,
        group_name: str = DEFAULT_GROUP_NAME,
        backend: Backend = "gloo",
        clients: "Sequence[ControlClient]" = (),
    ) -> None:
        """Wrap a group (ProcessGroup or bare backend) that engines have joined as ``group_name``, with rank 0
        here. ``clients`` are theirs, in rank order from 1; :meth:`close` makes them leave.
        """
        self.group_name = group_name
        """Name of the group in the engines."""
        self.clients = list(clients)
        """Clients of its engines, in the order of their ranks from 1."""
        self._group = process_group
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._broadcast_timeout: timedelta | None = None  # that of the group
        self._dead: str | None = None
        self.store: Any = None
        """The store in which its ranks met, if :meth:`create` has made it."""

    @classmethod
    def create(
        cls,
        clients: "Sequence[ControlClient]",
        *,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        group_name: str = DEFAULT_GROUP_NAME,
        backend: Backend | None = None,
        timeout_s: float = 60.0,
        broadcast_timeout_s: float = DEFAULT_BROADCAST_TIMEOUT_S,
    ) -> Self:
        """Create a group of this process and the engines of ``clients``; returns when all have joined.

        One of that name left by an earlier trainer is destroyed. Raises an engine's error, or ``group_error``
        if late.

        Args:
            master_address: of this process for the engines; the rendezvous listens only there if it is this
                host's, else (behind NAT, for example) on all addresses.
            master_port: port of the rendezvous; 0 means any free port.
            backend: None means nccl if every engine and this process have CUDA devices, else gloo.
            timeout_s: maximum seconds for joining; ``broadcast_timeout_s`` for every broadcast later.
        """
        backend = _backend(clients, backend, timeout_s)
        rendezvous.leave(clients, group_name, timeout_s)
        ranks = rendezvous.ranks_of(clients, timeout_s)
        limit, broadcast_limit = timedelta(seconds=timeout_s), timedelta(seconds=broadcast_timeout_s)
        store, is_local = rendezvous.make_store(master_address, master_port, limit, 1 + sum(ranks))
        mark_present(store, group_name, backend)
        limits = timeout_s, broadcast_timeout_s
        tickets = rendezvous.invite(
            clients, master_address, store.port, group_name, backend, limits, ranks=ranks
        )
        member = Membership(group_name, f"{master_address}:{store.port}", 1 + sum(ranks), 0, backend)
        if backend == "nccl":
            limit = broadcast_limit
        listen = master_address if is_local else None
        joining = rendezvous.beside(
            partial(make_backend, member, keys_of(member, store)[1], limit, hostname=listen)
        )
        try:
            rendezvous.await_ranks([*tickets, joining], timeout_s)
        except (CaesuraError, RuntimeError) as error:
            rendezvous.leave(clients, group_name, timeout_s)
            if isinstance(error, CaesuraError):
                raise
            raise GroupError(f"this process could not join its group: {error}") from error
        group = cls(joining.result(), group_name=group_name, backend=backend, clients=clients)
        # Errors of engines that had no such group keep this frame until garbage is collected; with the
        # backend it would keep open the connections that the group's end closes.
        del joining
        store.set_timeout(broadcast_limit)  # NCCL's ranks meet in it at the first broadcast
        group.store, group._broadcast_timeout = store, broadcast_limit
        return group

    async def carry_out(
        self,
        sender: Sender,
        named_tensors: Sendable,
        options: dict[str, Any],
        *,
        bucket_bytes: int,
        load_format: LoadFormat = "flattened_bucket",
    ) -> Any:
        """Send one update; more than one bucket is a session, all or nothing, unless the options name one."""
        self._require_alive()
        options = with_base(named_tensors, options)
        tensors = [(name, tensor.detach()) for name, tensor in pairs(named_tensors)]
        parts = list(whole(tensors, bucket_size(bucket_bytes), lambda named: named[1].nbytes))
        return await in_one_session(
            sender, tensors, options, len(parts), lambda named: self._calls(sender, parts, named, load_format)
        )

    async def load_adapter(
        self, sender: Sender, request: wire.LoadAdapterReqInput, named_tensors: NamedTensors
    ) -> Any:
        """Broadcast the tensors of an adapter to the engines that ``request`` is sent to."""
        self._require_alive()
        tensors = [(name, tensor.detach()) for name, tensor in pairs(named_tensors)]
        request.specs, request.group_name = manifest(tensors), self.group_name
        return await self._call(sender, request, tensors, None)

    def update(
        self,
        named_tensors: Sendable,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        load_format: LoadFormat = "flattened_bucket",
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> list[wire.WeightUpdateReqOutput]:
        """Update all engines with one broadcast; return their replies in the order of ranks.

        If every client has begun a session, the update belongs to these. If one engine fails, its error is
        raised; the others may have committed, so compare their ``weights_epoch``.
        """
        clients, named = self.clients, update_fields(options)
        begun = bool(clients) and all(client.session_id is not None for client in clients)
        if begun:
            named["session_id"] = clients[0].session_id

        def start(common: wire.Request, expects: type[wire.Message], _: object) -> _Tickets:
            futures = []
            for client in clients:
                request = copy.copy(common)
                if begun and isinstance(request, wire.UpdateWeightsFromDistributedReqInput):
                    request.session_id = client.session_id
                futures.append(started(client, request, expects))
            return _Tickets(futures)

        def replies(tickets: _Tickets, request: wire.Request) -> list[Any]:
            return _replies(clients, tickets.futures, request, timeout)

        sender = Sender(start, at_once(replies), at_once(operator.call), timeout)
        found: list[wire.WeightUpdateReqOutput] = finished(
            self.carry_out(sender, named_tensors, named, bucket_bytes=bucket_bytes, load_format=load_format)
        )
        return found

    def close(self) -> None:
        """Leave the group, and have its engines leave. Idempotent."""
        clients, self.clients = self.clients, []
        rendezvous.leave(clients, self.group_name, rendezvous.GRACE_S)
        self._die("it was closed")
        self.store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, part: Sequence[Named], load_format: LoadFormat, answered: Callable[[], bool]) -> None:
        """Broadcast ``part`` until others' calls are ``answered``; GroupError if it failed."""
        if self._dead is None:
            self._send(part, load_format, answered)
        self._require_alive()

    async def _calls(
        self, sender: Sender, parts: list[list[Named]], options: dict[str, Any], load_format: LoadFormat
    ) -> Any:
        reply = None
        for part in parts:
            request = wire.UpdateWeightsFromDistributedReqInput(
                specs=manifest(part), group_name=self.group_name, load_format=load_format, **options
            )
            reply = await self._call(sender, request, part, load_format)
        return reply

    async def _call(
        self, sender: Sender, request: wire.ControlRequest, part: Sequence[Named], load_format: LoadFormat
    ) -> Any:
        ticket = sender.send(request)
        limit = math.inf if sender.timeout is None else time.monotonic() + sender.timeout

        def answered() -> bool:
            return ticket.done() or time.monotonic() > limit  # a message that was lost is never answered

        try:
            await sender.run(partial(self._send, part, load_format, answered))
            reply = await sender.wait(ticket, request)
        except BaseException as error:
            self._die(f"a call failed: {error!r}")
            raise
        self._require_alive()
        return reply

    def _send(self, part: Sequence[Named], load_format: LoadFormat, answered: Callable[[], bool]) -> None:
        try:
            for flat in self._flat(part, load_format):
                self._broadcast(flat, answered)
        except (RuntimeError, TimeoutError) as error:
            self._die(f"a broadcast failed: {error}")
        except BaseException:
            self._die("a broadcast was interrupted")
            raise

    def _flat(self, part: Sequence[Named], load_format: LoadFormat) -> Iterator[Tensor]:
        for batch in [part] if load_format is not None else [[named] for named in part]:
            total = sum(tensor.nbytes for _, tensor in batch)
            if self._buffer.numel() < total:
                self._buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
            end = 0
            for _, tensor in batch:
                start, end = end, end + tensor.nbytes
                self._buffer[start:end].copy_(flat_bytes(tensor))
            yield self._buffer[:total]

    def _broadcast(self, flat: Tensor, answered: Callable[[], bool]) -> None:
        work = self._group.broadcast([flat], broadcast_options(self._broadcast_timeout))
        wait_a_little = self._waits_for(work)
        given_up = float("inf")
        while not work.is_completed():
            now = time.monotonic()
            if answered():  # if well, the last bytes have arrived, and this end learns of it next
                given_up = min(given_up, now + 1)
            if now > given_up:
                raise TimeoutError("an engine answered, or its time was over, before it had everything")
            wait_a_little()
        work.wait()

    def _waits_for(self, work: Any) -> Callable[[], object]:
        if self._device == "cpu":
            # gloo says when: looking costs a trainer CPU, the more the longer engines take
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _: ended.set())
            return partial(ended.wait, _LOOK_S)
        began = time.monotonic()  # NCCL's future is done when the broadcast is enqueued
        return lambda: time.sleep(min(max(_POLL_S, (time.monotonic() - began) / _POLLS), _MAX_POLL_S))

    def _die(self, reason: str) -> None:
        """Close the connections, so that engines learn of it. The first reason stays."""
        self._dead = self._dead or reason
        holder, self._group = [self._group], None
        # Its end waits for a broadcast that nobody takes, if there is one. A process that ended in between
        # would abort.
        wait([rendezvous.beside(holder.clear)], _CLOSE_S)

    def _require_alive(self) -> None:
        if self._dead is not None:
            dead = f"weight update group {self.group_name!r} is dead ({self._dead})"
            raise GroupError(f"{dead}: close it and create it again", group_name=self.group_name)


def _backend(clients: "Sequence[ControlClient]", backend: Backend | None, timeout_s: float) -> Backend:
    if not isinstance(clients, Sequence):
        raise InvalidRequest(
            f"clients must be a list of clients, not a {type(clients).__name__}", field="clients"
        )
    if backend is not None and backend not in PREFIXES:
        raise must_be("backend", backend, one_of(sorted(PREFIXES)))
    backend = backend or rendezvous.common_backend(clients, timeout_s)
    if backend == "nccl" and not torch.cuda.is_available():
        raise Unsupported("the backend nccl needs a CUDA device")
    return backend


class _Tickets:
    def __init__(self, futures: list[Future[Any]]) -> None:
        self.futures = futures

    def done(self) -> bool:
        done = [future for future in self.futures if future.done()]
        return len(done) == len(self.futures) or any(future.exception() is not None for future in done)


def _replies(
    clients: "Sequence[ControlClient]",
    futures: list[Future[Any]],
    request: wire.Request,
    timeout: float | None,
) -> list[Any]:
    """Return every engine's reply, or, once all have answered, raise the first error.

    Refusals come first, but for those of a broken group, which follow from another engine's.
    """
    replies: list[Any] = []
    errors: list[EngineError] = []
    for client, future in zip(clients, futures, strict=True):
        try:
            replies.append(wait_for(future, request.id, timeout))
        except EngineError as error:
            error.add_note(f"engine at {client.endpoint}")
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: (not is_answer(error), isinstance(error, GroupError)))
    return replies


def whole(items: Iterable[ItemT], bucket_bytes: int, nbytes: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
    """Yield whole tensors in their order, as many as ``bucket_bytes`` hold and at least one."""
    part: list[ItemT] = []
    size = 0
    for item in items:
        if part and size + nbytes(item) > bucket_bytes:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes(item)
    if part:
        yield part
