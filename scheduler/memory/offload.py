"""Large components that come and go: what their memory is divided into, where the values lie meanwhile, and when they move.

Invariants:
- A movable component holds constants. Its values are saved once, when it first leaves the device; afterwards leaving only
  drops what the device holds. Scratch memory (``preserve=False``) is never saved and comes back as zeros.
- A part is on the device as a whole, or not at all: when its way there or back is interrupted, it is not.
- Tensors keep their identity, and every view made of them keeps working; addresses stay or change as the storage behind
  them says (``storage.py``).
- What uses a part runs on the stream that is current in :meth:`Part.ready`, and memory is taken and dropped on that
  stream, too, so that the allocator may reuse it in the stream's order. Only the copying runs beside it.

On the CPU "the device" is anonymous memory, and the values of what is not there lie in an unlinked file below ``TMPDIR``:
the kernel can write it back and drop it, so ``RssAnon`` really falls. On accelerators they lie in pinned host memory.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .device_module import DeviceEvent, DeviceStream, StreamModule
from .storage import Component, bytes_of

_CHUNK = 4 << 20
"""Bytes copied between two yields: a millisecond from memory, tens of them where the copy must be read from a disk."""


class HostCopy(Protocol):
    """The values of a part while it is not on the device."""

    def save(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Keep the values of ``tensors``; yields in between."""
        ...

    def load(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Copy them back; on the device, and known to be there, when it ends."""
        ...

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy them back, beside whatever comes next."""
        ...

    def wait(self) -> None:
        """What comes next sees the values that :meth:`prefetch` brings."""
        ...


class FileCopy:
    """For tensors in host memory: an unlinked file, read by a thread where that is asked for ahead of time."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._file, path = tempfile.mkstemp(prefix="caesura-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self._coming: Future[None] | None = None

    def save(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Raises OSError where the file system is full."""
        for part, offset in _chunks(tensors):
            done = 0
            while done < len(part):
                done += os.pwrite(self._file, part[done:], offset + done)
            yield

    def load(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Read by the caller."""
        for part, offset in _chunks(tensors):
            done = 0
            while done < len(part):
                count = os.preadv(self._file, [part[done:]], offset + done)
                if count == 0:
                    raise OSError(f"the saved copy ends at byte {offset + done}")
                done += count
            yield

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        """Read by the thread, which does not hold the interpreter meanwhile."""
        self._coming = self._executor.submit(_exhaust, self.load(tensors))

    def wait(self) -> None:
        """Until the thread has done it; raises what it raised."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.result()


class PinnedCopy:
    """For accelerators: host memory, pinned where there are streams, and a stream beside the one that computes."""

    def __init__(self, streams: StreamModule | None, side: DeviceStream | None, *, pin: bool) -> None:
        """``side`` is the stream of the copies. None, both of them: the device has no streams, copies are synchronous."""
        self._module, self._side, self._pin = streams, side, pin
        self._host: list[Tensor] = []
        self._arrived: DeviceEvent | None = None

    def save(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """In the order of the current stream, and done when it ends."""
        for tensor in tensors:
            self._host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin))
            self._host[-1].copy_(tensor)
            yield

    def load(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Yields until the device has them."""
        self.prefetch(tensors)
        while self._arrived is not None and not self._arrived.query():
            yield
        self.wait()

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        """Behind what the current stream has been given: it may still use the memory that is written here."""
        if self._module is None or self._side is None:
            self._copy(tensors)
            return
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            self._copy(tensors)
            self._arrived = self._side.record_event()

    def wait(self) -> None:
        """By the current stream, not by the host."""
        if self._module is not None and self._arrived is not None:
            self._module.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _copy(self, tensors: Sequence[Tensor]) -> None:
        for tensor, host in zip(tensors, self._host, strict=True):
            tensor.copy_(host, non_blocking=self._pin)


class Part:
    """Some tensors of a component that come and go together; on the device at first."""

    def __init__(
        self, pieces: Sequence[tuple[Tensor, Component]], make_copy: Callable[[], HostCopy] | None
    ) -> None:
        """
        Args:
            pieces: tensors, each with the storage that holds nothing else.
            make_copy: where the values go. None: they may be lost.
        """
        self.tensors = [tensor for tensor, _ in pieces]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.on_device = True
        self._storages = [storage for _, storage in pieces]
        self._make_copy = make_copy
        self._copy: HostCopy | None = None
        self._coming = False

    def bring(self) -> Iterator[None]:
        """Onto the device, unless it is there or on its way.

        Raises:
            RuntimeError: the allocator refused; OSError: the copy cannot be read. The part is not on the device then.
        """
        if self.on_device:
            return
        try:
            for storage in self._storages:
                yield from storage.resume()
            if self._copy is not None:
                yield from self._copy.load(self.tensors)
        except BaseException:
            self._give_back()
            raise
        self.on_device = True

    def prefetch(self) -> None:
        """Begin to bring it; :meth:`ready` completes that. Raises as :meth:`bring`."""
        if self.on_device:
            return
        try:
            for storage in self._storages:
                _exhaust(storage.resume())
            if self._copy is not None:
                self._copy.prefetch(self.tensors)
        except BaseException:
            self._give_back()
            raise
        self.on_device = self._coming = True

    def ready(self) -> None:
        """What the current stream is given next sees the values. Raises as :meth:`bring`."""
        if not self._coming:
            return
        self._coming = False
        try:
            if self._copy is not None:
                self._copy.wait()
        except BaseException:
            self._give_back()
            raise

    def drop(self) -> Iterator[None]:
        """Off the device; saved first where that has not been done."""
        if not self.on_device:
            return
        self.ready()
        if self._copy is None and self._make_copy is not None:
            copy = self._make_copy()
            yield from copy.save(self.tensors)
            self._copy = copy
        self.on_device = False
        try:
            for storage in self._storages:
                yield from storage.release()
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        self.on_device = False
        for storage in self._storages:
            _exhaust(storage.release())


class Movable:
    """One component whose memory comes and goes: a single part, until it is divided."""

    def __init__(
        self,
        name: str,
        strategy: "Strategy",
        make_storage: Callable[[], Component],
        make_copy: Callable[[], HostCopy],
    ) -> None:
        self.name, self.strategy = name, strategy
        self.memory_intensive = False
        """Of its last use."""
        self.waited_s = 0.0
        """By the host, for layers that were not there in time; since it was last reset."""
        self._make_storage = make_storage
        self._make_copy = make_copy if strategy.preserve else None
        self._pieces: list[tuple[Tensor, Component]] = []
        self._parts: list[Part] | None = None

    @property
    def parts(self) -> list[Part]:
        """First what is in no layer, then the layers; nothing is allocated any more once this was asked."""
        if self._parts is None:
            self.divide([])
        assert self._parts is not None
        return self._parts

    @property
    def nbytes(self) -> int:
        """On the device or not."""
        return sum(tensor.nbytes for tensor, _ in self._pieces)

    @property
    def device_bytes(self) -> int:
        """What is on the device, or on its way."""
        if self._parts is None:
            return self.nbytes
        return sum(part.nbytes for part in self._parts if part.on_device)

    def occupied_bytes(self) -> int:
        """What it really takes now: pages that were never written take nothing."""
        return sum(storage.occupied_bytes() for _, storage in self._pieces)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One more tensor of zeros, in storage of its own."""
        assert self._parts is None, f"{self.name} is divided already"
        storage = self._make_storage()
        tensor = storage.allocate(shape, dtype, device)
        self._pieces.append((tensor, storage))
        return tensor

    def divide(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Which tensors make up which layer, in the order of use; those in none belong to all."""
        where = {
            tensor.untyped_storage().data_ptr(): number
            for number, layer in enumerate(layers, start=1)
            for tensor in layer
        }
        pieces: list[list[tuple[Tensor, Component]]] = [[] for _ in range(len(layers) + 1)]
        for tensor, storage in self._pieces:
            pieces[where.get(tensor.untyped_storage().data_ptr(), 0)].append((tensor, storage))
        self._parts = [Part(some, self._make_copy) for some in pieces]

    def drop(self) -> Iterator[None]:
        """All of it off the device."""
        for part in self.parts:
            yield from part.drop()


class Strategy(Protocol):
    """When a component is on the device."""

    @property
    def kind(self) -> str:
        """For traces."""
        ...

    @property
    def preserve(self) -> bool:
        """Its values must survive while it is away."""
        ...

    @property
    def keep_after_use(self) -> bool:
        """What a use has brought stays until the request ends."""
        ...

    @property
    def keep_on_warm_up(self) -> bool:
        """It stays when a request that was a warm-up ends."""
        ...

    def peak_bytes(self, component: Movable) -> int:
        """On the device at the same time, at most."""
        ...

    def arrive(self, component: Movable) -> Iterator[None]:
        """Bring what must be on the device when a use begins."""
        ...

    def at_layer(self, component: Movable, layer: int) -> None:
        """Layer ``layer`` is computed next; the layers before it have been given to the current stream."""
        ...

    def leave(self, component: Movable) -> Iterator[None]:
        """Drop what need not stay on the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentStrategy:
    """On the device, always; away only while its memory is released by tag."""

    preserve: bool = True
    keep_after_use: bool = True
    keep_on_warm_up: bool = True
    kind: ClassVar[str] = "resident"

    def peak_bytes(self, component: Movable) -> int:
        """All of it."""
        return component.nbytes

    def arrive(self, component: Movable) -> Iterator[None]:
        """Nothing to do, but after a release."""
        for part in component.parts:
            yield from part.bring()

    def at_layer(self, component: Movable, layer: int) -> None:
        """Everything is there."""

    def leave(self, component: Movable) -> Iterator[None]:
        """Everything stays."""
        yield from ()


RESIDENT = ResidentStrategy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentOffloadStrategy:
    """As a whole: on the device for a use, on the host otherwise."""

    preserve: bool = True
    keep_after_use: bool = True
    keep_on_warm_up: bool = False
    kind: ClassVar[str] = "offload"

    def peak_bytes(self, component: Movable) -> int:
        """All of it."""
        return component.nbytes

    def arrive(self, component: Movable) -> Iterator[None]:
        """Everything."""
        for part in component.parts:
            yield from part.bring()

    def at_layer(self, component: Movable, layer: int) -> None:
        """Everything is there."""

    def leave(self, component: Movable) -> Iterator[None]:
        """Everything."""
        yield from component.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseOffloadStrategy:
    """``window`` consecutive layers on the device, the later ones on their way while the first is computed.

    The window goes round: after the last layer comes the first one, of the next pass. A component that is not divided into
    layers (:meth:`Movable.divide`) moves as a whole.
    """

    window: int = 2
    preserve: bool = True
    keep_after_use: bool = True
    keep_on_warm_up: bool = False
    kind: ClassVar[str] = "layerwise"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window = {self.window}: at least one layer must be on the device")

    def peak_bytes(self, component: Movable) -> int:
        """What is in no layer, and a window of the largest layers."""
        rest, *layers = (part.nbytes for part in component.parts)
        return rest + sum(sorted(layers)[-self.window :])

    def arrive(self, component: Movable) -> Iterator[None]:
        """What is in no layer, and the first layer; what follows in the window is on its way."""
        for part in component.parts[self.window + 1 :]:
            yield from part.drop()  # the end of the pass before
        for part in component.parts[:2]:
            yield from part.bring()
        for part in component.parts[2 : self.window + 1]:
            part.prefetch()
            yield

    def at_layer(self, component: Movable, layer: int) -> None:
        """Drop what is behind, begin to bring what is ahead, wait for ``layer``."""
        layers = component.parts[1:]
        wanted = [(layer + ahead) % len(layers) for ahead in range(min(self.window, len(layers)))]
        for number, part in enumerate(layers):
            if number not in wanted:
                _exhaust(part.drop())
        for number in wanted:
            layers[number].prefetch()
        started = perf_counter()
        layers[layer].ready()
        component.waited_s += perf_counter() - started

    def leave(self, component: Movable) -> Iterator[None]:
        """Everything."""
        yield from component.drop()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[memoryview, int]]:
    """The bytes of ``tensors`` in host memory, piece by piece, and where each piece lies in a row of all of them."""
    offset = 0
    for tensor in tensors:
        data = bytes_of(tensor)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK], offset + start
        offset += len(data)


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
