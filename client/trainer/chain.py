"""Updates that engines pass on, one to the next: the sender, a trainer or an engine, sends once.

    sender --link 0--> engine 0 --link 1--> engine 1 --link 2--> …

Invariants:
- A link is a process group with its sender as rank 0. A failed update ends it: close the chain, create
  another.
- Engines load in two phases. One that fails costs itself and those behind it; those before it commit.
- A bucket is passed on while the next arrives: N engines take the time of one, and of N - 1 buckets more.
- An engine that sends its weights serves on. The rendezvous is this process's and carries no weights.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, Unpack

from ... import io_struct as wire
from ...io_struct import CaesuraError
from ...io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from ...transfer.process_group import Backend, mark_present
from ..connection.client_options import UpdateOptions, update_fields
from ..exceptions import InvalidRequest
from . import rendezvous
from .buckets import NamedTensors, bucket_size, manifest, pairs
from .two_phase import TwoPhaseUpdate, require_clients, sessionless_fields
from .update_group import WeightUpdateGroup, whole

if TYPE_CHECKING:
    from ..connection.blocking import ControlClient

CLONE_BROADCAST_TIMEOUT_S = 60.0
"""Seconds of one broadcast of a clone; shorter than a trainer's, since nothing is gathered meanwhile."""
Head = Callable[[Callable[[], bool]], str | None]
"""Broadcasts all tensors over link 0; returns the label or None. The argument tells if no more are taken."""


