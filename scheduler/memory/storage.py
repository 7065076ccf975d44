"""Memory that can be given back and taken again, on each kind of device: what components are made of.

Memory is zero when it is allocated and when it is resumed; every view made of a tensor keeps working; nobody
touches a tensor between release and resume. Both yield between allocations.
"""

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from math import prod

import torch
from torch import Tensor

from ...io_struct import MemoryTag
from . import moves
from .host import resident_bytes

_RELEASE_CHUNK = 256 << 20
"""Bytes given back between two yields: tens of milliseconds of unmapping."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a host tensor that the caller keeps alive: by address, as numpy bars resizing."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Component(ABC):
    def __init__(self, tag: MemoryTag | None) -> None:
        self.tag = tag
        self.tensors: list[Tensor] = []
        self.nbytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = self._zeros(shape, dtype, device)
        self.tensors.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor

    def occupied_bytes(self) -> int:
        return self.nbytes

    @abstractmethod
    def release(self) -> Iterator[None]:
        """Give the memory of all tensors back; their values are lost."""

    @abstractmethod
    def resume(self) -> Iterator[None]:
        """Take it again, zeroed. After a RuntimeError, some tensors may have memory already."""

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)


class MappedComponent(Component):
    """CPU on Linux: each tensor in an anonymous private mapping of its own. Addresses stay.

    Untouched pages, and those given back (MADV_DONTNEED), are zero: resuming does nothing. Huge pages release
    and fill weights several times faster (docs/explanation/memory.md).
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        super().__init__(tag)
        self._maps: list[mmap.mmap] = []
        self._spans: list[tuple[int, int]] = []

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.tag == "weights":  # written whole; in a KV pool huge pages would commit what nobody uses
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(mapping)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=count)
        self._spans.append((tensor.data_ptr(), nbytes))
        return tensor.view(shape)

    def occupied_bytes(self) -> int:
        return resident_bytes(self._spans)

    def release(self) -> Iterator[None]:
        for mapping in self._maps:
            for start in range(0, len(mapping), _RELEASE_CHUNK):
                mapping.madvise(mmap.MADV_DONTNEED, start, min(_RELEASE_CHUNK, len(mapping) - start))
                yield

    def resume(self) -> Iterator[None]:
        yield from ()


class StorageComponent(Component):
    """Any device: storages resized to nothing, by torch's allocator, and back. Addresses change."""

    def occupied_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def release(self) -> Iterator[None]:
        moves.count += 1
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
            yield

    def resume(self) -> Iterator[None]:
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
            yield


class SavedComponent(Component):
    """CUDA under torch-memory-saver (preload hook): physical memory unmapped and mapped; addresses stay.

    Its C library ends the process when it cannot map, hence the manager's check before. torch's counters keep
    counting what is unmapped. What is mapped again is undefined, so it is zeroed.
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        super().__init__(tag)
        self._saver = import_module("torch_memory_saver").torch_memory_saver

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._saver.region(tag=f"caesura-{self.tag}", enable_cpu_backup=False):
            return super()._zeros(shape, dtype, device)

    def release(self) -> Iterator[None]:
        if self.tensors:
            self._saver.pause(f"caesura-{self.tag}")
        yield from ()

    def resume(self) -> Iterator[None]:
        if self.tensors:
            self._saver.resume(f"caesura-{self.tag}")
        for tensor in self.tensors:
            tensor.zero_()
            yield
