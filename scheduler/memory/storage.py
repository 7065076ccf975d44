"""Memory that can be given back and taken again, on each kind of device: what components are made of.

Memory is zero when it is allocated and when it is resumed; every view made of a tensor keeps working; nobody
touches a tensor between release and resume. Both yield between allocations.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...io_struct import MemoryTag
from .host import resident_bytes

_RELEASE_CHUNK = 256 << 20
"""Bytes given back between two yields: tens of milliseconds of unmapping."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; the caller keeps the tensor alive.

    By address: a tensor that was viewed by numpy once has a storage that can never be resized again.
    """
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Component(Protocol):
    """Tensors of one tag, which come and go together."""

    moves: bool
    """True if tensors may have other addresses after a resume."""

    @property
    def nbytes(self) -> int: ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor of zeros."""
        ...

    def occupied_bytes(self) -> int:
        """Return the bytes that the tensors take of what the allocator or the system says is in use."""
        ...

    def release(self) -> Iterator[None]:
        """Give the memory of all tensors back; their values are lost."""
        ...

    def resume(self) -> Iterator[None]:
        """Take it again, zeroed; RuntimeError if the allocator refused, when some tensors may have memory
        already.
        """
        ...


class MappedComponent:
    """CPU on Linux: each tensor in an anonymous private mapping of its own. Addresses stay.

    The kernel gives a zero page for each one that was never touched or was given back with MADV_DONTNEED, so
    resuming has nothing to do and costs memory only as the tensors are written. Weights ask for huge pages:
    they are released and filled several times faster, and read a little faster (docs/explanation/memory.md).
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        self.moves = False
        self._huge = tag == "weights"  # written whole; in a KV pool they would commit what nobody uses
        self.nbytes = 0
        self._maps: list[mmap.mmap] = []
        self._spans: list[tuple[int, int]] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._huge:
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(mapping)
        self.nbytes += nbytes
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


class StorageComponent:
    """Any device: torch storages resized to nothing and back. Addresses change, views follow their storage.

    What is released goes to torch's allocator, which returns it to the system when it is emptied.
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        self.moves = True
        self.nbytes = 0
        self._tensors: list[Tensor] = []
        self._sizes: list[int] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._tensors.append(tensor)
        self._sizes.append(tensor.untyped_storage().nbytes())
        self.nbytes += tensor.nbytes
        return tensor

    def occupied_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def release(self) -> Iterator[None]:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
            yield

    def resume(self) -> Iterator[None]:
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
            yield


class SavedComponent:
    """CUDA under torch-memory-saver (preload hook): physical memory unmapped and mapped again. Addresses
    stay.

    Its C library ends the process when it cannot map, hence the manager's check before. torch's own counters
    do not notice: they keep counting what is unmapped. What is mapped again is undefined, so it is zeroed.
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        self.moves = False
        self.nbytes = 0
        self._tag = f"caesura-{tag}"
        self._saver = import_module("torch_memory_saver").torch_memory_saver
        self._tensors: list[Tensor] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._saver.region(tag=self._tag, enable_cpu_backup=False):
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._tensors.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor

    def occupied_bytes(self) -> int:
        return self.nbytes

    def release(self) -> Iterator[None]:
        if self._tensors:
            self._saver.pause(self._tag)
        yield from ()

    def resume(self) -> Iterator[None]:
        if self._tensors:
            self._saver.resume(self._tag)
        for tensor in self._tensors:
            tensor.zero_()
            yield
