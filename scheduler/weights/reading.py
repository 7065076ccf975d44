"""Reading a model's tensors as a checkpoint has them, some milliseconds at a time.

Invariants: bytes are those of storage, in checkpoint layout: whoever writes them has the same weights, derived tensors included.
Between two slices the loop may look elsewhere. What is packed is unpacked a few rows at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from ...io_struct import TensorSpec
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


def _row_ranges(slot: WeightSlot, nbytes: int) -> Iterator[tuple[int, int | None]]:
    """First row and end of the parts in which a tensor of ``nbytes`` is read."""
    if nbytes <= READ_BYTES or not slot.shape:
        yield 0, None
        return
    rows = slot.shape[0]
    step = max(1, READ_BYTES * rows // nbytes)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
