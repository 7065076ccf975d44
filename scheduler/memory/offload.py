"""Large components that come and go: how their memory is divided, where the values are, and when they move.

- Values are saved once, when a unit first leaves the device; who changes them later writes the copy, too.
  Where they change on the device alone (``keep_copy=False``), they are saved each time.
  Scratch memory (``preserve=False``) is never saved and comes back as zeros.
- A unit is on the device as a whole, or not at all. Every view made of a tensor keeps working.
- Memory is taken, used and dropped on the stream that is current in :meth:`OffloadUnit.ready`, so that the
  allocator may reuse it in the stream's order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...io_struct import Residency
from .host_copy import HostCopy, exhaust
from .storage import Component


class OffloadUnit:
    """Tensors of a component that come and go together; on the device at first."""

    def __init__(
        self,
        pieces: Sequence[tuple[Tensor, Component]],
        make_copy: Callable[[], HostCopy] | None,
        *,
        keep_copy: bool = True,
    ) -> None:
        """``pieces`` are tensors, each with storage of its own. Without ``make_copy`` values may be lost."""
        self.tensors = [tensor for tensor, _ in pieces]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.on_device = True
        """True also while it is on its way to the device."""
        self._storages = [storage for _, storage in pieces]
        self._make_copy, self._keep_copy = make_copy, keep_copy
        self._copy: HostCopy | None = None
        self.is_coming = False

    def bring(self) -> Iterator[None]:
        """Bring it to the device. After a RuntimeError or OSError it is not there."""
        if self.on_device:
            return
        with self._or_away():
            for storage in self._storages:
                yield from storage.resume()
            if self._copy is not None:
                yield from self._copy.load(self.tensors)
        self.on_device = True
        if not self._keep_copy:
            self._copy = None

    def prefetch(self) -> None:
        """Begin to bring it; :meth:`ready` completes that. Raises as :meth:`bring`."""
        if self.on_device:
            return
        with self._or_away():
            for storage in self._storages:
                exhaust(storage.resume())
            if self._copy is not None:
                self._copy.prefetch(self.tensors)
        self.on_device = self.is_coming = True

    def ready(self) -> None:
        """Have what the current stream is given next see the values. Raises as :meth:`bring`."""
        if not self.is_coming:
            return
        self.is_coming = False
        with self._or_away():
            if self._copy is not None:
                self._copy.wait()

    def drop(self) -> Iterator[None]:
        """Take it off the device; save the values first where that has not been done."""
        if not self.on_device:
            return
        self.ready()
        if self._copy is None and self._make_copy is not None:
            copy = self._make_copy()
            yield from copy.save(self.tensors)
            self._copy = copy
        self.on_device = False
        with self._or_away():
            for storage in self._storages:
                yield from storage.release()

    def values(self, number: int) -> Tensor:
        """Return the values of one tensor to be read, wherever they are. They stay valid if they leave."""
        if self._copy is not None:
            return self._copy.values()[number]
        assert self.on_device, "its values are nowhere"
        return self.tensors[number]

    def write(self, number: int, start: int, rows: Tensor) -> None:
        """Overwrite elements from ``start`` on, on the device and in the copy; may raise OSError."""
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

    @contextmanager
    def _or_away(self) -> Iterator[None]:
        """Give all of its memory back if the block fails or is broken off."""
        try:
            yield
        except BaseException:
            self.on_device = False
            for storage in self._storages:
                exhaust(storage.release())
            raise


class OffloadableComponent:
    """One component whose memory comes and goes: a single unit, until it is divided."""

    def __init__(
        self,
        name: str,
        strategy: "Strategy",
        make_storage: Callable[[], Component],
        make_copy: Callable[[], HostCopy],
    ) -> None:
        self.name, self.strategy = name, strategy
        self.memory_intensive = False
        """True to empty the device cache when it has left, whatever its size."""
        self._make_storage = make_storage
        self._make_copy = make_copy if strategy.preserve else None
        self._pieces: list[tuple[Tensor, Component]] = []
        self._units: list[OffloadUnit] | None = None
        self._places: dict[int, tuple[OffloadUnit, int]] = {}

    @property
    def units(self) -> list[OffloadUnit]:
        """First what is in no layer, then the layers; nothing is allocated any more once this was asked."""
        if self._units is None:
            self.divide([])
        assert self._units is not None
        return self._units

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._pieces]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self._pieces)

    @property
    def device_bytes(self) -> int:
        if self._units is None:
            return self.nbytes
        return sum(unit.nbytes for unit in self._units if unit.on_device)

    def occupied_bytes(self) -> int:
        """Return the bytes that it really takes now: pages that were never written take nothing."""
        return sum(storage.occupied_bytes() for _, storage in self._pieces)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor of zeros, in storage of its own."""
        assert self._units is None, f"{self.name} is divided already"
        storage = self._make_storage()
        tensor = storage.allocate(shape, dtype, device)
        self._pieces.append((tensor, storage))
        return tensor

    def divide(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Say which tensors make up which layer, in the order of use; those in none belong to all."""
        where = {
            tensor.untyped_storage().data_ptr(): number
            for number, layer in enumerate(layers, start=1)
            for tensor in layer
        }
        pieces: list[list[tuple[Tensor, Component]]] = [[] for _ in range(len(layers) + 1)]
        for tensor, storage in self._pieces:
            pieces[where.get(tensor.untyped_storage().data_ptr(), 0)].append((tensor, storage))
        keep_copy = self.strategy.keep_copy
        self._units = [OffloadUnit(some, self._make_copy, keep_copy=keep_copy) for some in pieces]
        self._places = {
            id(tensor): (unit, number) for unit in self._units for number, tensor in enumerate(unit.tensors)
        }

    def values(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor`` to be read; they are on the host once it has left the device."""
        if self._units is None:
            return tensor
        unit, number = self._places[id(tensor)]
        return unit.values(number)

    def write(self, tensor: Tensor, start: int, rows: Tensor) -> None:
        """Overwrite elements from ``start`` on of ``tensor``; raises as :meth:`OffloadUnit.write`."""
        if self._units is None:
            tensor.view(-1).narrow(0, start, rows.numel()).copy_(rows.reshape(-1))
            return
        unit, number = self._places[id(tensor)]
        unit.write(number, start, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """When a component is on the device: this one brings all of it for a use, and drops it when it leaves."""

    preserve: bool = True
    keep_copy: bool = True
    """False: values change on the device alone, so that the copy is made again whenever they leave."""
    kind: ClassVar[Residency]

    def peak_bytes(self, component: OffloadableComponent) -> int:
        """Return the most bytes that are on the device at the same time."""
        return component.nbytes

    def arrive(self, component: OffloadableComponent) -> Iterator[None]:
        """Bring what must be on the device when a use begins."""
        for unit in component.units:
            yield from unit.bring()

    def at_layer(self, component: OffloadableComponent, layer: int) -> None:
        """Prepare for layer ``layer``; the layers before it have been given to the current stream."""

    def leave(self, component: OffloadableComponent) -> Iterator[None]:
        """Drop what need not stay on the device."""
        for unit in component.units:
            yield from unit.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentOffloadStrategy(Strategy):
    """On the device as a whole for a use, on the host otherwise."""

    kind: ClassVar[Residency] = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentStrategy(Strategy):
    """Always on the device; away only while its memory is released by tag."""

    kind: ClassVar[Residency] = "resident"

    def leave(self, component: OffloadableComponent) -> Iterator[None]:
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseOffloadStrategy(Strategy):
    """``window`` consecutive layers on the device, later ones on their way; the first follows the last."""

    window: int = 2  # at least 1
    kind: ClassVar[Residency] = "layerwise"

    def peak_bytes(self, component: OffloadableComponent) -> int:
        rest, *layers = (unit.nbytes for unit in component.units)
        return rest + sum(sorted(layers)[-self.window :])

    def arrive(self, component: OffloadableComponent) -> Iterator[None]:
        for unit in component.units[self.window + 1 :]:
            yield from unit.drop()  # the end of the pass before
        for unit in component.units[:2]:
            yield from unit.bring()
        for unit in component.units[2 : self.window + 1]:
            unit.prefetch()
            yield

    def at_layer(self, component: OffloadableComponent, layer: int) -> None:
        layers = component.units[1:]
        wanted = [(layer + ahead) % len(layers) for ahead in range(min(self.window, len(layers)))]
        for number, unit in enumerate(layers):
            if number not in wanted:
                exhaust(unit.drop())
        for number in wanted:
            layers[number].prefetch()
        layers[layer].ready()
