"""Large components that come and go: what their memory is divided into, where the values lie meanwhile, and when they move.

Invariants:
- Values are saved once, when a part first leaves the device; afterwards leaving only drops what the device holds. Who
  changes them later (:meth:`Movable.write`) writes the copy, too: from the first save on it has what the device has, and a
  part that is away need not come for it. Scratch memory (``preserve=False``) is never saved and comes back as zeros.
- A part is on the device as a whole, or not at all: when its way there or back is interrupted, it is not.
- Tensors keep their identity, and every view made of them keeps working; addresses stay or change as the storage behind
  them says (``storage.py``).
- What uses a part runs on the stream that is current in :meth:`Part.ready`, and memory is taken and dropped on that
  stream, too, so that the allocator may reuse it in the stream's order. Only the copying runs beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ...io_struct import Residency
from .host_copy import HostCopy
from .storage import Component


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

    def values(self, number: int) -> Tensor:
        """Of one of its tensors, wherever they are: to be read. Where they may leave, they stay valid."""
        if self._copy is not None:
            return self._copy.values()[number]
        assert self.on_device, "its values are nowhere"
        return self.tensors[number]

    def write(self, number: int, start: int, rows: Tensor) -> None:
        """Overwrite elements from ``start`` on of one of its tensors: on the device, if it is there, and in the copy.

        Raises:
            OSError, RuntimeError: the copy cannot be written.
        """
        self.ready()
        tensor = self.tensors[number]
        if self.on_device:
            written = tensor.view(-1).narrow(0, start, rows.numel())
            written.copy_(rows.reshape(-1))
            if self._copy is not None:
                self._copy.write(number, start, written)
        else:
            assert self._copy is not None, "its values are nowhere"
            self._copy.write(number, start, rows.to(tensor.dtype))

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
        self._places: dict[int, tuple[Part, int]] = {}

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
        self._places = {
            id(tensor): (part, number) for part in self._parts for number, tensor in enumerate(part.tensors)
        }

    def values(self, tensor: Tensor) -> Tensor:
        """Those of ``tensor``, which was allocated here, to be read: on the host, once it has left the device."""
        if self._parts is None:
            return tensor
        part, number = self._places[id(tensor)]
        return part.values(number)

    def write(self, tensor: Tensor, start: int, rows: Tensor) -> None:
        """Overwrite elements from ``start`` on of ``tensor``, which was allocated here, wherever its values are.

        Raises:
            OSError, RuntimeError: the copy cannot be written.
        """
        if self._parts is None:
            tensor.view(-1).narrow(0, start, rows.numel()).copy_(rows.reshape(-1))
            return
        part, number = self._places[id(tensor)]
        part.write(number, start, rows)

    def drop(self) -> Iterator[None]:
        """All of it off the device."""
        for part in self.parts:
            yield from part.drop()


class Strategy(Protocol):
    """When a component is on the device."""

    @property
    def kind(self) -> Residency:
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
    kind: ClassVar[Residency] = "resident"

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
    kind: ClassVar[Residency] = "offload"

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
    kind: ClassVar[Residency] = "layerwise"

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


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
