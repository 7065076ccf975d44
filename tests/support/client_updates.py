"""Updates of an engine by every method of a client."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from support.waiting import PATIENCE_S
from torch import Tensor

from caesura.client import ControlClient
from caesura.client.trainer import SharedTensors, WeightUpdateGroup
from caesura.io_struct import WeightUpdateReqOutput

TRANSPORTS = ("disk", "tensor", "ipc", "ipc, shared", "distributed")


def update_by(
    client: ControlClient,
    transport: str,
    tensors: Mapping[str, Tensor],
    folder: Path | None = None,
    group: WeightUpdateGroup | None = None,
    **options: object,
) -> WeightUpdateReqOutput:
    """Send ``tensors``, or load ``folder``, which has the same; without ``group`` in a new one."""
    options = {"timeout": PATIENCE_S, **options}
    if transport in ("disk", "ipc, shared"):
        options.pop("bucket_bytes", None)
    if transport == "disk":
        return client.update_weights_from_disk(folder, **options)
    if transport == "ipc, shared":
        with SharedTensors(tensors) as shared:
            return client.update_weights_from_ipc(shared, **options)
    if transport == "distributed":
        made = nullcontext(group) if group else WeightUpdateGroup.create([client], timeout_s=PATIENCE_S)
        with made as group:
            return client.update_weights_from_distributed(tensors, group=group, **options)
    return getattr(client, f"update_weights_from_{transport}")(tensors, **options)
