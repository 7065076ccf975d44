"""Memory by component: allocating it, giving it back to the system, taking it again.

Invariants:
- A component owns exactly what :func:`allocate` made inside ``manager.component(tag)``. Rotary tables, workspaces and
  whatever else a model builds meanwhile are allocated by torch as always, so no release can lose them.
- Memory is zero when it is allocated and when it is resumed. Every view that was made of a tensor keeps working.
- Nobody touches a component's tensors between its release and its resume; the manager keeps no account of which are
  released (``lifecycle.py`` does) and must not be asked twice.
- Releasing and resuming yield between allocations, so the loop can answer meanwhile.

Whether addresses survive depends on the device; what has captured them (a graph) must be captured again if they do not.
Nothing captures addresses yet; a graph runner must.
"""

import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Protocol, get_args

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, MemoryTag
from .memory import get_available_memory, refuse_defeating_settings

MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)

_RELEASE_CHUNK = 256 << 20
"""Bytes given back between two yields: tens of milliseconds of unmapping."""


class Component(Protocol):
    """What one tag stands for: some tensors that come and go together."""

    nbytes: int
    """Sum over the tensors."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One more tensor of zeros."""
        ...

    def release(self) -> Iterator[None]:
        """Give the memory of all tensors back; their values are lost."""
        ...

    def resume(self) -> Iterator[None]:
        """Take it again, zeroed.

        Raises:
            RuntimeError: the allocator refused; some tensors may have memory already.
        """
        ...


class MappedComponent:
    """CPU on Linux: each tensor in an anonymous private mapping of its own. Addresses stay.

    The kernel gives a zero page for each one that was never touched or was given back with MADV_DONTNEED
    (madvise(2)), so resuming has nothing to do and costs memory only as the tensors are written. Weights ask for huge
    pages: they are released and filled several times faster, and read a little faster (docs/memory.md).
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        self._huge = tag == "weights"  # written whole; in a KV pool they would commit what nobody uses
        self.nbytes = 0
        self._maps: list[mmap.mmap] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Page-aligned, untouched."""
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
        return torch.frombuffer(mapping, dtype=dtype, count=count).view(shape)

    def release(self) -> Iterator[None]:
        """The pages go at once; the address range stays reserved."""
        for mapping in self._maps:
            for start in range(0, len(mapping), _RELEASE_CHUNK):
                mapping.madvise(mmap.MADV_DONTNEED, start, min(_RELEASE_CHUNK, len(mapping) - start))
                yield

    def resume(self) -> Iterator[None]:
        """Nothing: pages come when they are written, as after a cold start."""
        yield from ()


class StorageComponent:
    """Any device: torch storages resized to nothing and back. Addresses change, views follow their storage."""

    def __init__(self, tag: MemoryTag | None) -> None:
        self.nbytes = 0
        self._tensors: list[Tensor] = []
        self._sizes: list[int] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A storage of its own."""
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._tensors.append(tensor)
        self._sizes.append(tensor.untyped_storage().nbytes())
        self.nbytes += tensor.nbytes
        return tensor

    def release(self) -> Iterator[None]:
        """Back to torch's allocator, which returns it to the system when it is emptied."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
            yield

    def resume(self) -> Iterator[None]:
        """Fresh blocks."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
            yield


class SavedComponent:
    """CUDA under torch-memory-saver (preload hook): physical memory unmapped and mapped again. Addresses stay.

    Its C library ends the process when it cannot map, hence the manager's check before. torch's own counters do not
    notice: ``memory_reserved`` keeps counting what is unmapped.
    """

    def __init__(self, tag: MemoryTag | None) -> None:
        self.nbytes = 0
        self._tag = f"caesura-{tag}"
        self._saver = import_module("torch_memory_saver").torch_memory_saver
        self._tensors: list[Tensor] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """In the saver's pool of this tag, without a copy on the host."""
        with self._saver.region(tag=self._tag, enable_cpu_backup=False):
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._tensors.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor

    def release(self) -> Iterator[None]:
        """All tensors in one call."""
        if self._tensors:
            self._saver.pause(self._tag)
        yield from ()

    def resume(self) -> Iterator[None]:
        """All in one call; what is mapped then is undefined, so it is zeroed."""
        if self._tensors:
            self._saver.resume(self._tag)
        for tensor in self._tensors:
            tensor.zero_()
            yield


MakeComponent = Callable[[MemoryTag | None], Component]

_ambient: ContextVar[Component | None] = ContextVar("_ambient", default=None)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros of the component being built, or of nobody outside one. On Linux's CPU untouched pages: they cost nothing yet."""
    device = torch.device(device)
    component = _ambient.get()
    if component is None:
        component = _plain(device)(None)
    return component.allocate(shape, dtype, device)


class ComponentResidencyManager:
    """The components of one engine, by tag. ``cuda_graph`` is empty: nothing captures graphs yet."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        make_component: MakeComponent | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """``make_component`` None: what suits ``device`` best.

        Raises:
            CaesuraError: ``invalid_request``, an allocator setting defeats the memory saver.
        """
        self._device = torch.device(device)
        if make_component is None:
            make_component = _plain(self._device)
            if self._device.type == "cuda" and _saver_is_active(environ):
                refuse_defeating_settings(self._device, memory_saver=True, environ=environ)
                make_component = SavedComponent
        self._components = {tag: make_component(tag) for tag in MEMORY_TAGS}

    @contextmanager
    def component(self, tag: MemoryTag) -> Iterator[None]:
        """What is built inside belongs to ``tag`` as far as it comes from :func:`allocate`."""
        token = _ambient.set(self._components[tag])
        try:
            yield
        finally:
            _ambient.reset(token)

    def nbytes(self, tag: MemoryTag) -> int:
        """Size of a component, released or not."""
        return self._components[tag].nbytes

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Give back the memory of ``tags``, which are resident; the device must be idle."""
        for tag in tags:
            yield from self._components[tag].release()

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Take back the memory of ``tags``, which are released: all or nothing.

        Raises:
            CaesuraError: ``out_of_memory`` with ``needed_bytes`` and ``free_bytes``; everything is as it was.
        """
        needed = sum(map(self.nbytes, tags))
        free = get_available_memory(self._device, empty_cache=True)
        if needed > free:
            raise _shortage(f"resuming {_names(tags)} needs {needed} bytes, {free} are free", needed, free)
        begun: list[MemoryTag] = []
        try:
            for tag in tags:
                begun.append(tag)
                yield from self._components[tag].resume()
        except RuntimeError as error:  # somebody else was faster than we
            for _ in self.release(begun):
                pass
            raise _shortage(f"resuming {_names(tags)} failed: {error}", needed, free) from error


def _plain(device: torch.device) -> MakeComponent:
    return MappedComponent if device.type == "cpu" and sys.platform == "linux" else StorageComponent


def _saver_is_active(environ: Mapping[str, str]) -> bool:
    return (
        "torch_memory_saver" in environ.get("LD_PRELOAD", "") and find_spec("torch_memory_saver") is not None
    )


def _names(tags: Collection[MemoryTag]) -> str:
    return ", ".join(sorted(tags))


def _shortage(message: str, needed: int, free: int) -> CaesuraError:
    return CaesuraError(ErrorCode.OUT_OF_MEMORY, message, needed_bytes=needed, free_bytes=free)
