"""A worker: what one rank but rank 0 is made of, and what rank 0 can call.

Invariants:
- A worker is built by the functions that build rank 0's model, from the same configuration; it differs in its
  device and its shard.
- It keeps no state of the engine, except which of its own memory is released: where one rank could not
  resume, the others release again, and what never came back must not be copied.
- What takes long is a generator that yields True when it waits for something; it returns the answer's value.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

import msgspec
import numpy as np
import torch

from ...io_struct import CaesuraError, InitWeightsUpdateGroupReqInput, MemoryTag
from ..execution.build import build_components, build_page_store, build_runner
from ..execution.forward import ForwardOutput
from ..memory.device_memory import (
    DeviceCache,
    DeviceMemoryReading,
    EmptyCachePlace,
    MinReduce,
    get_available_memory,
)
from ..memory.device_module import device_module_for, use_device
from ..memory.residency import ComponentResidencyManager
from ..weights.peft import SentFactors, received
from ..weights.reading import Held, checksums, garbage
from ..weights.transports.distributed import LEAVE_S, WeightsUpdateGroups
from ..weights.upload import write_stream_of
from . import worker_rendezvous
from .rpc import Memory, Start, decode_batch
from .worker_updates import Operation, WorkerUpdates


class Worker:
    def __init__(
        self, start: Start, rank: int, device: str | None, sizes: MinReduce, wake: Callable[[], None]
    ) -> None:
        """Use ``device`` instead of that in ``start``; ``wake``, called in threads, wakes the loop."""
        config = replace(start.config, device=start.devices[rank] if device is None else device)
        torch.set_num_threads(config.num_threads or 1)
        use_device(config.device)
        self.parallel = worker_rendezvous.join(start.group, config, rank)
        self._config, self._rank = config, rank
        self._module = device_module_for(config.device)
        backed_up: tuple[MemoryTag, ...] = ("weights",) if config.weights_cpu_backup else ()
        self._device_cache = DeviceCache(self._module, synchronize=lambda: self._runner.synchronize())
        self._residency = ComponentResidencyManager(
            config.device, device_cache=self._device_cache, backed_up=backed_up
        )
        loaded, pool, routing, _ = build_components(
            config, self._residency, start.folder, self.parallel, sizes, start.sharing[rank]
        )
        runner = build_runner(config, loaded, pool, routing)
        self._loaded, self._runner, self._graphs = loaded, runner, runner.graphs
        self._pages = build_page_store(config, pool, routing, runner.on_stream)
        self.steps_end_at_once = loaded.device.type == "cpu"
        self._released: set[MemoryTag] = set()
        write_stream = write_stream_of(loaded.device, runner.on_stream)
        self._groups = WeightsUpdateGroups(
            loaded.device, wake, interface=config.group_interface, write_stream=write_stream
        )
        self.updates = WorkerUpdates(config, loaded, runner, self._groups, write_stream, wake)
        self._device_cache.empty("start")

    def memory(self) -> Memory:
        reading = DeviceMemoryReading.of(self._module)
        return Memory(
            reserved=reading.reserved,
            allocated=reading.allocated,
            available=get_available_memory(self._config.device),
        )

    def execute(self, step: msgspec.Raw, *frames: memoryview) -> ForwardOutput:
        """Launch a step: the one call that is answered later, when its output has been fetched."""
        return self._runner.execute(decode_batch(step, frames[0]))

    def synchronize(self) -> None:
        self._runner.synchronize()

    def set_last_tokens(self, slots: list[int], tokens: list[int]) -> None:
        self._runner.set_last_tokens(np.asarray(slots, np.int64), np.asarray(tokens, np.int32))

    def copy_pages(self, method: str, sources: list[int], targets: list[int]) -> None:
        """Call a method of this rank's part of the KV tier."""
        getattr(self._pages, method)(sources, targets)

    def recover(self) -> None:
        """Form the group again after a failed step. Graphs hold its connections."""
        if self._graphs is not None:
            self._graphs.drop()
        self.parallel.reset()

    def empty(self, place: EmptyCachePlace) -> tuple[int, int]:
        self.updates.collect()
        report = self._device_cache.empty(place)
        return report.reserved_before, report.reserved_after

    def capture(self) -> Operation:
        return self._advance(self._graphs.capture() if self._graphs is not None else iter(()))

    def keep(self, tags: list[MemoryTag]) -> Operation:
        """Copy the values of those tags to the host that are backed up."""
        yield from self._advance(self._residency.keep([tag for tag in tags if tag not in self._released]))

    def give_up(self, tags: list[MemoryTag]) -> Operation:
        """Drop the copies of these tags, which are not released after all."""
        self._residency.give_up([tag for tag in tags if tag not in self._released])
        yield from ()

    def release(self, tags: list[MemoryTag]) -> Operation:
        if self._graphs is not None and "cuda_graph" in tags:
            self._graphs.drop()
        if "weights" in tags:
            self._loaded.loader.forget_written()
        for _ in self._residency.release([tag for tag in tags if tag not in self._released]):
            yield False
        self._released.update(tags)
        self._device_cache.empty("release")

    def resume(self, tags: list[MemoryTag]) -> Operation:
        yield from self._advance(self._residency.resume([tag for tag in tags if tag in self._released]))
        self._released.difference_update(tags)

    def checksums(self) -> Operation:
        work = checksums(self._loaded.model)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value
            yield False

    def read(self, names: list[str]) -> Operation:
        slots, found = self._loaded.model.weight_slots(), []
        for name in names:
            with self._runner.on_stream():
                found.append(Held.of(slots[name]))
            yield False
        return found

    def reset_tensors(self) -> Operation:
        for slot, start, rows in garbage(self._loaded.model):
            with self._runner.on_stream():
                slot.write(rows, start)
            yield False
        self._runner.synchronize()

    def write_adapter(self, slot: int, described: list[SentFactors], *frames: memoryview) -> Operation:
        """Write this rank's part of an adapter into a slot that no step reads."""
        assert self._loaded.adapters is not None, "rank 0 has adapters"
        return self._advance(self._loaded.adapters.write(slot, received(described, frames)))

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a trainer's process group, in which this worker's rank is its own behind rank 0's."""
        request.rank_offset += self._rank
        group = self._groups.join(request)
        try:
            while not group.joined():
                yield True
        except BaseException:
            self._groups.forget(group)
            raise

    def leave_group(self, name: str, reason: str | None) -> Operation:
        """Leave a process group, or with a ``reason`` keep it as one that is broken."""
        if reason is not None:
            self._groups.out_of_step(name, reason)
            return
        try:
            group, limit = self._groups.leave(name), monotonic() + LEAVE_S
        except CaesuraError:  # unknown: rank 0 alone is in a group in which it sends
            return
        while group.is_leaving and monotonic() < limit:
            yield True

    def _advance(self, steps: Iterator[None]) -> Operation:
        while True:
            with self._runner.on_stream():
                if next(steps, True):
                    break
            yield False
        self._runner.synchronize()
