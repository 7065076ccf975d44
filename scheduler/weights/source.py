"""What a transport delivers: named tensors, in pieces; it never sees a model.

Frames of a message are the simplest: they are read where libzmq put them (8-byte aligned, enough for every dtype), never
unpickled, and let go when the call has been answered. Of the messages of one update the sender has two under way, half a
bucket each at most, so one bucket per sender is in memory.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...io_struct import CaesuraError, CudaIPCHandle, ErrorCode, SharedMemoryHandle, TensorSpec
from ..runtime.dtypes import DTYPES
from .pieces import NamedSpec, WeightPiece


class WeightSource(Protocol):
    """One call's tensors."""

    name: str
    """Of the transport: ``disk``, ``tensor``, ``ipc``, ``checkpoint_engine``, ``distributed``."""
    total_bytes: int
    complete: bool
    """Every parameter must be among them."""

    @property
    def specs(self) -> Sequence[NamedSpec]:
        """All that will come, checked before the first piece is read."""
        ...

    def pieces(
        self, bucket_bytes: int, skip: Callable[[str], bool]
    ) -> Generator[WeightPiece | None, None, None]:
        """The tensors, in pieces of about ``bucket_bytes``; ``skip(name)`` is asked once per tensor.

        None: nothing has come yet; ask again when a thread has woken the loop. A piece is valid until the next is asked for.
        Closed when the update fails in between.
        """
        ...


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Where a buffer lies for other processes."""

    handle: SharedMemoryHandle | CudaIPCHandle
    start: int
    """First byte in the memory of ``handle``."""
    nbytes: int


class BufferSource:
    """Tensors that lie in memory: frames of a message, or shared memory."""

    complete = False

    def __init__(
        self,
        name: str,
        specs: list[TensorSpec],
        buffers: Sequence[memoryview | Tensor],
        memory: SharedMemory | None = None,
    ) -> None:
        """
        Args:
            buffers: bytes, on the host or as uint8 [n] on a device.
            memory: where the one buffer lies for other ranks of the engine. None: only this process has the buffers.

        Raises:
            CaesuraError: ``invalid_request``, a spec does not fit its buffer.
        """
        self.name = name
        self.specs = specs
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self.buffers = buffers
        self.memory = memory
        for spec in specs:
            _require_fitting(spec, buffers)

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Generator[WeightPiece, None, None]:
        """Views of the buffers, cut where a piece would be larger than ``bucket_bytes``."""
        for spec in self.specs:
            if skip(spec.name):
                continue
            buffer = self.buffers[spec.buffer]
            if isinstance(buffer, Tensor) or not 0 < spec.nbytes <= bucket_bytes:
                yield from cut(spec, _bytes(buffer, spec.offset, spec.nbytes), bucket_bytes)
                continue
            dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
            rows = torch.frombuffer(
                buffer, dtype=dtype, count=spec.nbytes // dtype.itemsize, offset=spec.offset
            )
            if len(shape) != 1:
                rows = rows.view((-1, *shape[1:]) if shape else ())
            yield WeightPiece(spec.name, shape, dtype, spec.start_row, rows)


def _bytes(buffer: memoryview | Tensor, offset: int, nbytes: int) -> Tensor:
    if isinstance(buffer, Tensor):
        return buffer[offset : offset + nbytes]
    if not nbytes:  # frombuffer takes no empty ones
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset)


def cut(spec: TensorSpec, data: Tensor, bucket_bytes: int) -> Iterator[WeightPiece]:
    """The rows of ``spec`` that ``data`` holds, in pieces of about ``bucket_bytes``.

    Args:
        data: uint8 [spec.nbytes], a whole number of rows. A piece that its dtype cannot view where it lies is a copy.
    """
    dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if not data.numel():
        yield WeightPiece(spec.name, shape, dtype, spec.start_row, torch.empty(shape, dtype=dtype))
        return
    step = max(1, bucket_bytes // row_bytes)
    for start in range(0, data.numel() // row_bytes, step):
        part = data[start * row_bytes : (start + step) * row_bytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        rows = part.view(dtype).view((-1, *shape[1:]) if shape else ())
        yield WeightPiece(spec.name, shape, dtype, spec.start_row + start, rows)


def _require_fitting(spec: TensorSpec, buffers: Sequence[memoryview | Tensor]) -> None:
    """Raise unless the spec lies in its buffer and is a whole number of rows."""
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


def _bad(spec: TensorSpec, problem: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"tensor {spec.name!r} {problem}", field="specs", value=spec.name
    )
