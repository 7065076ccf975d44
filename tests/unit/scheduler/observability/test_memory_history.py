"""The record of memory events against a plain list, its bounds, and who holds the reserved bytes."""

import tracemalloc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock import clock_of
from support.properties import examples

from caesura.io_struct import MemoryByTag
from caesura.scheduler.memory import host
from caesura.scheduler.memory.device_memory import DeviceMemoryReading
from caesura.scheduler.memory.device_module import device_module_for
from caesura.scheduler.memory.host import resident_bytes
from caesura.scheduler.memory.residency import ComponentResidencyManager, allocate
from caesura.scheduler.memory.storage import MappedComponent, StorageComponent
from caesura.scheduler.observability.memory_history import (
    DETAIL_BYTES,
    SAMPLE_S,
    STEADY_BYTES,
    MemoryGauges,
    MemoryHistory,
    OwnBytes,
)

CPU = torch.device("cpu")
MIB = 1 << 20
linux = pytest.mark.skipif(device_module_for(CPU).memory_reserved() == 0, reason="needs /proc")


class Memory:
    """Memory whose size the test sets; counts how often somebody looks."""

    def __init__(self) -> None:
        self.reserved = 100 * MIB
        self.looks = 0

    def __call__(self, thorough):
        self.looks += thorough
        tags = dict.fromkeys(MemoryByTag.__struct_fields__, 0) | {"other": self.reserved}
        return DeviceMemoryReading(self.reserved, self.reserved // 2), MemoryByTag(**tags)


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["observability.memory_history"])


def all_events(history, page=7):
    events, more = [], True
    while more:
        found, more = history.events(events[-1].seq if events else 0, page)
        assert 0 < len(found) <= page
        events += found
    return events


@settings(max_examples=examples(60))
@given(
    capacity=st.integers(1, 9),
    stretches=st.sampled_from([2, 4, 6]),
    reserved=st.lists(st.integers(0, 1 << 40), max_size=150),
)
def test_the_ring_keeps_the_last_events(capacity, stretches, reserved):
    memory = Memory()
    history = MemoryHistory(memory, events=capacity, stretches=stretches)
    for number, memory.reserved in enumerate(reserved):
        history.note("pause" if number % 3 == 0 else "flush", str(number), returned=number)
    kept = min(capacity, len(reserved))
    lost = len(reserved) - kept
    events = all_events(history) if reserved else []
    assert [(e.seq, e.detail, e.reserved) for e in events] == [
        (n + 1, str(n), reserved[n]) for n in range(lost, len(reserved))
    ]
    assert history.events(len(reserved), 7) == ([], False)
    older = history.older(0)
    assert len(older) <= stretches
    assert sum(stretch.events for stretch in older) == lost
    at = 0
    for stretch in older:
        mine = range(at, at + stretch.events)
        values = reserved[at : at + stretch.events]
        expected = (min(values), max(values), values[-1], sum(n % 3 == 0 for n in mine), sum(mine))
        found = (stretch.reserved_min, stretch.reserved_max, stretch.reserved_last)
        assert (*found, stretch.pauses, stretch.returned) == expected
        at += stretch.events
    assert all(a.end <= b.start for a, b in pairwise(older))
    assert history.older(lost) == [], "a client that is past them does not get them again"


def test_nothing_grows_however_much_is_noted(memory, clock):
    history = MemoryHistory(memory, events=64, stretches=8)

    def run():
        for _ in range(700):
            clock.now += SAMPLE_S
            memory.reserved += 2 * STEADY_BYTES
            history.note("pause", "é" * 500)
            history.sample()

    run()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    run()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 2048, "the record's memory is all there from the start"


@linux
def test_the_record_takes_its_pages_at_the_start(memory):
    history = MemoryHistory(memory, events=1 << 15)
    reserved = device_module_for(CPU).memory_reserved()
    for _ in range(1 << 15):
        history.note("flush")
    assert device_module_for(CPU).memory_reserved() - reserved < MIB, "its eight megabytes were there before"


@pytest.mark.parametrize("text", ["x" * 300, "é" * 300, "ab" + "日本" * 100, "\udcff" * 200])
def test_a_long_detail_is_cut_between_characters(memory, text):
    history = MemoryHistory(memory)
    history.note("release", text)
    detail = history.events(0, 1)[0][0].detail
    assert 0 < len(detail.encode()) <= DETAIL_BYTES
    assert text.encode("utf-8", "backslashreplace").decode().startswith(detail)


def test_looks_at_steady_memory_are_one_event(memory, clock):
    history = MemoryHistory(memory)
    for _ in range(50):
        memory.reserved += 100 if memory.reserved % 200 else -100
        clock.now += SAMPLE_S
        history.sample()
    (event,), _ = history.events(0, 10)
    assert event.cause == "sample"
    assert event.until - event.at == pytest.approx(49 * SAMPLE_S)
    assert event.reserved == memory.reserved, "the last look's"
    history.note("pause")
    clock.now += SAMPLE_S
    history.sample()
    assert [e.cause for e in all_events(history)] == ["sample", "pause", "sample"]


