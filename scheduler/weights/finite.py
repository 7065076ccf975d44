"""Finds values that are not finite among a model's weights, as they are stored.

Invariants:
- Weights are read a slice at a time and in place where the storage allows it, so that the caller can let others in between
  and no second copy of a tensor exists.
- What is stored is what counts: a value that was finite when it was sent and overflowed in a cast is found.
"""

from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from math import isfinite, prod

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..layers.parameters import WeightSlot
from ..models.base import Weights

NAMED = 3
"""Tensors with values that are not finite which an error names."""
_SLICE_ELEMENTS = 1 << 20
_FP8 = torch.float8_e4m3fn
_FP8_MAGNITUDE = 0x7F
"""Without the sign; all ones are its NaN, and it has no infinities."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A tensor with values that are not finite."""

    name: str
    """Checkpoint name; the engine's for a derived tensor."""
    count: int
    """Number of these values."""
    total: int
    """Number of all values."""

    def __str__(self) -> str:
        return f"{self.name} ({self.count} of {self.total})"


def find_non_finite(model: Weights, names: Collection[str]) -> Generator[None, None, list[NonFinite]]:
    """The tensors among ``names`` with values that are not finite, and the derived ones; yields between slices."""
    found = []
    for name, total, slices in _tensors(model, names):
        count = 0
        for values in slices:
            count += count_non_finite(values)
            yield
        if count:
            found.append(NonFinite(name, count, total))
    return found


def require_finite(found: list[NonFinite]) -> None:
    """Refuse weights of which :func:`find_non_finite` has ``found`` some.

    Raises:
        CaesuraError: ``weights_not_finite``.
    """
    if not found:
        return
    named = ", ".join(map(str, found[:NAMED]))
    more = f", and {len(found) - NAMED} more tensors" if len(found) > NAMED else ""
    raise CaesuraError(
        ErrorCode.WEIGHTS_NOT_FINITE,
        f"these tensors have values that are NaN or infinite: {named}{more}",
        tensors=len(found),
        non_finite=[{"name": each.name, "count": each.count, "total": each.total} for each in found[:NAMED]],
    )


def count_non_finite(values: Tensor) -> int:
    """Number of values that are NaN or infinite; 0 for integers."""
    if not values.numel() or not values.dtype.is_floating_point:
        return 0
    if values.dtype == _FP8:
        magnitudes = values.view(torch.uint8) & _FP8_MAGNITUDE
        if int(magnitudes.amax()) < _FP8_MAGNITUDE:
            return 0
        return int((magnitudes == _FP8_MAGNITUDE).sum())
    low, high = torch.aminmax(values)  # NaN if any value is: twenty times as fast as torch.isfinite
    if isfinite(low.item()) and isfinite(high.item()):
        return 0
    return int((~torch.isfinite(values)).sum())


def _tensors(model: Weights, names: Collection[str]) -> Iterator[tuple[str, int, Iterator[Tensor]]]:
    """Name, number of values, and slices of each tensor to look at."""
    for name, slot in model.weight_slots().items():
        if name in names:
            yield name, prod(slot.shape), _slices(slot)
    for name, tensor in model.derived():
        yield name, tensor.numel(), iter(tensor.reshape(-1).split(_SLICE_ELEMENTS))


def _slices(slot: WeightSlot) -> Iterator[Tensor]:
    rows = slot.shape[0] if slot.shape else 1
    step = max(1, _SLICE_ELEMENTS // max(prod(slot.shape[1:]), 1))
    return (slot.read(start, min(start + step, rows)) for start in range(0, rows, step))
