"""The weights checker: checksums of every parameter and derived tensor of every rank, and an action that overwrites them all.

Invariants: reading yields between slices and never runs beside an update; overwritten weights are poisoned, so they never
serve.
"""

import hashlib
from collections.abc import Callable

from ...io_struct import CaesuraError, ErrorCode, WeightsCheckerReqInput, WeightsCheckerReqOutput
from ..executor.executor import Executor
from ..models.base import Weights
from ..scheduling.stepping import StepRunner
from ..weights.reading import checksums, garbage
from .lifecycle import Lifecycle, Operation, Wait, waiting


class WeightsChecker:
    """The handler of the checker's actions; keeps the checksums of one snapshot."""

    def __init__(
        self,
        *,
        model: Weights,
        runner: StepRunner,
        lifecycle: Lifecycle,
        executor: Executor,
        poison: Callable[[str], None],
    ) -> None:
        self._model = model
        self._runner = runner
        self._lifecycle = lifecycle
        self._executor = executor
        self._poison = poison
        self._snapshot: dict[str, str] = {}

    def check(self, request: WeightsCheckerReqInput) -> Operation:
        """Compute checksums, or overwrite all weights so that a test can prove that an update writes every one of them."""
        self._lifecycle.require_resident("weights")
        if request.action == "reset_tensors":
            self._poison(
                "reset by weights_checker"
            )  # before the first write, so that no step uses these weights
            yield from self._lifecycle.barrier()
            elsewhere = self._executor.call("reset_tensors")
            for slot, start, rows in garbage(self._model):
                with self._runner.on_stream():
                    slot.write(rows, start)
                yield Wait.SLICE
            self._runner.synchronize()
            yield from waiting(elsewhere)
            return WeightsCheckerReqOutput(id=request.id)
        checked = self._executor.call("checksums", reply=dict[str, str])
        found: dict[str, str] = yield from waiting(checksums(self._model), Wait.SLICE)
        of_workers: list[dict[str, str]] = yield from waiting(checked)
        for rank, of_worker in enumerate(of_workers, 1):
            found |= {f"{name} of rank {rank}": checksum for name, checksum in of_worker.items()}
        total = hashlib.blake2b(
            "".join(found[name] for name in sorted(found)).encode(), digest_size=16
        ).hexdigest()
        if request.action == "snapshot":
            self._snapshot = found
        if request.action == "compare":
            if not self._snapshot:
                raise CaesuraError(
                    ErrorCode.INVALID_REQUEST, "compare needs a snapshot first", field="action"
                )
            changed = sorted(name for name in found if self._snapshot.get(name) != found[name])
            return WeightsCheckerReqOutput(id=request.id, total=total, changed=changed)
        return WeightsCheckerReqOutput(id=request.id, checksums=found, total=total)
