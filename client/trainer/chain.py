"""Updates that engines pass on, one to the next, so that the first sender sends once however many engines there are.

    sender --link 0--> engine 0 --link 1--> engine 1 --link 2--> …        a link: a process group, the sender its rank 0

Invariants:
- Engines load in two phases (several.py). One that fails costs itself and those behind it, never those before it: these commit.
- A bucket is passed on while the next one arrives: N engines take the time of one, and of N - 1 further buckets.
- Links belong to one chain. An engine's end closes when an update over it fails, so that neither neighbour waits for the other:
  close the chain then, and create one of the engines that live.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ...io_struct import CaesuraError, TensorSpec, UpdateWeightsFromDistributedReqInput, WeightUpdateReqOutput
from ...io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from ...transfer.process_group import Backend, mark_present
from ..connection.options import UpdateOptions, update_fields
from ..exceptions import InvalidRequest
from .buckets import NamedTensors, bucket_size, manifest, pairs
from .group import WeightUpdateGroup, whole
from .rendezvous import GRACE_S, await_ranks, common_backend, invite, leave, ranks_of
from .several import TwoPhaseUpdate, require_clients

if TYPE_CHECKING:
    from ..connection.control_client import ControlClient

Hopeless = Callable[[], bool]
"""Whether the first engine of the chain has answered, so that it takes no further broadcast."""
Head = Callable[[Hopeless], str | None]
"""Broadcasts all tensors over link 0; returns the label that the update is committed with, None: unchanged."""


def update_chain(
    clients: "Sequence[ControlClient]",
    links: Sequence[str],
    specs: list[TensorSpec],
    counts: Sequence[int],
    options: dict[str, Any],
    head: Head,
    timeout: float | None,
) -> list[WeightUpdateReqOutput]:
    """Load ``specs`` into every engine, then commit; the commits' replies in the order of the chain.

    Args:
        links: per client, the name of the group that it receives from; it is rank 0 of the next one's.
        counts: tensors in each broadcast.
        options: fields of ``WeightUpdateOptions``; a label there takes the place of the head's.
        timeout: limits each wait for an answer, in seconds.

    Raises:
        CaesuraError: what an engine or the head refused.
        PartialUpdate: some engines have not got everything.
    """
    update = TwoPhaseUpdate(clients, specs, options, timeout)
    behind = [*links[1:], None]
    update.start(
        [
            UpdateWeightsFromDistributedReqInput(
                specs=specs,
                group_name=link,
                relay_to=next_link,
                load_format="flattened_bucket",
                tensors_per_broadcast=list(counts),
                **options,
            )
            for link, next_link in zip(links, behind, strict=True)
        ]
    )
    try:
        version = head(update.tickets[0].done)
    except CaesuraError as error:
        update.fail(error)
    except BaseException:
        update.abort()
        raise
    return update.commit(version)


class WeightUpdateChain:
    """A trainer, and engines that pass on what it sends: it sends each update once, over one link, to any number of them."""

    def __init__(
        self, group: WeightUpdateGroup, clients: "Sequence[ControlClient]", links: list[str]
    ) -> None:
        """As :meth:`create` makes it."""
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
        """Join this process with the first engine, and each engine with the next; returns when all have joined.

        The arguments, and what is raised, are those of :meth:`WeightUpdateGroup.create`. Put engines of one host next to one
        another: each link is one connection.
        """
        require_clients(clients)
        links = [group_name, *(f"{group_name}/{number}" for number in range(1, len(clients)))]
        with_all = backend or common_backend(clients, timeout_s)
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
        try:
            chain._leave_links()  # those of an earlier trainer
            join_links(
                clients, links[1:], group.store, master_address, with_all, (timeout_s, broadcast_timeout_s)
            )
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
    ) -> list[WeightUpdateReqOutput]:
        """Update all engines; returns their replies in the order of the chain.

        ``named_tensors`` are all tensors of the checkpoint; other arguments are those of
        ``ControlClient.update_weights_from_distributed``. The engines commit when each of them has everything.

        Raises:
            CaesuraError: what an engine refused; nothing was written then.
            PartialUpdate: some engines have not got everything, because they or one before them failed.
        """
        fields = update_fields(options)
        if fields.pop("session_id", None) is not None:
            raise InvalidRequest("a chain opens sessions of its own", field="session_id")
        tensors = [(name, tensor.detach()) for name, tensor in pairs(named_tensors)]
        parts = list(whole(tensors, bucket_size(bucket_bytes)))
        if not parts:
            raise InvalidRequest("there are no tensors to send", field="named_tensors")
        counts = [len(part) for part in parts]

        def head(hopeless: Hopeless) -> None:
            for part in parts:
                self._group.send(part, "flattened_bucket", hopeless)

        return update_chain(self.clients, self._links, manifest(tensors), counts, fields, head, timeout)

    def close(self) -> None:
        """Leave the chain, and have its engines leave. Idempotent."""
        self._leave_links()
        self.clients = []
        self._group.close()

    def _leave_links(self) -> None:
        for number, link in enumerate(self._links[1:] if self.clients else ()):
            leave(self.clients[number : number + 2], link, GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def join_links(
    engines: "Sequence[ControlClient]",
    links: Sequence[str],
    store: Any,
    address: str,
    backend: Backend,
    limits: tuple[float, float],
) -> None:
    """Join each of ``engines`` with the next, as ``links`` are called, in ``store`` of this process at ``address``.

    ``limits``: seconds for joining, and for each broadcast.

    Raises:
        CaesuraError: the error of an engine; ``group_error`` if one did not join in time.
    """
    tickets = []
    receivers = ranks_of(engines[1 : len(links) + 1], limits[0])
    for number, (link, ranks) in enumerate(zip(links, receivers, strict=True)):
        pair = engines[number : number + 2]
        mark_present(store, link, backend)
        tickets += invite(
            pair, address, store.port, link, backend, limits, first_rank=0, ranks=[1, ranks]
        )  # one rank of an engine sends, and all receive
    await_ranks(tickets, limits[0])
