"""Memory by component: allocating it, giving it back to the system, taking it again, moving it to the host
and back.

- A component owns exactly what :func:`allocate` made inside ``manager.component(tag)``. What else a model
  builds meanwhile (rotary tables, workspaces) is allocated by torch as always, so no release can lose it.
- Memory is zero when it is allocated and when it is resumed. Every view that was made of a tensor keeps
  working. Addresses survive where :meth:`ComponentResidencyManager.moves` is false; graphs that have captured
  them must be captured again where it is true.
- Nobody touches a component's tensors between its release and its resume; ``engine_state.py`` knows which are
  released, and the manager must not be asked twice.
- The policy's weights, the KV pool and graphs are resident: by tag, and without a copy, unless the tag is
  backed up (``host_copy.py``). Whatever else is large is registered with a strategy (``offload.py``) that
  says when it is on the device; it keeps its values, also when the tag that it goes with is released.
- The device cache is emptied once memory-intensive components have left the device (or were there layer by
  layer, which leaves as many holes), and at no other moment of a request: never between two stages.
"""

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from time import perf_counter, time
from typing import Any, get_args

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ComponentStatus, ErrorCode, MemoryTag
from .device_cache import DeviceCache
from .device_memory import available_memory_if_known, refuse_defeating_settings
from .device_module import DeviceModule, device_module_for, free_and_total, streams_of
from .host_copy import BackedUpComponent, FileCopy, HostCopy, PinnedCopy
from .offload import RESIDENT, OffloadableComponent, Strategy
from .storage import Component, MappedComponent, SavedComponent, StorageComponent

logger = logging.getLogger(__name__)

MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
TRACED_EVENTS = 1024
LARGE_SHARE = 0.02
"""Share of the device's memory from which a component counts as memory-intensive, whatever its stage says."""

_END: Any = object()

MakeComponent = Callable[[MemoryTag | None], Component]

