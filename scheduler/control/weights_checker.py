"""The weights checker: checksums of every parameter and derived tensor of every rank, and an action that
overwrites them all.

Reading yields between slices and never runs beside an update; overwritten weights are poisoned.
"""

import hashlib
from typing import TYPE_CHECKING

from ...io_struct import CaesuraError, ErrorCode, WeightsCheckerReqInput, WeightsCheckerReqOutput
from ..weights.reading import checksums, garbage
from .engine_state import Sender
from .operations import Operation, Wait, barrier, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def check_weights(engine: "Engine", request: WeightsCheckerReqInput, sender: Sender) -> Operation:
    """Compute checksums, or overwrite all weights, to prove that an update writes each of them."""
    engine.state.require_resident("weights")
    if request.action == "reset_tensors":
        # Before the first write: no step uses these weights.
        engine.updates.poison("reset by weights_checker")
        yield from barrier(engine)
        elsewhere = engine.executor.call("reset_tensors")
        for slot, start, rows in garbage(engine.model):
            with engine.runner.on_stream():
                slot.write(rows, start)
            yield Wait.SLICE
        engine.runner.synchronize()
        yield from waiting(elsewhere)
        return WeightsCheckerReqOutput(id=request.id)
    checked = engine.executor.call("checksums", reply=dict[str, str])
    found: dict[str, str] = yield from waiting(checksums(engine.model), Wait.SLICE)
    of_workers: list[dict[str, str]] = yield from waiting(checked)
    for rank, of_worker in enumerate(of_workers, 1):
        found |= {f"{name} of rank {rank}": checksum for name, checksum in of_worker.items()}
    total = hashlib.blake2b(
        "".join(found[name] for name in sorted(found)).encode(), digest_size=16
    ).hexdigest()
    if request.action == "snapshot":
        engine.checksums = found
    if request.action == "compare":
        if not engine.checksums:
            raise CaesuraError(ErrorCode.INVALID_REQUEST, "compare needs a snapshot first", field="action")
        changed = sorted(name for name in found if engine.checksums.get(name) != found[name])
        return WeightsCheckerReqOutput(id=request.id, total=total, changed=changed)
    return WeightsCheckerReqOutput(id=request.id, checksums=found, total=total)
