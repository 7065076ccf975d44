"""Memory by component: allocating it, giving it back to the system, taking it again, moving it to the host
and back.

- A component owns exactly what :func:`allocate` made inside ``manager.component(tag)``. What else a model
  builds meanwhile (rotary tables, workspaces) is allocated by torch as always.
- Nobody touches a component's tensors between its release and its resume; ``engine_state.py`` knows which are
  released, and the manager must not be asked twice.
- The policy's weights, the KV pool and graphs are resident: by tag, and without a copy, unless the tag is
  backed up. Whatever else is large is registered with a strategy (``offload.py``) that says when it is on the
  device; it keeps its values, also when the weights are released.
- The device cache is emptied once memory-intensive components have left the device (or were there layer by
  layer, which leaves as many holes), and at no other moment: never between two stages.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib.util import find_spec
from time import perf_counter
from typing import Any, get_args

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ComponentStatus, ErrorCode, MemoryTag
from .device_memory import DeviceCache, refuse_defeating_settings
from .device_module import DeviceModule, device_module_for, free_and_total, streams_of
from .host_copy import FileCopy, HostCopy, PinnedCopy, exhaust
from .offload import OffloadableComponent, Strategy
from .storage import Component, MappedComponent, SavedComponent, StorageComponent

logger = logging.getLogger(__name__)

MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
LARGE_SHARE = 0.02
"""Share of the device's memory from which a component counts as memory-intensive, whatever was registered."""

_END: Any = object()

MakeComponent = Callable[[MemoryTag | None], Component]