def test_a_slow_drift_is_not_steady(memory, clock):
    history = MemoryHistory(memory)
    for _ in range(400):
        memory.reserved += STEADY_BYTES // 100
        clock.now += SAMPLE_S
        history.sample()
    events = all_events(history)
    assert 3 <= len(events) <= 5
    assert events[-1].reserved - events[0].reserved >= 2.9 * STEADY_BYTES


def test_readings_are_seconds_apart_while_steps_run(memory, clock):
    history = MemoryHistory(memory)
    for _ in range(1000):
        history.sample()
        clock.now += SAMPLE_S / 100
    assert memory.looks == 10
    history.note("flush")
    clock.now += 0.99 * SAMPLE_S
    history.sample()
    assert memory.looks == 11, "a command has just looked"
    history.note("pause")
    clock.now += 0.02 * SAMPLE_S
    history.note("continue")
    assert memory.looks == 11, "somebody waits for these"
    history.sample()
    assert memory.looks == 12
    history.note("continue", returned=0)
    assert memory.looks == 13, "the cache was emptied"


@pytest.mark.parametrize("end", ["continue", "lease_expiry"])
def test_the_residual_is_what_a_pause_left(memory, end):
    history = MemoryHistory(memory)
    history.note("pause", "in_place")
    memory.reserved += 7
    history.note("pause", "abort")  # another mode, the same pause
    memory.reserved += 4
    history.note(end)
    memory.reserved += 1000
    history.note("pause")
    memory.reserved -= 300
    history.note(end)
    history.note(end)
    assert [event.residual for event in all_events(history)] == [None, None, 11, None, -300, None]


def gauges_over(manager, module=None, **own):
    return MemoryGauges(module or device_module_for(CPU), manager, lambda: OwnBytes(**own))


def fill(manager, tag, nbytes, written):
    with manager.component(tag):
        tensor = allocate((nbytes,), torch.uint8, CPU)
    tensor[:written] = 1
    return tensor


@linux
def test_parts_are_what_has_been_written_and_add_up():
    manager = ComponentResidencyManager(CPU, make_component=MappedComponent)
    gauges = gauges_over(manager, derived=2 * MIB, graphs=3)
    fill(manager, "weights", 24 * MIB, 24 * MIB)
    kv = fill(manager, "kv_cache", 32 * MIB, 8 * MIB)
    reading, parts = gauges()
    assert sum(getattr(parts, tag) for tag in parts.__struct_fields__) == reading.reserved
    assert (parts.weights, parts.derived, parts.kv, parts.graphs) == (22 * MIB, 2 * MIB, 8 * MIB, 3)
    for _ in manager.release(["weights"]):
        pass
    reading, parts = gauges()
    assert (parts.weights, parts.derived, parts.kv) == (0, 0, 8 * MIB)
    assert sum(getattr(parts, tag) for tag in parts.__struct_fields__) == reading.reserved
    assert kv[0] == 1


@linux
def test_a_quick_look_counts_components_as_last_seen():
    manager = ComponentResidencyManager(CPU, make_component=MappedComponent)
    gauges = gauges_over(manager)
    kv = fill(manager, "kv_cache", 64 * MIB, 8 * MIB)
    assert gauges()[1].kv == 8 * MIB
    kv[: 32 * MIB] = 1
    reading, parts = gauges(thorough=False)
    assert parts.kv == 8 * MIB
    assert parts.other >= 16 * MIB
    assert sum(getattr(parts, tag) for tag in parts.__struct_fields__) == reading.reserved
    assert gauges()[1].kv == 32 * MIB


class Allocator:
    def __init__(self) -> None:
        self.reserved = self.allocated = 0

    def memory_reserved(self):
        return self.reserved

    def memory_allocated(self):
        return self.allocated


def test_components_of_the_allocator_are_not_workspace():
    module = Allocator()
    manager = ComponentResidencyManager(CPU, make_component=StorageComponent, device_module=module)
    gauges = gauges_over(manager, module)
    fill(manager, "weights", 40, 0)
    fill(manager, "kv_cache", 100, 0)
    module.reserved, module.allocated = 1000, 190
    _, parts = gauges()
    assert (parts.weights, parts.kv, parts.workspace, parts.runtime, parts.other) == (40, 100, 50, 0, 810)
    for _ in manager.release(["kv_cache"]):
        pass
    module.allocated = 90
    _, parts = gauges()
    assert (parts.kv, parts.workspace, parts.other) == (0, 50, 910)


@linux
def test_many_pages_are_looked_at_in_stretches(monkeypatch):
    component = MappedComponent(None)
    tensors = [component.allocate((24 * MIB,), torch.uint8, CPU) for _ in range(2)]
    tensors[0].fill_(1)
    tensors[1][: 12 * MIB] = 1
    exact = component.occupied_bytes()
    assert exact == 36 * MIB
    monkeypatch.setattr(host, "_LOOKED_AT", 48 * MIB // 4096 // 4)
    assert abs(component.occupied_bytes() - exact) <= 4 * MIB
    assert resident_bytes([]) == 0
