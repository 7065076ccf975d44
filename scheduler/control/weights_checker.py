"""The weights checker: checksums of every parameter and derived tensor of every rank, and an action that overwrites them all.

Invariants: reading yields between slices and never runs beside an update; overwritten weights are poisoned, so they never
serve.
"""

import hashlib
from typing import TYPE_CHECKING

from ...io_struct import CaesuraError, ErrorCode, WeightsCheckerReqInput, WeightsCheckerReqOutput
from ..weights.checksums import checksums, garbage
from .idle import barrier
from .operations import Operation, Wait, waiting
from .pause_ownership import Sender

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def check_weights(engine: "Engine", request: WeightsCheckerReqInput, sender: Sender) -> Operation:
    """Compute checksums, or overwrite all weights so that a test can prove that an update writes every one of them."""
    engine.state.require_resident("weights")
    if request.action == "reset_tensors":
        engine.updates.poison(
            "reset by weights_checker"
        )  # before the first write: no step uses these weights
        yield from barrier(engine)
        elsewhere = engine.executor.reset_tensors()
        for slot, start, rows in garbage(engine.model):
            with engine.runner.on_stream():
                slot.write(rows, start)
            yield Wait.SLICE
        engine.runner.synchronize()
        yield from waiting(elsewhere)
        return WeightsCheckerReqOutput(id=request.id)
    reading = engine.executor.checksums()
    found: dict[str, str] = yield from waiting(checksums(engine.model), Wait.SLICE)
    of_others: dict[str, str] = yield from waiting(reading)
    found |= of_others
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