_ambient: ContextVar[Component | OffloadableComponent | None] = ContextVar("_ambient", default=None)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros of the component being built, if any. Pages that are not touched cost nothing."""
    device = torch.device(device)
    component = _ambient.get()
    if component is None:
        component = _plain(device)(None)
    return component.allocate(shape, dtype, device)


@contextmanager
def nobody() -> Iterator[None]:
    """Let what is allocated inside belong to no component, whichever is being built around it."""
    token = _ambient.set(None)
    try:
        yield
    finally:
        _ambient.reset(token)


class ComponentResidencyManager:
    """The components of one engine. The tag ``cuda_graph`` is empty: graphs own their memory.

    Call :meth:`bring` before a stage, :meth:`use` in it (it waits for the rest), :meth:`leave` if no next one
    needs it.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        make_component: MakeComponent | None = None,
        device_module: DeviceModule | None = None,
        device_cache: DeviceCache | None = None,
        backed_up: Collection[MemoryTag] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Build with ``make_component``, or what suits ``device``; values of ``backed_up`` tags survive."""
        self._device = torch.device(device)
        self.module = device_module or device_module_for(self._device)
        self._device_cache = device_cache or DeviceCache(self.module)
        self._make_storage = make_component or _plain(self._device)
        if make_component is None:
            make_component = _plain(self._device)
            saver = "torch_memory_saver"
            if self._device.type == "cuda" and saver in environ.get("LD_PRELOAD", "") and find_spec(saver):
                refuse_defeating_settings(environ)
                make_component = SavedComponent
        self.components: dict[str, Component] = {tag: make_component(tag) for tag in MEMORY_TAGS}
        self._backed_up = frozenset(backed_up)
        self._copies: dict[MemoryTag, HostCopy] = {}
        """Values of backed up tags, from :meth:`keep` until :meth:`give_up`."""
        self.registered: dict[str, OffloadableComponent] = {}
        self._executor: ThreadPoolExecutor | None = None
        self.peak_bytes = 0
        """Most bytes that registered components had on the device at one time, since :meth:`forget_peak`."""
        self._side: torch.Stream | None = None

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def register(
        self, name: str, strategy: Strategy, *, memory_intensive: bool = False
    ) -> OffloadableComponent:
        """Add a component that ``strategy`` and weight releases move; write its values through the result."""
        assert name not in self.registered, name
        assert name not in self.components, name
        # Scratch memory is not written whole, as weights are.
        tag: MemoryTag | None = "weights" if strategy.preserve else None
        component = OffloadableComponent(name, strategy, lambda: self._make_storage(tag), self.make_copy)
        component.memory_intensive = memory_intensive
        self.registered[name] = component
        return component

    @contextmanager
    def component(self, name: str) -> Iterator[None]:
        """Let what :func:`allocate` makes inside belong to ``name``, a tag or registered."""
        token = _ambient.set(self.registered.get(name) or self.components[name])
        try:
            yield
        finally:
            _ambient.reset(token)

    def nbytes(self, name: str) -> int:
        return (self.registered.get(name) or self.components[name]).nbytes

    def occupied_bytes(self, tag: MemoryTag) -> int:
        return self.components[tag].occupied_bytes()

    @property
    def registered_bytes(self) -> int:
        return sum(component.occupied_bytes() for component in self.registered.values())

    @property
    def in_allocator(self) -> bool:
        """True if the allocator counts components as handed out; it does not know mappings."""
        return self._make_storage is not MappedComponent

    @property
    def moved_in_bytes(self) -> int:
        return sum(component.device_bytes for component in self.registered.values())

    def forget_peak(self) -> None:
        """Set the peak to what is there now, after loading, which takes each component whole."""
        self.peak_bytes = self.moved_in_bytes

    def status(self) -> list[ComponentStatus]:
        return [
            ComponentStatus(
                name=name,
                residency=component.strategy.kind,
                nbytes=component.nbytes,
                device_bytes=component.device_bytes,
            )
            for name, component in self.registered.items()
        ]

    @property
    def still_to_come(self) -> int:
        """Bytes that registered components may take beyond what they have, which must be left free."""
        return sum(max(0, c.strategy.peak_bytes(c) - c.device_bytes) for c in self.registered.values())

    def addresses(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return where the tensors of components lie, in the order of their allocation."""
        components = (self.registered.get(name) or self.components[name] for name in names)
        return tuple(tensor.data_ptr() for component in components for tensor in component.tensors)

    def bring(self, names: Iterable[str]) -> Iterator[None]:
        """Bring what the next stage needs; raises ``out_of_memory``, and what did not fit is not there."""
        for name in names:
            component = self.registered[name]
            self._require_room(component)
            try:
                yield from self._moving("arrive", component, component.strategy.arrive(component))
            except RuntimeError as error:
                needed, free = component.strategy.peak_bytes(component), self._free_bytes()
                raise _shortage(f"bringing {name} failed: {error}", needed, free) from error
            self._measure()

    def use(self, name: str) -> Callable[[int], None]:
        """Begin to work with a component; return what must be called with each layer's number before it."""
        exhaust(self.bring([name]))
        component = self.registered[name]

        def at_layer(layer: int) -> None:
            component.strategy.at_layer(component, layer)
            self._measure()

        return at_layer

    def leave(self, names: Iterable[str]) -> Iterator[None]:
        """Let components leave, and only here empty the device cache on their behalf."""
        worth_it: list[str] = []
        for name in names:
            component = self.registered[name]
            before = component.device_bytes
            yield from self._moving("leave", component, component.strategy.leave(component))
            freed = before > component.device_bytes
            intensive = component.memory_intensive or component.nbytes >= self._large
            if intensive and (freed or component.strategy.kind == "layerwise"):
                worth_it.append(name)
        if worth_it:
            started = perf_counter()
            report = self._device_cache.empty("component")
            _log("emptied", ", ".join(worth_it), report.freed, perf_counter() - started)

    def backs_up(self, tags: Collection[MemoryTag]) -> bool:
        return not self._backed_up.isdisjoint(tags)

    def backup_bytes(self, tag: MemoryTag) -> int:
        """Return the size of the copy that a release of ``tag`` has left on the host; 0 without one."""
        return self.nbytes(tag) if tag in self._copies else 0

    def keep(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Copy backed up ``tags`` to the host before a release, device idle; or none (``out_of_memory``)."""
        for tag in self._backed_up.intersection(tags):
            try:
                copy = self.make_copy()
                yield from self._moving("keep", tag, copy.save(self.components[tag].tensors))
            except (OSError, RuntimeError) as error:
                needed = self.nbytes(tag)
                reason = f"a copy of {tag} on the host, {needed} bytes, failed: {error}"
                raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=needed) from error
            self._copies[tag] = copy

    def give_up(self, tags: Collection[MemoryTag]) -> None:
        """Drop the copies of ``tags``, which are resident and stay so."""
        for tag in tags:
            self._copies.pop(tag, None)

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Give back the memory of ``tags``, resident and :meth:`kept <keep>`; the device must be idle."""
        for tag in tags:
            for component in self.registered.values() if tag == "weights" else ():
                away = (step for unit in component.units for step in unit.drop())
                yield from self._moving("leave", component, away)
            storage = self.components[tag]
            assert tag not in self._backed_up or tag in self._copies or not storage.tensors, "not kept"
            yield from self._moving("release", tag, storage.release())

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Take back all of ``tags`` or none (``out_of_memory``); what is kept comes with its values."""
        residents = [each for each in self.registered.values() if each.strategy.kind == "resident"]
        needed = sum(map(self.nbytes, tags))
        needed += sum(component.nbytes for component in residents) if "weights" in tags else 0
        self._device_cache.empty("resume")
        free = self._free_bytes()
        if free is not None and needed > free:
            raise _shortage(f"resuming {_names(tags)} needs {needed} bytes, {free} are free", needed, free)
        begun: list[MemoryTag] = []
        try:
            for tag in tags:
                begun.append(tag)
                yield from self._moving("resume", tag, self._resume(tag))
                for component in residents if tag == "weights" else ():
                    yield from self._moving("arrive", component, component.strategy.arrive(component))
        except (OSError, RuntimeError) as error:  # somebody else was faster than we, or a copy cannot be read
            exhaust(self.release(begun))
            raise _shortage(f"resuming {_names(tags)} failed: {error}", needed, free) from error
        self.give_up(tags)

    def _resume(self, tag: MemoryTag) -> Iterator[None]:
        storage = self.components[tag]
        yield from storage.resume()
        if tag in self._copies:
            yield from self._copies[tag].load(storage.tensors)

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.moved_in_bytes)

    def _require_room(self, component: OffloadableComponent) -> None:
        """Refuse what does not fit. On the CPU an allocation never fails; others say so themselves."""
        needed = component.strategy.peak_bytes(component) - component.device_bytes
        if self._device.type != "cpu" or needed <= 0:
            return
        free = self._free_bytes()
        if free is not None and needed > free:
            raise _shortage(f"{component.name} needs {needed} bytes, {free} are free", needed, free)

    def _free_bytes(self) -> int | None:
        known = free_and_total(self.module)
        return None if known is None else known[0]

    @cached_property
    def _large(self) -> float:
        """Bytes from which a component is large; infinite where the device does not tell its size."""
        known = free_and_total(self.module)
        return math.inf if known is None else LARGE_SHARE * known[1]

    def make_copy(self) -> HostCopy:
        streams = streams_of(self.module)
        if self._device.type == "cpu" and streams is None:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="caesura-prefetch")
            return FileCopy(self._executor)
        if streams is not None and self._side is None:
            self._side = streams.Stream()
        return PinnedCopy(streams, self._side, pin=streams is not None and self._device.type != "cpu")

    def _moving(
        self, event: str, component: OffloadableComponent | MemoryTag, steps: Iterator[None]
    ) -> Iterator[None]:
        before = component.device_bytes if isinstance(component, OffloadableComponent) else 0
        busy, more = 0.0, True
        while more:
            started = perf_counter()
            more = next(steps, _END) is None
            busy += perf_counter() - started
            if more:
                yield
        if not isinstance(component, OffloadableComponent):
            _log(event, f"{component} resident", self.components[component].nbytes, busy)
        elif moved := abs(component.device_bytes - before):
            _log(event, f"{component.name} {component.strategy.kind}", moved, busy)


def _log(event: str, component: str, nbytes: int, seconds: float) -> None:
    logger.debug("%s %s: %d bytes, %.1f ms", event, component, nbytes, 1e3 * seconds)


def _plain(device: torch.device) -> MakeComponent:
    return MappedComponent if device.type == "cpu" and sys.platform == "linux" else StorageComponent


def _names(tags: Collection[MemoryTag]) -> str:
    return ", ".join(sorted(tags))


def _shortage(message: str, needed: int, free: int | None) -> CaesuraError:
    return CaesuraError(ErrorCode.OUT_OF_MEMORY, message, needed_bytes=needed, free_bytes=free)
