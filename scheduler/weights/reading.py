"""Reads a model's weights as they are stored, to send them, sum them up or search them.

- Bytes are those of storage, in checkpoint layout: whoever writes them has the same weights.
- Generators yield between slices. Weights are read a few rows at a time, so no second copy of a tensor
  exists.
- Each rank reads its part of a tensor that is divided among ranks; all parts together are the tensor.
"""

import hashlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from math import isfinite, prod
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ..layers.parameters import WeightSlot
from ..memory.storage import bytes_of
from ..models.causal_lm import Weights
from .coverage import num_rows
from .loader import WRITE_S
from .upload import OnStream

READ_BYTES = 1 << 20
"""Size of the slices in which a tensor is copied to be sent."""
NAMED = 3
_HASH_BYTES = 8 << 20
_SLICE_ELEMENTS = 1 << 20
_FP8 = torch.float8_e4m3fn
_FP8_MAGNITUDE = 0x7F
"""Bits of an FP8 value without its sign; all ones are NaN, and there are no infinities."""


def read_into(
    buffer: Tensor, specs: Sequence[TensorSpec], slots: Mapping[str, WeightSlot], on_stream: OnStream
) -> Iterator[None]:
    """Copy each tensor of ``specs``, whole, to its ``offset`` in ``buffer``, uint8; yields between slices."""
    began = perf_counter()
    for spec in specs:
        slot, end = slots[spec.name], spec.offset
        step = max(1, READ_BYTES * num_rows(slot.shape) // max(1, spec.nbytes))
        for start, stop in _row_ranges(slot, step):
            with on_stream():
                rows = slot.read(start, stop).contiguous().reshape(-1).view(torch.uint8)
                buffer[end : end + rows.numel()].copy_(rows)
            end += rows.numel()
            if perf_counter() - began > WRITE_S:
                yield
                began = perf_counter()


class Held(msgspec.Struct, array_like=True, frozen=True):
    """The part of a tensor that one of several ranks holds: some rows, and some columns of these."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None
    """First column and end; None means all of each row."""
    data: bytearray

    @classmethod
    def of(cls, slot: WeightSlot) -> "Held":
        """Read the part of this rank; the stream is current on which weights are written."""
        columns = slot.owned_columns
        part = slot.read().contiguous().reshape(-1).view(torch.uint8)
        rows = tuple((each.start, each.stop) for each in slot.owned)
        window = None if columns is None else (columns.start, columns.stop)
        return cls(rows, window, bytearray(part.cpu().numpy()))

    def place(self, buffer: Tensor, spec: TensorSpec) -> None:
        whole = buffer[spec.offset : spec.offset + spec.nbytes].view(spec.shape[0] if spec.shape else 1, -1)
        data = torch.frombuffer(self.data, dtype=torch.uint8) if len(self.data) else whole.new_empty(0)
        first, end = 0, whole.shape[1]
        if self.columns is not None:
            size = spec.nbytes // prod(spec.shape)
            first, end = (size * column for column in self.columns)
        lengths = [stop - start for start, stop in self.rows]
        parts = data.view(sum(lengths), end - first).split(lengths)
        for (start, stop), part in zip(self.rows, parts, strict=True):
            whole[start:stop, first:end].copy_(part)


def is_divided(slot: WeightSlot) -> bool:
    return slot.owned_columns is not None or sum(map(len, slot.owned)) != num_rows(slot.shape)


def require_placeable(slots: Iterator[WeightSlot]) -> None:
    for slot in slots:
        columns = slot.owned_columns
        width = prod(slot.shape[1:]) if columns is None else len(columns)
        first = slot.owned[0]
        if slot.shape and first and slot.read(first.start, first.start + 1).numel() != width:
            reason = (
                f"several ranks cannot send {slot.name}: each holds columns that are interleaved with others"
            )
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, name=slot.name)


def checksums(model: Weights) -> Generator[None, None, dict[str, str]]:
    """Return the 128-bit BLAKE2b of each parameter and derived tensor by name; yields between slices."""
    found: dict[str, str] = {}
    for name, tensor in model.named_storage():
        digest = hashlib.blake2b(digest_size=16)
        for part in tensor.detach().reshape(-1).view(torch.uint8).split(_HASH_BYTES):
            digest.update(bytes_of(part.cpu()))
            yield
        found[name] = digest.hexdigest()
    return found


def garbage(model: Weights) -> Iterator[tuple[WeightSlot, int, Tensor]]:
    """Yield ``(slot, first row, rows)`` of NaN (0 for integers) that overwrite all weights of a model."""
    for slot in model.weight_slots().values():
        value = float("nan") if slot.dtype.is_floating_point else 0
        for start, stop in _row_ranges(slot, _slice_rows(slot)):
            shape = (stop - start, *slot.shape[1:]) if slot.shape else ()
            yield slot, start, torch.full(shape, value, dtype=slot.dtype)


@dataclass(frozen=True, slots=True)
class NonFinite:
    name: str
    """Checkpoint name; the engine's for a derived tensor."""
    count: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.count} of {self.total})"


def find_non_finite(model: Weights, names: Collection[str]) -> Generator[None, None, list[NonFinite]]:
    """Return the stored tensors among ``names``, and the derived ones, with values that are not finite."""
    found = []
    for name, total, slices in _stored(model, names):
        count = 0
        for values in slices:
            count += count_non_finite(values)
            yield
        if count:
            found.append(NonFinite(name, count, total))
    return found


def require_finite(
    model: Weights, names: Collection[str], on_stream: OnStream
) -> Generator[None, None, None]:
    """Raise ``weights_not_finite`` if :func:`find_non_finite` finds anything; yields between slices."""
    search = find_non_finite(model, names)
    while True:
        with on_stream():
            try:
                next(search)
            except StopIteration as end:
                found: list[NonFinite] = end.value
                break
        yield
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


def _stored(model: Weights, names: Collection[str]) -> Iterator[tuple[str, int, Iterator[Tensor]]]:
    """Yield name, number of values and slices of each tensor among ``names``, and of each derived one."""
    for name, slot in model.weight_slots().items():
        if name in names:
            yield name, prod(slot.shape), starmap(slot.read, _row_ranges(slot, _slice_rows(slot)))
    for name, tensor in model.derived():
        yield name, tensor.numel(), iter(tensor.reshape(-1).split(_SLICE_ELEMENTS))


def _slice_rows(slot: WeightSlot) -> int:
    return max(1, _SLICE_ELEMENTS // max(prod(slot.shape[1:]), 1))


def _row_ranges(slot: WeightSlot, step: int) -> Iterator[tuple[int, int]]:
    rows = num_rows(slot.shape)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
