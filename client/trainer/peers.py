"""Weights from one engine to others, without a trainer: for replicas that joined late, or whose weights were lost.

Invariants:
- The source serves on. It sends once, to the first target, and each target passes on what it receives (chain.py).
- A target ends with the source's bytes and label, or as it was, or poisoned; the error says which targets are not valid.
- The rendezvous is this process's, and carries no weights; groups of its own name are left when this returns.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Unpack

from ...io_struct import SendWeightsReqInput, SendWeightsReqOutput, WeightUpdateReqOutput, new_id
from ...io_struct.weights import DEFAULT_BUCKET_BYTES
from ...transfer.process_group import Backend
from ..connection.channel import wait_for
from ..connection.options import UpdateOptions, update_fields
from ..exceptions import InvalidRequest
from .buckets import bucket_size
from .chain import Head, Hopeless, join_links, update_chain
from .rendezvous import GRACE_S, backend_of, leave, make_store
from .several import require_clients, started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...io_struct import TensorSpec
    from ..connection.control_client import ControlClient

CLONE_BROADCAST_TIMEOUT_S = 60.0
"""For one bucket: nothing is gathered meanwhile, as it may be in a trainer's update."""


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
) -> list[WeightUpdateReqOutput]:
    """Give the committed weights of ``source`` to ``targets``, engines of the same model; their replies in order.

    Each target has the source's label afterwards, unless ``weight_version`` is another; epochs are each engine's own. The
    options are those of every update: by default a running target retracts its requests and flushes its prefix cache.

    Args:
        bucket_bytes: whole tensors are broadcast in buckets of at most that size, at least one in each; source and targets have
            two of them in memory.
        master_address: address of this process for the engines; they connect to one another by their own addresses.
        backend: None means nccl if every engine is on a CUDA device, else gloo.
        timeout_s: maximum seconds for joining.
        broadcast_timeout_s: maximum seconds for each broadcast, after which a hanging engine is given up.
        timeout: maximum seconds of each wait for an engine's answer.

    Raises:
        CaesuraError: what an engine refused; nothing has changed then. By name, for the source: ``weights_poisoned``,
            ``weights_invalid``, ``memory_released``, ``session_open`` (an update has written and not committed).
        PartialUpdate: some targets have not got everything, because they or one before them failed.
    """
    require_clients(targets)
    fields = update_fields(options)
    if fields.pop("session_id", None) is not None:
        raise InvalidRequest("a clone opens sessions of its own", field="session_id")
    component = fields.get("component")
    manifest = source.weights_manifest(component=component, timeout=timeout)
    specs = [tensor.spec() for tensor in manifest.tensors]
    counts = tensors_per_bucket(specs, bucket_size(bucket_bytes))
    links = [f"clone-{new_id()}" for _ in targets]
    engines = [source, *targets]
    with_all = backend or backend_of(engines, timeout_s)
    store, _ = make_store(master_address, master_port, timedelta(seconds=timeout_s))
    try:
        join_links(engines, links, store, master_address, with_all, (timeout_s, broadcast_timeout_s))
        sending = SendWeightsReqInput(
            specs=specs,
            group_name=links[0],
            load_format="flattened_bucket",
            tensors_per_broadcast=counts,
            component=component,
        )
        head = _sent_by(source, sending, timeout)
        return update_chain(targets, links, specs, counts, fields, head, timeout)
    finally:
        for number, link in enumerate(links):
            leave(engines[number : number + 2], link, GRACE_S)


def _sent_by(source: "ControlClient", request: SendWeightsReqInput, timeout: float | None) -> Head:
    """The chain's first sender: ``source``, whose label its targets get."""

    def head(_: Hopeless) -> str:
        ticket = started(source, request, SendWeightsReqOutput)
        sent: SendWeightsReqOutput = wait_for(ticket, request.id, timeout)
        return sent.weight_version

    return head


def tensors_per_bucket(specs: "Sequence[TensorSpec]", bucket_bytes: int) -> list[int]:
    """How many tensors, in their order, each bucket holds: as many as fit into ``bucket_bytes``, at least one."""
    counts: list[int] = []
    size = 0
    for spec in specs:
        if not counts or size + spec.nbytes > bucket_bytes:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += spec.nbytes
    return counts
