"""What a transport delivers: named tensors, in pieces; it never sees a model."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from .loader import DTYPES, NamedSpec, WeightPiece


class WeightSource(Protocol):
    """One call's tensors."""

    name: str
    """Of the transport: ``disk``, ``tensor``, ``ipc``."""
    total_bytes: int
    complete: bool
    """Every parameter must be among them."""

    @property
    def specs(self) -> Sequence[NamedSpec]:
        """All that will come, checked before the first piece is read."""
        ...

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Iterator[WeightPiece]:
        """The tensors, in pieces of about ``bucket_bytes``; ``skip(name)`` is asked once per tensor."""
        ...


class BufferSource:
    """Tensors that lie in memory: frames of a message, or shared memory."""

    complete = False

    def __init__(self, name: str, specs: list[TensorSpec], buffers: Sequence[memoryview]) -> None:
        """
        Raises:
            CaesuraError: ``invalid_request``, a spec does not fit its buffer.
        """
        self.name = name
        self.specs = specs
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self._buffers = buffers
        self._rows = [_rows(spec, buffers) for spec in specs]

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Iterator[WeightPiece]:
        """Views of the buffers, cut where a piece would be larger than ``bucket_bytes``."""
        for spec, num_rows in zip(self.specs, self._rows, strict=True):
            if skip(spec.name):
                continue
            yield from _cut(spec, num_rows, self._buffers[spec.buffer], bucket_bytes)


def _cut(spec: TensorSpec, num_rows: int, buffer: memoryview, bucket_bytes: int) -> Iterator[WeightPiece]:
    dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
    if spec.nbytes == 0:
        yield WeightPiece(spec.name, shape, dtype, spec.start_row, torch.empty(shape, dtype=dtype))
        return
    data = torch.frombuffer(buffer, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
    rows: Tensor = data.view(dtype).view((num_rows, *shape[1:]) if shape else ())
    step = max(1, bucket_bytes * num_rows // spec.nbytes)
    for start in range(0, num_rows, step):
        part = rows[start : start + step] if shape else rows
        yield WeightPiece(spec.name, shape, dtype, spec.start_row + start, part)


def _rows(spec: TensorSpec, buffers: Sequence[memoryview]) -> int:
    """Rows that this spec carries; 1 for a scalar."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise _bad(spec, f"has the unknown dtype {spec.dtype!r}")
    if spec.buffer >= len(buffers):
        raise _bad(spec, f"lies in buffer {spec.buffer} of {len(buffers)}")
    if spec.offset + spec.nbytes > len(buffers[spec.buffer]):
        size = len(buffers[spec.buffer])
        raise _bad(spec, f"ends at byte {spec.offset + spec.nbytes} of a buffer of {size}")
    if spec.offset % dtype.itemsize:
        raise _bad(spec, f"starts at byte {spec.offset}, which is not aligned to {spec.dtype}")
    row_bytes = prod(spec.shape[1:]) * dtype.itemsize
    total_rows = spec.shape[0] if spec.shape else 1
    num_rows = spec.nbytes // row_bytes if row_bytes else total_rows
    if (
        num_rows * row_bytes != spec.nbytes
        or spec.start_row + num_rows > total_rows
        or (num_rows == 0 < total_rows)
    ):
        raise _bad(spec, f"of shape {spec.shape} has {spec.nbytes} bytes from row {spec.start_row} on")
    return num_rows


def _bad(spec: TensorSpec, problem: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"tensor {spec.name!r} {problem}", field="specs", value=spec.name
    )
