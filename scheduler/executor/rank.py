"""What a worker's rank is made of, and what it does for each call of rank 0.

Invariants:
- A rank is built by the functions that build rank 0's, from the same configuration; it differs in its device and its shard.
- A rank keeps no state of the engine: whether it is paused, which weights count and what is released, rank 0 knows. Of its own
  memory it knows what is away: where one rank could not resume, the others go back, and what never came must not be kept anew.
- What takes long is a generator that yields whether it waits for something; what it returns is the answer's value.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from ...io_struct import CaesuraError
from ..execution.build import build_components, build_runner
from ..memory.device_cache import DeviceCache, EmptyCachePlace
from ..memory.device_memory import DeviceMemoryReading, available_memory_if_known
from ..memory.device_module import device_module_for, use_device
from ..memory.residency import ComponentResidencyManager
from ..weights.checksums import checksums, garbage
from ..weights.reading import Held
from ..weights.transports.distributed import WeightsUpdateGroups
from ..weights.write_stream import write_stream_of
from .collectives import join
from .messages import (
    Abandon,
    Capture,
    Checksums,
    Derive,
    EmptyCache,
    GiveUp,
    JoinGroup,
    Keep,
    LeaveGroup,
    Memory,
    Open,
    Read,
    Recover,
    Release,
    ResetTensors,
    Resume,
    SetLastTokens,
    Start,
    Synchronize,
    Write,
)
from .rank_updates import RankUpdates
from .runner import begin_anew
from .steps import Steps

if TYPE_CHECKING:
    from ...io_struct import MemoryTag

logger = logging.getLogger(__name__)

Operation = Generator[bool, None, object]
"""Yields whether it waits for something; returns the answer's value."""
LEAVE_S = 2.0
"""Longest wait until a trainer's process group is left."""


class LineToZero(Protocol):
    """What a rank needs of its line while it is built."""

    def all_reduce_min(self, value: int) -> int:
        """The smallest ``value`` of all ranks."""
        ...


class _Agreement:
    """This rank's side of agreeing on sizes."""

    def __init__(self, line: LineToZero, sharing: int) -> None:
        self.sharing = sharing
        self.all_reduce_min = line.all_reduce_min


