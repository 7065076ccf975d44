"""One export of shared memory, read by all engines of a host.

Invariants: the trainer copies and sends nothing per engine but a message, which passes the handle; the engines read at the same
time, and commit when all of them have read (several.py). The memory must not change until then.
"""

from typing import TYPE_CHECKING, Unpack

import msgspec

from ...io_struct import UpdateWeightsFromIPCReqInput, WeightUpdateReqOutput
from ..connection.options import UpdateOptions, update_fields
from ..exceptions import InvalidRequest
from .several import TwoPhaseUpdate, require_clients
from .shared import SharedTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..connection.control_client import ControlClient


def update_from_shared(
    clients: "Sequence[ControlClient]",
    tensors: SharedTensors,
    *,
    timeout: float | None = None,
    **options: Unpack[UpdateOptions],
) -> list[WeightUpdateReqOutput]:
    """Update engines of this host from the memory of ``tensors``, all of the checkpoint's; their replies in order.

    ``timeout`` limits each wait for an engine's answer, in seconds; the options are those of every update.

    Raises:
        CaesuraError: what an engine refused; nothing was written then.
        PartialUpdate: some engines failed; the others have committed.
    """
    require_clients(clients)
    if not isinstance(tensors, SharedTensors):
        raise InvalidRequest(
            f"tensors must be SharedTensors, not a {type(tensors).__name__}: SharedTensors(named_tensors) makes them",
            field="tensors",
        )
    fields = update_fields(options)
    if fields.pop("session_id", None) is not None:
        raise InvalidRequest("an update of several engines opens sessions of its own", field="session_id")
    manifest = [msgspec.structs.replace(spec, offset=0) for spec in tensors.specs]
    update = TwoPhaseUpdate(clients, manifest, fields, timeout)
    update.start(
        [
            UpdateWeightsFromIPCReqInput(handle=tensors.memory.handle, specs=tensors.specs, **fields)
            for _ in clients
        ]
    )
    return update.commit()