class WeightUpdateChain:
    """A trainer, and engines that pass on its updates: it sends each once, to any number of them."""

    def __init__(
        self, group: WeightUpdateGroup, clients: "Sequence[ControlClient]", links: list[str]
    ) -> None:
        self.clients = list(clients)
        """Clients of its engines, in the order in which they pass updates on."""
        self._group = group
        self._links = links

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
        """Join this process and the engines in a chain; arguments are :meth:`WeightUpdateGroup.create`'s."""
        require_clients(clients)
        links = [group_name, *(f"{group_name}/{number}" for number in range(1, len(clients)))]
        with_all = backend or rendezvous.common_backend(clients, timeout_s)
        group = WeightUpdateGroup.create(
            clients[:1],
            master_address=master_address,
            master_port=master_port,
            group_name=group_name,
            backend=with_all,
            timeout_s=timeout_s,
            broadcast_timeout_s=broadcast_timeout_s,
        )
        chain = cls(group, clients, links)
        limits = timeout_s, broadcast_timeout_s
        try:
            leave_links(clients, links[1:])  # those of an earlier trainer
            join_links(clients, links[1:], group.store, master_address, with_all, limits)
        except BaseException:
            chain.close()
            raise
        return chain

    def update(
        self,
        named_tensors: NamedTensors,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> list[wire.WeightUpdateReqOutput]:
        """Update all engines with a whole checkpoint; return their replies in the order of the chain.

        Raises:
            CaesuraError: an engine refused; nothing was written then.
            PartialUpdate: some engines have not got everything, because they or one before them failed.
        """
        fields = sessionless_fields(options)
        specs, counts, head = self._sending(named_tensors, bucket_bytes)
        return _update(self.clients, self._links, specs, counts, fields, head, timeout)

    def load(
        self,
        named_tensors: NamedTensors,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float | None = None,
        **options: Unpack[UpdateOptions],
    ) -> list[wire.WeightUpdateReqOutput | CaesuraError]:
        """Load a whole checkpoint into the session of the options, which every engine has open.

        Return each engine's reply, or its error, in the order of the chain. The caller ends the session.
        """
        fields = update_fields(options)
        session_id = fields.pop("session_id")
        specs, counts, head = self._sending(named_tensors, bucket_bytes)
        update = TwoPhaseUpdate(self.clients, specs, fields, timeout, session_id=session_id)
        first = update.start(_calls(self._links, specs, counts, fields))
        with contextlib.suppress(CaesuraError):  # the engines' answers tell who has everything
            head(first.done)
        replies = update.gather()
        return [replies.get(number) or update.errors[number] for number in range(len(self.clients))]

    def _sending(
        self, named_tensors: NamedTensors, bucket_bytes: int
    ) -> "tuple[list[wire.TensorSpec], list[int], Head]":
        """Return the tensors' specs, their numbers in each broadcast, and what broadcasts them."""
        tensors = [(name, tensor.detach()) for name, tensor in pairs(named_tensors)]
        parts = list(whole(tensors, bucket_size(bucket_bytes), lambda named: named[1].nbytes))
        if not parts:
            raise InvalidRequest("there are no tensors to send", field="named_tensors")

        def head(hopeless: Callable[[], bool]) -> None:
            for part in parts:
                self._group.send(part, "flattened_bucket", hopeless)

        return manifest(tensors), [len(part) for part in parts], head

    def close(self) -> None:
        """Leave the chain, and have its engines leave. Idempotent."""
        if self.clients:
            leave_links(self.clients, self._links[1:])
        self.clients = []
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def clone_weights(
    source: "ControlClient",
    targets: "Sequence[ControlClient]",
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    master_address: str = "127.0.0.1",
    master_port: int = 0,
    backend: Backend | None = None,
    timeout_s: float = 60.0,
    broadcast_timeout_s: float = CLONE_BROADCAST_TIMEOUT_S,
    timeout: float | None = None,
    **options: Unpack[UpdateOptions],
) -> list[wire.WeightUpdateReqOutput]:
    """Give the committed weights of ``source`` to ``targets``, and return their replies in order.

    All are engines of one model. A target gets the source's label, unless ``weight_version`` is another, and
    counts its own epochs. Errors are those of :meth:`WeightUpdateChain.update`.

    Args:
        bucket_bytes: maximum size of a broadcast of whole tensors; every engine has two in memory.
        master_address: address of this process for the engines; they connect to one another by their own.
        backend: None means nccl if every engine is on a CUDA device, else gloo.
        timeout_s: maximum seconds for joining; ``broadcast_timeout_s`` for each broadcast.
        timeout: maximum seconds of each wait for an engine's answer.
    """
    require_clients(targets)
    fields = sessionless_fields(options)
    component = fields.get("component")
    tensors = source.weights_manifest(component=component, timeout=timeout).tensors
    specs = [tensor.spec() for tensor in tensors]
    counts = [len(part) for part in whole(specs, bucket_size(bucket_bytes), attrgetter("nbytes"))]
    links = [f"clone-{wire.new_id()}" for _ in targets]
    engines = [source, *targets]
    with_all = backend or rendezvous.backend_of(engines, timeout_s)
    store, _ = rendezvous.make_store(master_address, master_port, timedelta(seconds=timeout_s))

    def head(_: Callable[[], bool]) -> str:
        return source.send_weights(
            specs, group_name=links[0], tensors_per_broadcast=counts, component=component, timeout=timeout
        ).weight_version

    try:
        join_links(engines, links, store, master_address, with_all, (timeout_s, broadcast_timeout_s))
        return _update(targets, links, specs, counts, fields, head, timeout)
    finally:
        leave_links(engines, links)


def join_links(
    engines: "Sequence[ControlClient]",
    links: Sequence[str],
    store: Any,
    address: str,
    backend: Backend,
    limits: tuple[float, float],
) -> None:
    """Join each engine with the next over ``links``; ``limits`` are seconds for joining and a broadcast."""
    tickets = []
    receivers = rendezvous.ranks_of(engines[1 : len(links) + 1], limits[0])
    for number, (link, ranks) in enumerate(zip(links, receivers, strict=True)):
        pair = engines[number : number + 2]
        mark_present(store, link, backend)
        # one rank of an engine sends, and all receive
        tickets += rendezvous.invite(
            pair, address, store.port, link, backend, limits, first_rank=0, ranks=[1, ranks]
        )
    rendezvous.await_ranks(tickets, limits[0])


def leave_links(engines: "Sequence[ControlClient]", links: Sequence[str]) -> None:
    for number, link in enumerate(links):
        rendezvous.leave(engines[number : number + 2], link, rendezvous.GRACE_S)


def _calls(
    links: Sequence[str], specs: list[wire.TensorSpec], counts: Sequence[int], options: dict[str, Any]
) -> list[wire.UpdateWeightsFromDistributedReqInput]:
    """Return each engine's call: engine ``i`` receives from ``links[i]``, and relays to the next one."""
    return [
        wire.UpdateWeightsFromDistributedReqInput(
            specs=specs,
            group_name=link,
            relay_to=next_link,
            load_format="flattened_bucket",
            tensors_per_broadcast=list(counts),
            **options,
        )
        for link, next_link in zip(links, [*links[1:], None], strict=True)
    ]


def _update(
    clients: "Sequence[ControlClient]",
    links: Sequence[str],
    specs: list[wire.TensorSpec],
    counts: Sequence[int],
    options: dict[str, Any],
    head: Head,
    timeout: float | None,
) -> list[wire.WeightUpdateReqOutput]:
    """Load ``specs`` into every engine, then commit. Engine ``i`` receives from ``links[i]``."""
    update = TwoPhaseUpdate(clients, specs, options, timeout)
    first = update.start(_calls(links, specs, counts, options))
    try:
        version = head(first.done)
    except CaesuraError as error:
        update.fail(error)
    except BaseException:
        update.abort()
        raise
    return update.commit(version)