class Rank:
    """The objects of one rank but rank 0."""

    def __init__(
        self, start: Start, rank: int, device: str | None, line: LineToZero, wake: Callable[[], None]
    ) -> None:
        """
        Args:
            device: instead of the one that rank 0 names. None: that one.
            wake: wakes the worker's loop; called in threads.

        Raises:
            CaesuraError: what rank 0 has asked for cannot be built here.
        """
        config = start.config if device is None else replace(start.config, device=device)
        torch.set_num_threads(config.num_threads or 1)
        use_device(config.device)
        self.parallel = join(start.group, config, rank)
        self._config, self._rank = config, rank
        module = device_module_for(config.device)
        backed_up: tuple[MemoryTag, ...] = ("weights",) if config.weights_cpu_backup else ()
        self._module = module
        self._device_cache = DeviceCache(module, synchronize=lambda: self._runner.synchronize())
        self._residency = ComponentResidencyManager(
            config.device, device_cache=self._device_cache, backed_up=backed_up
        )
        loaded, pool, routing, _ = build_components(
            config, self._residency, start.folder, self.parallel, _Agreement(line, start.sharing)
        )
        runner = build_runner(config, loaded, pool, routing)
        self._loaded, self._runner, self._graphs = loaded, runner, runner.graphs
        self._away: set[MemoryTag] = set()
        write_stream = write_stream_of(loaded.device, runner.on_stream)
        self._groups = WeightsUpdateGroups(
            loaded.device, wake, interface=config.group_interface, write_stream=write_stream
        )
        self._updates = RankUpdates(config, loaded, runner, self._groups, write_stream, wake)
        self.steps = Steps(runner, self.parallel, self.memory, ready_at_once=loaded.device.type == "cpu")
        self._device_cache.empty("start")

    def memory(self) -> Memory:
        """A reading, without side effects."""
        reading = DeviceMemoryReading.of(self._module)
        return Memory(
            reserved=reading.reserved,
            allocated=reading.allocated,
            available=available_memory_if_known(self._config.device),
        )

    def at_once(self, call: object) -> tuple[object] | None:
        """The value of a call that takes no time; None: it is none of these."""
        if isinstance(call, Synchronize):
            self._runner.synchronize()
            return (None,)
        if isinstance(call, SetLastTokens):
            slots, tokens = np.asarray(call.slots, np.int64), np.asarray(call.tokens, np.int32)
            self._runner.set_last_tokens(slots, tokens)
            return (None,)
        if isinstance(call, Recover):
            begin_anew(self.parallel, self._graphs)
            return (None,)
        if isinstance(call, Abandon):
            self._updates.abandon()
            return (None,)
        if isinstance(call, EmptyCache):
            self._updates.collect()
            report = self._device_cache.empty(cast("EmptyCachePlace", call.place))
            return ((report.reserved_before, report.reserved_after),)
        return None

    def beside(self, call: object) -> Operation | None:
        """What a call does that waits for others than rank 0, and holds nothing up; None: it is none of these."""
        if isinstance(call, JoinGroup):
            return self._join_group(call)
        if isinstance(call, LeaveGroup):
            return self._leave_group(call)
        return None

    def operation(self, call: object) -> Operation:
        """What a call does that is none of the others; operations follow one another."""
        if isinstance(call, Write):
            return self._updates.write()
        if isinstance(call, Derive):
            return self._updates.derive(call)
        if isinstance(call, Keep):
            return self._advance(self._residency.keep(self._here(call.tags)))
        if isinstance(call, GiveUp):
            return self._give_up(call)
        if isinstance(call, Release):
            return self._release(call)
        if isinstance(call, Resume):
            return self._resume(call)
        if isinstance(call, Capture):
            return self._advance(self._graphs.capture() if self._graphs is not None else iter(()))
        if isinstance(call, Checksums):
            return _working(checksums(self._loaded.model))
        if isinstance(call, Read):
            return self._read(call)
        assert isinstance(call, ResetTensors), call
        return self._reset()

    def open(self, call: Open, frames: list[memoryview]) -> Operation:
        """Open a source of weights."""
        return self._updates.open(call, frames)

    def _advance(self, steps: Iterator[None]) -> Operation:
        while True:
            with self._runner.on_stream():
                if next(steps, True):
                    break
            yield False
        self._runner.synchronize()
        return None

    def _give_up(self, call: GiveUp) -> Operation:
        yield False  # in its turn: the copies may just be made
        self._residency.give_up(self._here(call.tags))
        return None

    def _release(self, call: Release) -> Operation:
        if self._graphs is not None and ("cuda_graph" in call.tags or self._residency.moves(call.tags)):
            self._graphs.drop()
        if "weights" in call.tags:
            self._updates.forget()
        for _ in self._residency.release(self._here(call.tags)):
            yield False
        self._away.update(call.tags)
        self._device_cache.empty("release")
        return None

    def _resume(self, call: Resume) -> Operation:
        yield from self._advance(self._residency.resume([tag for tag in call.tags if tag in self._away]))
        self._away.difference_update(call.tags)
        return None

    def _here(self, tags: list["MemoryTag"]) -> list["MemoryTag"]:
        return [tag for tag in tags if tag not in self._away]

    def _read(self, call: Read) -> Operation:
        slots, found = self._loaded.model.weight_slots(), []
        for name in call.names:
            with self._runner.on_stream():
                found.append(Held.of(slots[name]))
            yield False
        return found

    def _reset(self) -> Operation:
        for slot, start, rows in garbage(self._loaded.model):
            with self._runner.on_stream():
                slot.write(rows, start)
            yield False
        self._runner.synchronize()
        return None

    def _join_group(self, call: JoinGroup) -> Operation:
        request = call.request
        request.rank_offset += self._rank
        group = self._groups.join(request)
        try:
            while not group.joined():
                yield True
        except BaseException:
            self._groups.forget(group)
            raise
        return None

    def _leave_group(self, call: LeaveGroup) -> Operation:
        if call.reason is not None:
            self._groups.out_of_step(call.name, call.reason)
            return None
        try:
            group, limit = self._groups.leave(call.name), monotonic() + LEAVE_S
        except CaesuraError:  # unknown: rank 0 alone is in a group in which it sends
            return None
        while group.is_leaving and monotonic() < limit:
            yield True
        return None


def _working(work: Generator[None, None, object]) -> Operation:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        yield False
