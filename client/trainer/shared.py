"""Memory that a trainer shares with an engine of the same host, on the host or on one CUDA device.

Invariants:
- A bucket is exported once and used for many updates; an engine opens it once per session.
- When it is closed or garbage collected, an engine unmaps it (host memory) or has closed it with its session
  (device memory); the engine's replies say when the memory may be written again.
- Data is complete when it is announced: filling device memory waits for earlier work and for its own copies.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from ...io_struct import CaesuraError, CudaIPCHandle, ErrorCode, SharedMemoryHandle, TensorSpec
from ...io_struct.field_errors import nearest
from ...transfer import cuda_ipc, shared_memory
from ..exceptions import InvalidRequest
from .buckets import Bucket, NamedTensors, Piece, manifest, padded, pairs, spec_of

SMALL_BYTES = 1 << 20
"""Bytes up to which a piece is copied without torch, whose calls take longer than the copy of most."""


def common_cuda_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the CUDA device that has all of ``tensors``, or None."""
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


class SharedBucket:
    """Memory that an engine of the same host can open."""

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        """Allocate memory on a CUDA device, or on the host if ``device`` is None."""
        self.nbytes = padded(max(nbytes, 1))
        """Bytes, rounded up."""
        self.device = device
        """The CUDA device that has the memory; None if the host has it."""
        self.handle = self._host_memory() if device is None else self._device_memory(device)
        """Everything that an engine needs to open the memory."""

    def _host_memory(self) -> SharedMemoryHandle:
        handle, mapping = shared_memory.create(self.nbytes)
        self._close: weakref.finalize[..., Any] = weakref.finalize(self, os.close, handle.fd)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        return handle

    def _device_memory(self, device: torch.device) -> CudaIPCHandle:
        try:
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            reason = f"no {self.nbytes} bytes on {device}"
            raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=self.nbytes) from error
        handle = cuda_ipc.export(self._bytes)
        self._close = weakref.finalize(self, torch.cuda.ipc_collect)
        self._close.atexit = False  # the process ends anyway, and CUDA may be gone by then
        return handle

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Return uint8 [nbytes], in place."""
        return self._bytes[offset : offset + nbytes]

    def fill(self, bucket: Bucket, offset: int = 0) -> list[TensorSpec]:
        """Copy the pieces of the bucket to byte ``offset`` and after; return where they are."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)  # the pieces may be in the making on any stream
        specs, address = [], self._bytes.data_ptr()
        for piece in bucket.pieces:
            rows, nbytes = piece.rows, piece.rows.nbytes
            # 0: a subclass that wraps others, or a tensor of zeros without memory
            source = rows.data_ptr() if self.device is None and nbytes <= SMALL_BYTES else 0
            if source and rows.device.type == "cpu":
                ctypes.memmove(address + offset, source, nbytes)
            else:
                self.view(offset, nbytes).copy_(rows.reshape(-1).view(torch.uint8))
            specs.append(spec_of(piece, offset=offset))
            offset = padded(offset + nbytes)
        if self.device is not None:
            torch.cuda.current_stream(self.device).synchronize()
        return specs

    def close(self) -> None:
        """Release the memory; no update that uses device memory may be running. Idempotent."""
        if self._close.alive:
            del self._bytes  # the memory is freed with the last view of it
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SharedTensors:
    """Named tensors in memory that is shared with engines; an ipc update passes them without copying.

    Do not write to them until an update returns, or after ``TimedOut`` until the engine has answered.
    """

    def __init__(self, named_tensors: NamedTensors, *, dtype: torch.dtype | None = None) -> None:
        """Copy the values in, floating-point ones as ``dtype`` if given; raises if one cannot be sent."""
        tensors = {name: tensor.detach() for name, tensor in pairs(named_tensors)}
        dtypes = {
            name: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            for name, tensor in tensors.items()
        }
        # raises for a bad dtype
        manifest((name, torch.empty(0, dtype=cast)) for name, cast in dtypes.items())
        sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items()}
        self.memory = SharedBucket(sum(padded(size) for size in sizes.values()))
        """The memory of all tensors."""
        self._tensors: dict[str, Tensor] = {}
        self.specs: list[TensorSpec] = []
        """The place of each tensor in the memory, as an ipc update sends it."""
        offset = 0
        for name, tensor in tensors.items():
            view = self.memory.view(offset, sizes[name]).view(dtypes[name]).view(tensor.shape)
            self._tensors[name] = view
            self.specs.append(spec_of(Piece(name, view.dtype, tuple(view.shape), 0, view), offset=offset))
            offset += padded(sizes[name])
        self.copy_from(tensors.items())

    def copy_from(self, named_tensors: NamedTensors) -> None:
        """Overwrite the values, casting where dtypes differ; names must be known."""
        for name, tensor in pairs(named_tensors):
            if name not in self._tensors:
                near = nearest(name, list(self._tensors))
                hint = "" if near is None else f" (did you mean {near!r}?)"
                reason = f"{name!r} is not among these {len(self._tensors)} tensors{hint}"
                raise InvalidRequest(reason, field=name)
            own = self._tensors[name]
            if tensor.shape != own.shape:
                reason = f"{name!r} has the shape {list(tensor.shape)} and was made with {list(own.shape)}"
                raise InvalidRequest(reason, field=name)
            own.copy_(tensor.detach())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Release the memory; tensors that are still referenced keep it."""
        self._tensors.clear()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SharedBuckets:
    """Shared memory of one client: a bucket is kept between updates; each running update has its own."""

    def __init__(self) -> None:
        self._kept: SharedBucket | None = None
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device | None = None) -> SharedBucket:
        """Return a bucket of at least ``nbytes`` on ``device``."""
        bucket = self._swap(None)
        if bucket is not None and bucket.nbytes >= nbytes and bucket.device == device:
            return bucket
        if bucket is not None:
            bucket.close()
        return SharedBucket(nbytes, device)

    def give_back(self, bucket: SharedBucket) -> None:
        """Keep the bucket for the next update; one that an engine may still read is dropped instead."""
        other = self._swap(bucket)
        if other is not None:
            other.close()

    def close(self) -> None:
        """Release the bucket that is kept."""
        bucket = self._swap(None)
        if bucket is not None:
            bucket.close()

    def _swap(self, bucket: SharedBucket | None) -> SharedBucket | None:
        with self._lock:
            kept, self._kept = self._kept, bucket
        return kept
