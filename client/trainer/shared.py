"""Memory that a trainer shares with an engine of the same host.

Invariants:
- Shared memory has no name and disappears when neither trainer nor engine uses it. Its pages are reserved when it is created,
  so a full /dev/shm is an error then and not a crash later.
- When it is closed or garbage collected its descriptor is closed, and the engine then unmaps it.
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, SharedMemoryHandle, TensorSpec
from ...io_struct.field_errors import nearest
from ..exceptions import InvalidRequest
from .buckets import Bucket, NamedTensors, Piece, manifest, padded, pairs, spec_of
from .cuda_ipc import CudaBucket


class SharedBucket:
    """Memory that the engine can map: a sealed memfd of ``nbytes`` bytes."""

    def __init__(self, nbytes: int) -> None:
        """
        Raises:
            CaesuraError: ``out_of_memory``, shared memory is full.
        """
        self.nbytes = padded(max(nbytes, 1))
        """Bytes of the memory: what was asked for, rounded up."""
        self._fd = os.memfd_create("caesura-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
            fcntl.fcntl(
                self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            mapping = mmap.mmap(self._fd, self.nbytes)
        except OSError as error:
            self._close_fd()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise CaesuraError(
                ErrorCode.OUT_OF_MEMORY,
                f"no {self.nbytes} bytes of shared memory: {error.strerror}",
                needed_bytes=self.nbytes,
            ) from error
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.handle = SharedMemoryHandle(
            pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino, nbytes=self.nbytes
        )
        """What an engine needs to open it."""

    def view(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes], in place."""
        return self._bytes[offset : offset + nbytes]

    def fill(self, bucket: Bucket, offset: int = 0) -> list[TensorSpec]:
        """Copy the pieces of the bucket to byte ``offset`` and after; earlier contents are overwritten."""
        specs = []
        for piece in bucket.pieces:
            end = offset + piece.rows.nbytes
            self._bytes[offset:end].copy_(piece.rows.reshape(-1).view(torch.uint8))
            specs.append(spec_of(piece, offset=offset))
            offset = padded(end)
        return specs

    def close(self) -> None:
        """Release the memory; the engine's own mapping ends with its session."""
        if self._close_fd.alive:
            self._close_fd()
            del self._bytes  # with the last view of it the mapping goes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class SharedTensors:
    """Named tensors in memory that is shared with engines: an ipc update passes them without copying on the trainer's side.

    Iterating yields (name, tensor) pairs, so every other transport takes them as well. Do not write to the tensors while an
    update runs: from its call until it returns, or, after ``TimedOut``, until the engine has answered.
    """

    def __init__(self, named_tensors: NamedTensors, *, dtype: torch.dtype | None = None) -> None:
        """Copies the values in, cast to ``dtype`` where given and the tensor is floating point.

        Raises:
            CaesuraError: ``invalid_request``, a dtype cannot be sent; ``out_of_memory``, shared memory is full.
        """
        tensors = {name: tensor.detach() for name, tensor in pairs(named_tensors)}
        dtypes = {
            name: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            for name, tensor in tensors.items()
        }
        manifest(
            (name, torch.empty(0, dtype=wanted)) for name, wanted in dtypes.items()
        )  # raises for a bad dtype
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
                raise InvalidRequest(
                    f"{name!r} is not among these {len(self._tensors)} tensors{self._nearest(name)}",
                    field=name,
                )
            own = self._tensors[name]
            if tensor.shape != own.shape:
                raise InvalidRequest(
                    f"{name!r} has the shape {list(tensor.shape)} and was made with {list(own.shape)}",
                    field=name,
                )
            own.copy_(tensor.detach())

    def _nearest(self, name: str) -> str:
        near = nearest(name, list(self._tensors))
        return "" if near is None else f" (did you mean {near!r}?)"

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

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class SharedBuckets:
    """The shared memory of one client: one bucket, kept between updates, replaced where another is needed.

    Each running update has a bucket of its own, so several threads or tasks can update at the same time.
    """

    def __init__(self) -> None:
        self._kept: SharedBucket | CudaBucket | None = None
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device | None = None) -> SharedBucket | CudaBucket:
        """At least ``nbytes``, on a CUDA device or (None) the host; raises as their classes do."""
        bucket = self._swap(None)
        if bucket is not None and bucket.nbytes >= nbytes and getattr(bucket, "device", None) == device:
            return bucket
        if bucket is not None:
            bucket.close()
        return SharedBucket(nbytes) if device is None else CudaBucket(nbytes, device)

    def give_back(self, bucket: SharedBucket | CudaBucket) -> None:
        """Keep the bucket for the next update. A bucket that the engine may still read is not given back but dropped."""
        other = self._swap(bucket)
        if other is not None:
            other.close()

    def close(self) -> None:
        """Release the bucket that is kept."""
        bucket = self._swap(None)
        if bucket is not None:
            bucket.close()

    def _swap(self, bucket: SharedBucket | CudaBucket | None) -> SharedBucket | CudaBucket | None:
        with self._lock:
            kept, self._kept = self._kept, bucket
        return kept
