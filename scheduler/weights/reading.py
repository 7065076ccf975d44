"""Reading a model's tensors as a checkpoint has them, some milliseconds at a time.

Invariants: bytes are those of storage, in checkpoint layout: whoever writes them has the same weights, derived tensors included.
Between two slices the loop may look elsewhere. What is packed is unpacked a few rows at a time. Of a tensor that is divided among
ranks each reads its part, and whoever has all parts has the tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ..layers.parameters import WeightSlot
from .write_stream import OnStream
from .writing import WRITE_S

READ_BYTES = 1 << 20
"""Rows that are read at once."""


def read_into(
    buffer: Tensor, specs: Sequence[TensorSpec], slots: Mapping[str, WeightSlot], on_stream: OnStream
) -> Iterator[None]:
    """Copy each tensor of ``specs``, whole, to its ``offset`` in ``buffer``, uint8 on any device; yields between slices.

    ``on_stream`` makes the stream current on which weights are written.
    """
    began = perf_counter()
    for spec in specs:
        slot, end = slots[spec.name], spec.offset
        for start, stop in _row_ranges(slot, spec.nbytes):
            with on_stream():
                rows = slot.read(start, stop).contiguous().reshape(-1).view(torch.uint8)
                buffer[end : end + rows.numel()].copy_(rows)
            end += rows.numel()
            if perf_counter() - began > WRITE_S:
                yield
                began = perf_counter()


class Held(msgspec.Struct, array_like=True, frozen=True):
    """What one of several ranks holds of a tensor: the bytes of ``rows`` and, of these, of ``columns``, first and end."""

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None
    """None: all of each row."""
    data: bytearray

    @classmethod
    def of(cls, slot: WeightSlot) -> "Held":
        """Read it; the stream is current on which weights are written."""
        columns = slot.owned_columns
        part = slot.read().contiguous().reshape(-1).view(torch.uint8)
        rows = tuple((each.start, each.stop) for each in slot.owned)
        window = None if columns is None else (columns.start, columns.stop)
        return cls(rows, window, bytearray(part.cpu().numpy()))

    def place(self, buffer: Tensor, spec: TensorSpec) -> None:
        """Where it belongs in the tensor of ``spec``, which lies at its ``offset`` in ``buffer``, uint8 on any device."""
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
    """Whether this rank holds less than all of it."""
    return slot.owned_columns is not None or sum(map(len, slot.owned)) != (slot.shape[0] if slot.shape else 1)


def require_placeable(slots: Iterator[WeightSlot]) -> None:
    """Refuse what ranks hold in other parts than :class:`Held` can tell.

    Raises:
        CaesuraError: ``unsupported``, with the first such tensor.
    """
    for slot in slots:
        columns = slot.owned_columns
        width = prod(slot.shape[1:]) if columns is None else len(columns)
        first = slot.owned[0]
        if slot.shape and first and slot.read(first.start, first.start + 1).numel() != width:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED,
                f"several ranks cannot send {slot.name}: each holds columns of it by turns, in other places than its checkpoint",
                name=slot.name,
            )


def _row_ranges(slot: WeightSlot, nbytes: int) -> Iterator[tuple[int, int | None]]:
    """First row and end of the parts in which a tensor of ``nbytes`` is read."""
    if nbytes <= READ_BYTES or not slot.shape:
        yield 0, None
        return
    rows = slot.shape[0]
    step = max(1, READ_BYTES * rows // nbytes)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
