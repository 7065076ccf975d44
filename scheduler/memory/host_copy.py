"""The values of tensors in host memory while their device memory is given back: written once, read back,
changed in place.

On the CPU "the device" is anonymous memory, and the values lie in an unlinked file below ``TMPDIR``: the
kernel can write it back and drop it, so ``RssAnon`` really falls. On accelerators they lie in pinned host
memory. Only the copying runs beside the current stream, never the taking or dropping of memory.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import accumulate

import torch
from torch import Tensor

from .device_module import StreamModule
from .storage import bytes_of

_ALIGN = 64
"""Alignment of each tensor in a file, in bytes, as in torch's own allocations."""
_CHUNK = 4 << 20
"""Bytes copied between two yields: a millisecond from memory, tens of them from a disk."""


class FileCopy:
    """An unlinked file for host tensors, read ahead by a thread; OSError if full or unreadable."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._file, path = tempfile.mkstemp(prefix="caesura-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self._coming: Future[None] | None = None
        self._like: list[tuple[torch.Size, torch.dtype]] = []
        self._values: list[Tensor] | None = None

    def save(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        self._like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        for part, offset in _chunks(tensors):
            done = 0
            while done < len(part):
                done += os.pwrite(self._file, part[done:], offset + done)
            yield

    def load(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        for part, offset in _chunks(tensors):
            done = 0
            while done < len(part):
                count = os.preadv(self._file, [part[done:]], offset + done)
                if count == 0:
                    raise OSError(f"the saved copy ends at byte {offset + done}")
                done += count
            yield

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        self._coming = self._executor.submit(exhaust, self.load(tensors))

    def wait(self) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.result()

    def values(self) -> Sequence[Tensor]:
        if self._values is None:
            self._values = list(_mapped(self._file, self._like))
        return self._values

    def write(self, number: int, start: int, rows: Tensor) -> None:
        """Write by a call, not through the mapping: a file system that is full would end the process then."""
        rows = rows.cpu().contiguous()
        offset = _offsets(self._like)[number] + start * rows.itemsize
        data, done = bytes_of(rows), 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], offset + done)


class PinnedCopy:
    """Host memory, pinned where there are streams, and a stream beside the one that computes."""

    def __init__(self, streams: StreamModule | None, side: torch.Stream | None, *, pin: bool) -> None:
        """``side`` is the stream of the copies. Without streams both are None, and copies are synchronous."""
        self._module, self._side, self._pin = streams, side, pin
        self._host: list[Tensor] = []
        self._arrived: torch.Event | None = None

    def save(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        for tensor in tensors:
            self._host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin))
            self._host[-1].copy_(tensor)
            yield

    def load(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        self.prefetch(tensors)
        while self._arrived is not None and not self._arrived.query():
            yield
        self.wait()

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        if self._module is None or self._side is None:
            self._copy(tensors)
            return
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            self._copy(tensors)
            self._arrived = self._side.record_event()

    def wait(self) -> None:
        if self._module is not None and self._arrived is not None:
            self._module.current_stream().wait_event(self._arrived)
            self._arrived = None

    def values(self) -> Sequence[Tensor]:
        return self._host

    def write(self, number: int, start: int, rows: Tensor) -> None:
        """Wait first until no copy reads the memory: a stream was told to wait, the host was not."""
        if self._side is not None:
            self._side.synchronize()
        self._host[number].view(-1).narrow(0, start, rows.numel()).copy_(rows.reshape(-1))

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for tensor, host in zip(tensors, self._host, strict=True):
            tensor.copy_(host, non_blocking=self._pin)


HostCopy = FileCopy | PinnedCopy
"""Place for values: ``save`` copies them here, ``load`` back; ``prefetch`` begins, seen after ``wait``.
``values``, on the host, stay current. ``write`` overwrites elements with rows, while nothing is on its
way."""


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of ``tensors`` piece by piece, with each one's offset in a file of all of them."""
    offsets = _offsets([(tensor.shape, tensor.dtype) for tensor in tensors])
    for tensor, offset in zip(tensors, offsets, strict=True):
        data = bytes_of(tensor)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK], offset + start


def _offsets(like: Sequence[tuple[torch.Size, torch.dtype]]) -> list[int]:
    sizes = (shape.numel() * dtype.itemsize for shape, dtype in like)
    return [0, *accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)][: len(like)]


def _mapped(file: int, like: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    size = os.fstat(file).st_size
    mapping = mmap.mmap(file, size) if size else b""
    for (shape, dtype), offset in zip(like, _offsets(like), strict=True):
        if shape.numel():
            yield torch.frombuffer(mapping, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        else:
            yield torch.empty(shape, dtype=dtype)


def exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
