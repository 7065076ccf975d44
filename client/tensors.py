"""The trainer's half of a weight update: named torch tensors into buckets, over ZeroMQ or through shared memory.

The only module of the client that imports torch; a trainer has it anyway.

Invariants:
- A bucket holds at most ``bucket_bytes``, except for a single row that is larger; bigger tensors are cut between rows.
- Tensors are sent as they are, without a copy where they are contiguous and on the CPU, and must not change until the
  bucket's answer is there. One bucket is in flight at a time: its answer is the credit for the next.
- Shared memory has no name. It disappears with the last of its two owners, and cannot be exceeded: its pages are
  reserved when it is made, so a full /dev/shm is an error here and not a fault later.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..io_struct import (
    BeginWeightUpdateReqInput,
    CaesuraError,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    Reply,
    SharedMemoryHandle,
    TensorSpec,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from ..io_struct.weights import DEFAULT_BUCKET_BYTES

_ALIGNMENT = 64

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch dtype to its name on the wire, which is that of safetensors."""

NamedTensors = Iterable[tuple[str, Tensor]]
"""What ``model.state_dict().items()`` gives: checkpoint names and tensors."""


@dataclass(slots=True)
class Piece:
    """Some rows of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start_row: int
    rows: Tensor
    """Contiguous, on whatever device the tensor is."""


@dataclass(slots=True)
class Bucket:
    """Pieces that travel together."""

    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0
    """With the padding that shared memory puts between pieces."""


def manifest(named_tensors: NamedTensors) -> list[TensorSpec]:
    """Names, shapes and dtypes of all tensors, as ``begin_weight_update`` takes them."""
    return [
        TensorSpec(name=name, dtype=_dtype_name(name, t), shape=list(t.shape)) for name, t in named_tensors
    ]


def buckets(named_tensors: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Tensors in their order, packed into buckets."""
    bucket = Bucket()
    for name, tensor in named_tensors:
        _dtype_name(name, tensor)
        for piece in _cut(name, tensor.detach(), bucket_bytes):
            size = _padded(piece.rows.nbytes)
            if bucket.pieces and bucket.nbytes + size > bucket_bytes:
                yield bucket
                bucket = Bucket()
            bucket.pieces.append(piece)
            bucket.nbytes += size
    if bucket.pieces:
        yield bucket


def as_frames(bucket: Bucket) -> tuple[list[TensorSpec], list[memoryview]]:
    """One frame per piece, in place where it lies on the CPU."""
    frames = [_bytes_of(piece.rows) for piece in bucket.pieces]
    return [_spec(piece, buffer=number) for number, piece in enumerate(bucket.pieces)], frames


class SharedBucket:
    """Memory that the engine can map: a sealed memfd of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        """
        Raises:
            CaesuraError: ``out_of_memory``, shared memory is full.
        """
        self.nbytes = _padded(max(nbytes, 1))
        self._fd = os.memfd_create("caesura-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
            fcntl.fcntl(
                self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._map = mmap.mmap(self._fd, self.nbytes)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise CaesuraError(
                ErrorCode.OUT_OF_MEMORY,
                f"no {self.nbytes} bytes of shared memory: {error.strerror}",
                needed_bytes=self.nbytes,
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle = SharedMemoryHandle(
            pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, nbytes=self.nbytes
        )

    def fill(self, bucket: Bucket) -> list[TensorSpec]:
        """Copy the bucket's pieces in; what was there before is overwritten."""
        specs, offset = [], 0
        for piece in bucket.pieces:
            end = offset + piece.rows.nbytes
            self._bytes[offset:end].copy_(piece.rows.reshape(-1).view(torch.uint8))
            specs.append(_spec(piece, offset=offset))
            offset = _padded(end)
        return specs

    def close(self) -> None:
        """Let the memory go; the engine's own mapping ends with its session."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self._bytes
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class SharedBuckets:
    """The shared memory of one client: one bucket, kept between updates, replaced by a larger one when needed."""

    def __init__(self) -> None:
        self._bucket: SharedBucket | None = None

    def get(self, nbytes: int) -> SharedBucket:
        """At least ``nbytes``; raises as :class:`SharedBucket`."""
        if self._bucket is None or self._bucket.nbytes < nbytes:
            self.close()
            self._bucket = SharedBucket(nbytes)
        return self._bucket

    def close(self) -> None:
        """Let it go."""
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None


def _cut(name: str, tensor: Tensor, bucket_bytes: int) -> Iterator[Piece]:
    shape = tuple(tensor.shape)
    rows = shape[0] if shape else 1
    step = rows if tensor.nbytes <= bucket_bytes else max(1, bucket_bytes * rows // tensor.nbytes)
    for start in range(0, max(rows, 1), max(step, 1)):
        part = tensor.narrow(0, start, min(step, rows - start)) if shape else tensor
        yield Piece(name, tensor.dtype, shape, start, part.contiguous())


def _spec(piece: Piece, *, buffer: int = 0, offset: int = 0) -> TensorSpec:
    return TensorSpec(
        name=piece.name,
        dtype=DTYPE_NAMES[piece.dtype],
        shape=list(piece.shape),
        offset=offset,
        nbytes=piece.rows.nbytes,
        start_row=piece.start_row,
        buffer=buffer,
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.cpu().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _dtype_name(name: str, tensor: Tensor) -> str:
    found = DTYPE_NAMES.get(tensor.dtype)
    if found is None:
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST,
            f"tensor {name!r} has the dtype {tensor.dtype}, which cannot be sent",
            field=name,
        )
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


Step = tuple[ControlRequest, list[memoryview]]
"""A message to send, with its buffers."""

Steps = Generator[Step, Reply, WeightUpdateReqOutput]
"""Messages out, replies in, the final reply at the end: driven alike by the blocking and the asyncio client."""


def update_steps(
    named_tensors: NamedTensors,
    options: dict[str, Any],
    *,
    bucket_bytes: int,
    in_session: bool,
    shared: Callable[[int], SharedBucket] | None,
) -> Steps:
    """All messages of one update.

    More than one bucket makes a session of its own, unless one is open: the update is then all or nothing.

    Args:
        options: fields of ``WeightUpdateOptions``.
        shared: gives shared memory of a size, for the ipc path. None: frames.
    """
    tensors = list(named_tensors)
    parts = list(buckets(tensors, bucket_bytes))
    if not parts:
        raise CaesuraError(ErrorCode.INVALID_REQUEST, "there are no tensors to send", field="named_tensors")
    memory = shared(max(part.nbytes for part in parts)) if shared is not None else None
    if len(parts) == 1 or in_session:
        reply: Reply | None = None
        for part in parts:
            reply = yield _message(part, memory, options)
        assert isinstance(reply, WeightUpdateReqOutput)
        return reply
    yield BeginWeightUpdateReqInput(manifest=manifest(tensors)), []
    try:
        for part in parts:
            yield _message(part, memory, options)
    except Exception as error:
        try:
            yield EndWeightUpdateReqInput(commit=False), []
        except CaesuraError as second:
            error.add_note(f"aborting the session: {second}")
        raise
    final = yield EndWeightUpdateReqInput(weight_version=options.get("weight_version")), []
    assert isinstance(final, WeightUpdateReqOutput)
    return final


def _message(bucket: Bucket, memory: SharedBucket | None, options: dict[str, Any]) -> Step:
    if memory is None:
        specs, frames = as_frames(bucket)
        return UpdateWeightsFromTensorReqInput(specs=specs, **options), frames
    return UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=memory.fill(bucket), **options), []