_ambient: ContextVar[Component | OffloadableComponent | None] = ContextVar("_ambient", default=None)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros of the component being built, or of none outside one.

    On Linux's CPU these are untouched pages, which cost nothing yet.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentUse:
    """What a stage needs of one component."""

    name: str
    memory_intensive: bool = False
    """True to empty the device cache when it has left."""


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Something that happened to a component."""

    at: float
    """Seconds since the epoch."""
    event: str
    """``begin_request``, ``arrive``, ``use``, ``finish_use``, ``leave``, ``keep`` (it might have left, and
    stays), ``finish_request``, ``missing``, ``release``, ``resume`` or ``emptied``.
    """
    component: str
    """Name of the component, or of the request."""
    strategy: str
    nbytes: int
    """Bytes that came to the device or left it; for ``emptied``, bytes that the system got back."""
    ms: float
    """Duration of the work; for ``finish_use``, of the waits for layers."""
    detail: str
    """Why a component is kept: ``after_use``, ``warm_up``, ``resident`` or ``in_use`` (by another
    request); ``missing`` where a use ends of what was never there; ``after_release`` of an emptying.
    """


class ComponentResidencyManager:
    """The components of one engine. The tag ``cuda_graph`` is empty: graphs own their memory.

    A request is a stretch of work that uses components, in stages:

        begin_request(r); before each stage: before_stage(r, uses); use(r, use); … ; finish_use(use);
        finish_request(r)

    What moves memory is an iterator that yields often. :meth:`use` waits instead, for what
    :meth:`before_stage` has not brought. A request that is given up needs no ``finish_request`` if it is
    begun again under the same name.
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
        """Args:
            make_component: makes storage of a tag; by default what suits ``device`` best.
            backed_up: tags whose values survive a release.

        Raises ``invalid_request`` if an allocator setting defeats the memory saver.
        """
        self._device = torch.device(device)
        self._module = device_module or device_module_for(self._device)
        self._device_cache = device_cache or DeviceCache(self._module)
        self._make_storage = make_component or _plain(self._device)
        if make_component is None:
            make_component = _plain(self._device)
            if self._device.type == "cuda" and _saver_is_active(environ):
                refuse_defeating_settings(self._device, memory_saver=True, environ=environ)
                make_component = SavedComponent
        self._components: dict[str, Component] = {tag: make_component(tag) for tag in MEMORY_TAGS}
        self._backups: dict[str, BackedUpComponent] = {}
        for tag in backed_up:
            backup = BackedUpComponent(self._components[tag], self._make_copy)
            self._components[tag] = self._backups[tag] = backup
        self._registered: dict[str, OffloadableComponent] = {}
        self._tags: dict[str, MemoryTag] = {}
        self._requests: dict[str, tuple[bool, set[str]]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self.peak_bytes = 0
        """Most bytes that registered components had on the device at one time, since :meth:`forget_peak`."""
        self._side: torch.Stream | None = None
        self.trace: deque[ResidencyEvent] = deque(maxlen=TRACED_EVENTS)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def register(
        self, name: str, strategy: Strategy = RESIDENT, *, tag: MemoryTag = "weights"
    ) -> OffloadableComponent:
        """Add a component that ``strategy`` moves; a release of ``tag`` takes it off the device, too, with
        its values kept.

        Who changes values later writes them through the result.
        """
        assert name not in self._registered, name
        assert name not in self._components, name
        storage_of = tag if strategy.preserve else None  # scratch memory is not written whole, as weights are
        self._registered[name] = OffloadableComponent(
            name, strategy, lambda: self._make_storage(storage_of), self._make_copy
        )
        self._tags[name] = tag
        return self._registered[name]

    def divide(self, name: str, layers: Sequence[Sequence[Tensor]]) -> None:
        """Say which tensors make up which layer of a registered component, once all are allocated."""
        self._registered[name].divide(layers)

    @contextmanager
    def component(self, name: str) -> Iterator[None]:
        """Let what :func:`allocate` makes inside belong to ``name``, a tag or registered."""
        token = _ambient.set(self._registered.get(name) or self._components[name])
        try:
            yield
        finally:
            _ambient.reset(token)

    def nbytes(self, name: str) -> int:
        """Return the size of a component, a tag or registered, wherever it is."""
        return (self._registered.get(name) or self._components[name]).nbytes

    def occupied_bytes(self, tag: MemoryTag) -> int:
        """Return the bytes that the tensors of ``tag`` take now, without registered components."""
        return self._components[tag].occupied_bytes()

    @property
    def registered_bytes(self) -> int:
        """Bytes that registered components take now."""
        return sum(component.occupied_bytes() for component in self._registered.values())

    @property
    def in_allocator(self) -> bool:
        """True if the device's allocator counts components among what it has handed out; it does not know
        mappings.
        """
        return self._make_storage is not MappedComponent

    def device_bytes(self, name: str) -> int:
        return self._registered[name].device_bytes

    @property
    def moved_in_bytes(self) -> int:
        """Bytes of registered components that are on the device, or on their way."""
        return sum(component.device_bytes for component in self._registered.values())

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
            for name, component in self._registered.items()
        ]

    @property
    def still_to_come(self) -> int:
        """Bytes that registered components may take beyond what they have, which must be left free."""
        return sum(max(0, c.strategy.peak_bytes(c) - c.device_bytes) for c in self._registered.values())

    def moves(self, tags: Collection[MemoryTag]) -> bool:
        """Return True if a release of ``tags`` may change addresses."""
        return any(self._components[tag].moves for tag in tags if self._components[tag].nbytes)

    def begin_request(self, request: str, *, warm_up: bool = False) -> None:
        """Begin a request. After a ``warm_up``, for which nobody waits, strategies may keep components on the
        device.
        """
        self._requests[request] = (warm_up, set())
        self._note("begin_request", request, "", 0, 0.0)

    def before_stage(self, request: str, uses: Sequence[ComponentUse]) -> Iterator[None]:
        """Bring what the next stage needs.

        Raises ``out_of_memory`` with ``needed_bytes`` and ``free_bytes``; what did not fit is not there.
        """
        for use in uses:
            component = self._find(request, use)
            if component is not None:
                self._require_room(component)
                try:
                    yield from self._traced("arrive", component, component.strategy.arrive(component))
                except RuntimeError as error:
                    needed = component.strategy.peak_bytes(component)
                    free = available_memory_if_known(self._device)
                    raise _shortage(f"bringing {use.name} failed: {error}", needed, free) from error
                self._measure()

    def use(self, request: str, use: ComponentUse) -> Callable[[int], None]:
        """Begin to work with a component; return what must be called with each layer's number before it is
        computed.
        """
        for _ in self.before_stage(request, [use]):
            pass
        component = self._registered.get(use.name)
        if component is None:
            return lambda layer: None
        component.waited_s = 0.0
        self._note("use", use.name, component.strategy.kind, component.device_bytes, 0.0)

        def at_layer(layer: int) -> None:
            component.strategy.at_layer(component, layer)
            self._measure()

        return at_layer

    def finish_use(self, use: ComponentUse) -> Iterator[None]:
        """Note that the work has been given to the current stream."""
        component = self._registered.get(use.name)
        if component is None:
            self._note("finish_use", use.name, "", 0, 0.0, "missing")
            return
        self._note("finish_use", use.name, component.strategy.kind, 0, component.waited_s)
        if component.strategy.keep_after_use:
            self._kept(component, "after_use")
        else:
            yield from self._leave([component])

    def finish_request(self, request: str) -> Iterator[None]:
        """Let what no other open request has used leave, where its strategy wants that."""
        warm_up, used = self._requests.pop(request, (False, set()))
        elsewhere = set().union(*(names for _, names in self._requests.values()))
        leaving = []
        for name, component in self._registered.items():
            if name not in used:
                continue
            if name in elsewhere:
                self._kept(component, "in_use")
            elif warm_up and component.strategy.keep_on_warm_up:
                self._kept(component, "warm_up")
            else:
                leaving.append(component)
        yield from self._leave(leaving)
        self._note("finish_request", request, "", 0, 0.0)

    def backs_up(self, tags: Collection[MemoryTag]) -> bool:
        return any(tag in self._backups for tag in tags)

    def backup_bytes(self, tag: MemoryTag) -> int:
        """Return the size of the copy that a release of ``tag`` has left on the host; 0 without one."""
        return self._backups[tag].copied_bytes if tag in self._backups else 0

    def keep(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Copy the values of those of ``tags`` that are backed up to the host, before their release; the
        device must be idle.

        Raises ``out_of_memory`` if the copy does not fit; there is none then.
        """
        for tag in tags:
            if tag not in self._backups:
                continue
            backup = self._backups[tag]
            try:
                yield from self._traced("keep", tag, backup.keep())
            except (OSError, RuntimeError) as error:
                raise CaesuraError(
                    ErrorCode.OUT_OF_MEMORY,
                    f"a copy of {tag} on the host, {backup.nbytes} bytes, failed: {error}",
                    needed_bytes=backup.nbytes,
                ) from error

    def give_up(self, tags: Collection[MemoryTag]) -> None:
        """Drop the copies of ``tags``, which are resident and stay so."""
        for tag in tags:
            if tag in self._backups:
                self._backups[tag].give_up()

    def release(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Give back the memory of ``tags``, which are resident and :meth:`kept <keep>`; the device must be
        idle.
        """
        for tag in tags:
            for component in self._of(tag):
                away = (step for unit in component.units for step in unit.drop())
                yield from self._traced("leave", component, away)
            yield from self._traced("release", tag, self._components[tag].release())

    def resume(self, tags: Collection[MemoryTag]) -> Iterator[None]:
        """Take back the memory of ``tags``, which are released: all or nothing.

        Backed up tags and registered components that are always on the device come back with their values,
        other components when they are used. Raises ``out_of_memory`` with ``needed_bytes`` and
        ``free_bytes``.
        """
        needed = sum(map(self.nbytes, tags)) + sum(c.nbytes for tag in tags for c in self._residents(tag))
        self._device_cache.empty("resume")
        free = available_memory_if_known(self._device)
        if free is not None and needed > free:
            raise _shortage(f"resuming {_names(tags)} needs {needed} bytes, {free} are free", needed, free)
        begun: list[MemoryTag] = []
        try:
            for tag in tags:
                begun.append(tag)
                yield from self._traced("resume", tag, self._components[tag].resume())
                for component in self._residents(tag):
                    yield from self._traced("arrive", component, component.strategy.arrive(component))
        except (OSError, RuntimeError) as error:  # somebody else was faster than we, or a copy cannot be read
            for _ in self.release(begun):
                pass
            raise _shortage(f"resuming {_names(tags)} failed: {error}", needed, free) from error
        self.give_up(tags)

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.moved_in_bytes)

    def _of(self, tag: MemoryTag) -> list[OffloadableComponent]:
        return [component for name, component in self._registered.items() if self._tags[name] == tag]

    def _residents(self, tag: MemoryTag) -> list[OffloadableComponent]:
        return [component for component in self._of(tag) if component.strategy.kind == "resident"]

    def _find(self, request: str, use: ComponentUse) -> OffloadableComponent | None:
        component = self._registered.get(use.name)
        if component is None:
            self._note("missing", use.name, "", 0, 0.0)
            return None
        component.memory_intensive = use.memory_intensive or component.nbytes >= self._large
        self._requests[request][1].add(use.name)
        return component

    def _require_room(self, component: OffloadableComponent) -> None:
        """Refuse what does not fit. On the CPU an allocation never fails, its first use does; others say so
        themselves.
        """
        needed = component.strategy.peak_bytes(component) - component.device_bytes
        if self._device.type != "cpu" or needed <= 0:
            return
        free = available_memory_if_known(self._device)
        if free is not None and needed > free:
            raise _shortage(f"{component.name} needs {needed} bytes, {free} are free", needed, free)

    def _leave(self, components: Sequence[OffloadableComponent]) -> Iterator[None]:
        """Let components leave, and only here empty the device cache on their behalf."""
        worth_it: list[str] = []
        for component in components:
            before = component.device_bytes
            yield from self._traced("leave", component, component.strategy.leave(component))
            freed = before > component.device_bytes
            if component.strategy.kind == "resident":
                self._kept(component, "resident")
            if component.memory_intensive and (freed or component.strategy.kind == "layerwise"):
                worth_it.append(component.name)
        if worth_it:
            started = perf_counter()
            report = self._device_cache.empty("component")
            seconds = perf_counter() - started
            self._note("emptied", ", ".join(worth_it), "", report.freed, seconds, "after_release")

    def _kept(self, component: OffloadableComponent, detail: str) -> None:
        self._note("keep", component.name, component.strategy.kind, component.device_bytes, 0.0, detail)

    @cached_property
    def _large(self) -> float:
        """Bytes from which a component is large; infinite where the device does not tell its size."""
        known = free_and_total(self._module)
        return math.inf if known is None else LARGE_SHARE * known[1]

    def _make_copy(self) -> HostCopy:
        streams = streams_of(self._module)
        if self._device.type == "cpu" and streams is None:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="caesura-prefetch")
            return FileCopy(self._executor)
        if streams is not None and self._side is None:
            self._side = streams.Stream()
        return PinnedCopy(streams, self._side, pin=streams is not None and self._device.type != "cpu")

    def _traced(
        self, event: str, component: OffloadableComponent | MemoryTag, steps: Iterator[None]
    ) -> Iterator[None]:
        """Advance ``steps``, and note an event if something was moved."""
        before = component.device_bytes if isinstance(component, OffloadableComponent) else 0
        busy, more = 0.0, True
        while more:
            started = perf_counter()
            more = next(steps, _END) is None
            busy += perf_counter() - started
            if more:
                yield
        if isinstance(component, OffloadableComponent):
            moved = abs(component.device_bytes - before)
            if moved:
                self._note(event, component.name, component.strategy.kind, moved, busy)
        else:
            self._note(event, component, "resident", self._components[component].nbytes, busy)

    def _note(
        self, event: str, component: str, strategy: str, nbytes: int, seconds: float, detail: str = ""
    ) -> None:
        self.trace.append(ResidencyEvent(time(), event, component, strategy, nbytes, 1e3 * seconds, detail))
        words = " ".join(filter(None, (event, component, strategy, detail)))
        logger.debug("%s: %d bytes, %.1f ms", words, nbytes, 1e3 * seconds)


def _plain(device: torch.device) -> MakeComponent:
    return MappedComponent if device.type == "cpu" and sys.platform == "linux" else StorageComponent


def _saver_is_active(environ: Mapping[str, str]) -> bool:
    return (
        "torch_memory_saver" in environ.get("LD_PRELOAD", "") and find_spec("torch_memory_saver") is not None
    )


def _names(tags: Collection[MemoryTag]) -> str:
    return ", ".join(sorted(tags))


def _shortage(message: str, needed: int, free: int | None) -> CaesuraError:
    return CaesuraError(ErrorCode.OUT_OF_MEMORY, message, needed_bytes=needed, free_bytes=free)
