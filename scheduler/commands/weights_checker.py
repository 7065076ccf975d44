"""The weights checker: checksums of every parameter and derived tensor, and an action that overwrites them all.

Invariants: reading yields between slices and never runs beside an update; overwritten weights are poisoned, so they never
serve.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from math import prod

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, WeightsCheckerReqInput, WeightsCheckerReqOutput
from ..layers.parameters import WeightSlot
from ..memory.storage import bytes_of
from ..models.base import Weights
from ..stepping import StepRunner
from .lifecycle import Lifecycle, Operation, Wait

_HASH_SLICE = 8 << 20
_RESET_ELEMENTS = 1 << 20


class WeightsChecker:
    """The handler of the checker's actions; keeps the checksums of one snapshot."""

    def __init__(
        self, *, model: Weights, runner: StepRunner, lifecycle: Lifecycle, poison: Callable[[str], None]
    ) -> None:
        self._model = model
        self._runner = runner
        self._lifecycle = lifecycle
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
            for slot in self._model.weight_slots().values():
                for start, rows in _garbage(slot):
                    with self._runner.on_stream():
                        slot.write(rows, start)
                    yield Wait.SLICE
            self._runner.synchronize()
            return WeightsCheckerReqOutput(id=request.id)
        found = yield from self._checksums()
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

    def _checksums(self) -> Generator[Wait, None, dict[str, str]]:
        """128-bit BLAKE2b of each parameter and derived tensor by name; yields between slices."""
        found: dict[str, str] = {}
        for name, tensor in self._model.named_storage():
            digest = hashlib.blake2b(digest_size=16)
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _HASH_SLICE):
                part = flat[start : start + _HASH_SLICE].cpu()
                digest.update(bytes_of(part))
                yield Wait.SLICE
            found[name] = digest.hexdigest()
        return found


def _garbage(slot: WeightSlot) -> Iterator[tuple[int, Tensor]]:
    """``(first row, rows)`` that overwrite all of ``slot`` with NaN, so that no output can look right by chance."""
    value = float("nan") if slot.dtype.is_floating_point else 0
    row_elements = max(prod(slot.shape[1:]), 1)
    total, step = (slot.shape[0] if slot.shape else 1), max(1, _RESET_ELEMENTS // row_elements)
    for start in range(0, total, step):
        shape = (min(step, total - start), *slot.shape[1:]) if slot.shape else ()
        yield start, torch.full(shape, value, dtype=slot.dtype)
