"""Components that come and go by strategy: their values, their memory, shortages, copies and backups."""

import gc
import logging
import os
import re
import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.faults import full_disk
from support.moving_components import (
    CPU,
    LAYERS,
    MIB,
    PLACES,
    CountingHost,
    Device,
    Model,
    accelerator,
    emptied,
    exhaust,
    host,
)
from support.properties import examples

from caesura.io_struct import CaesuraError
from caesura.scheduler.memory import residency as residency_module
from caesura.scheduler.memory.device_memory import empty_device_cache
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.host_copy import FileCopy, PinnedCopy
from caesura.scheduler.memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    ResidentStrategy,
)
from caesura.scheduler.memory.residency import ComponentResidencyManager, allocate
from caesura.scheduler.memory.storage import MappedComponent, StorageComponent

linux = pytest.mark.skipif(sys.platform != "linux", reason="files and RssAnon are Linux's")
offloaded = pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])


def shortage(steps):
    with pytest.raises(CaesuraError) as caught:
        exhaust(steps)
    assert caught.value.code == "out_of_memory"
    return caught.value.detail


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize(
    ("strategy", "layers", "leaves"),
    [
        (ResidentStrategy(), LAYERS, False),
        (ComponentOffloadStrategy(), LAYERS, True),
        *((LayerwiseOffloadStrategy(window=n), min(n, LAYERS), True) for n in (1, 2, 3, LAYERS, LAYERS + 3)),
    ],
)
def test_a_request_has_on_the_device_what_its_strategy_says(make, strategy, layers, leaves):
    manager = make()
    model = Model(manager, strategy)
    total, peak = sum(tensor.nbytes for tensor in model.tensors), model.head.nbytes + layers * 8000
    assert (manager.nbytes("model"), manager.still_to_come) == (total, 0)
    assert strategy.peak_bytes(model.component) == peak
    if make is accelerator:  # of the host's memory pages are counted
        assert manager.registered_bytes == total
    assert [model.request(passes=2) for _ in range(3)][1:] == [peak] * 2
    assert emptied(manager) == (3 if leaves else 0), "once a request"
    assert make is not accelerator or manager.registered_bytes == (0 if leaves else total)
    assert model.component.device_bytes == (0 if leaves else total)
    assert manager.still_to_come == (peak if leaves else 0), "nobody else may take what it needs"
    manager.close()


def test_the_next_layer_comes_while_one_is_computed():
    manager = accelerator()
    model = Model(manager, LayerwiseOffloadStrategy())
    model.request()
    at_layer = manager.use("model")
    at_layer(0)
    model.check(0)
    side = manager.module.side
    assert len(side.pending) == 2
    assert not model.layers[1][0].any()
    waits = side.waited_for_others
    at_layer(1)
    model.check(1)
    assert side.waited_for_others == waits + 1, "a copy waits for who used that memory before"


@linux
@offloaded
def test_the_system_really_gets_the_memory(strategy):
    manager = ComponentResidencyManager(CPU)
    gc.collect()
    empty_device_cache(HOST)
    nothing, allocated = HOST.memory_reserved(), HOST.memory_allocated()
    model = Model(manager, strategy, elements=2 * MIB)
    full = HOST.memory_reserved()

    def expect_gone() -> None:
        assert manager.registered_bytes == 0
        left = HOST.memory_reserved() - nothing
        assert left < 8 * MIB, f"malloc has handed out {HOST.memory_allocated() - allocated} of them"

    assert full - nothing > 84 * MIB
    assert manager.registered_bytes > 84 * MIB
    model.request()
    expect_gone()
    away = HOST.memory_reserved()
    exhaust(manager.bring(["model"]))
    present = HOST.memory_reserved() - away
    assert present > (84 * MIB if strategy.kind == "offload" else 20 * MIB)
    assert present < (110 * MIB if strategy.kind == "offload" else 56 * MIB)
    model.one_pass()
    exhaust(manager.leave(["model"]))
    expect_gone()
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_the_cache_is_emptied_when_something_has_left(make):
    manager = make()
    model = Model(manager, ComponentOffloadStrategy())
    manager.register("small", ComponentOffloadStrategy(preserve=False))
    with manager.component("small"):
        allocate((10,), torch.float32, CPU)
    for _ in range(3):
        exhaust(manager.bring(["model", "small"]))
        model.one_pass()
    assert emptied(manager) == 0, "a stage boundary is no release point"
    exhaust(manager.leave(["model", "small"]))
    assert emptied(manager) == 1

    manager.use("small")
    exhaust(manager.leave(["small"]))
    assert emptied(manager) == 1, "it is not memory-intensive"
    exhaust(manager.leave([]))
    assert emptied(manager) == 1, "nothing was used"
    manager.close()


def test_the_log_says_what_moved_and_how_long_that_took(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="caesura")
    now = [5.0]

    def read() -> float:
        now[0] += 3.0
        return now[0]

    monkeypatch.setattr(residency_module, "perf_counter", read)
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    with manager.component("weights"):
        for _ in range(3):
            allocate((10,), torch.float32, CPU)
    steps = {"leave": 0, "release": 0}
    for _ in manager.release(["weights"]):
        steps["release" if any("leave model" in each for each in caplog.messages) else "leave"] += 1
        now[0] += 60.0
    assert steps["release"] >= 3
    took = {kind: 3000.0 * (count + 1) for kind, count in steps.items()}
    sizes = {kind: manager.nbytes(name) for kind, name in (("leave", "model"), ("release", "weights"))}
    assert caplog.messages[:2] == [
        f"leave model offload: {sizes['leave']} bytes, {took['leave']:.1f} ms",
        f"release weights resident: {sizes['release']} bytes, {took['release']:.1f} ms",
    ]
    caplog.clear()
    exhaust(manager.resume(["weights"]))
    model.request()
    said = [re.sub(r", [\d.]+ ms", "", each) for each in caplog.messages if " model" in each]
    assert said[-3:] == [
        f"arrive model offload: {sizes['leave']} bytes",
        f"leave model offload: {sizes['leave']} bytes",
        "emptied model: 0 bytes",
    ]


@pytest.mark.parametrize("share,emptied", [(1.5, 1), (0.5, 0)])
def test_a_large_component_is_memory_intensive(share, emptied):
    size = Model(accelerator(), ComponentOffloadStrategy()).manager.nbytes("model")
    device = Device(total=int(size / residency_module.LARGE_SHARE / share))
    Model(accelerator(device), ComponentOffloadStrategy(), memory_intensive=False).request()
    assert device.emptied == emptied


@pytest.mark.parametrize("platform,mapped", [("linux", True), ("darwin", False), ("win32", False)])
def test_only_linux_maps_in_place_of_the_allocator(monkeypatch, platform, mapped):
    with monkeypatch.context() as patch:
        patch.setattr(residency_module.sys, "platform", platform)
        manager = ComponentResidencyManager(CPU)
    assert manager.in_allocator is not mapped
    assert accelerator().in_allocator
    assert not ComponentResidencyManager(CPU, make_component=MappedComponent).in_allocator


def test_copies_of_an_accelerator_are_kept_in_memory():
    module = CountingHost()
    assert isinstance(ComponentResidencyManager("xpu", device_module=module).make_copy(), PinnedCopy)
    assert isinstance(ComponentResidencyManager("cpu", device_module=Device()).make_copy(), PinnedCopy)
    manager = ComponentResidencyManager("cpu", device_module=module)
    assert isinstance(manager.make_copy(), FileCopy)
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_a_backed_up_tag_returns_with_its_last_values(make):
    manager = make(backed_up=["weights"])
    tensors = {}
    for tag in ("weights", "kv_cache"):
        with manager.component(tag):
            tensors[tag] = [allocate((300, 7), torch.float32, CPU) for _ in range(3)]
            allocate((0, 7), torch.float32, CPU)
    for round_ in (1.0, 2.0):
        for number, tensor in enumerate((*tensors["weights"], *tensors["kv_cache"])):
            tensor.fill_(round_ + number / 8)
        exhaust(manager.keep(["weights", "kv_cache"]))
        assert (manager.backup_bytes("weights"), manager.backup_bytes("kv_cache")) == (3 * 300 * 7 * 4, 0)
        exhaust(manager.release(["weights", "kv_cache"]))
        exhaust(manager.resume(["kv_cache"]))
        assert manager.backup_bytes("weights") > 0
        exhaust(manager.resume(["weights"]))
        assert manager.backup_bytes("weights") == 0
        for number, tensor in enumerate(tensors["weights"]):
            assert bool((tensor == round_ + number / 8).all())
        assert not any(tensor.any() for tensor in tensors["kv_cache"])


def test_a_resume_counts_components_that_come_with_it():
    manager = accelerator()
    model = Model(manager, ResidentStrategy())
    with manager.component("weights"):
        allocate((1000,), torch.float32, CPU)
    exhaust(manager.release(["kv_cache"]))
    assert model.component.device_bytes == manager.nbytes("model")
    exhaust(manager.release(["weights"]))
    assert model.component.device_bytes == 0
    needed = manager.nbytes("model") + 4000
    manager.module.free = needed - 1
    assert shortage(manager.resume(["weights"])) == {"needed_bytes": needed, "free_bytes": needed - 1}
    assert model.component.device_bytes == 0


def test_a_shortage_is_found_before_anything_is_brought():
    manager = host()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()
    needed = manager.nbytes("model")
    manager.module.free = needed - 1
    assert shortage(manager.bring(["model"])) == {"needed_bytes": needed, "free_bytes": needed - 1}
    assert model.component.device_bytes == 0
    manager.module.free = None
    model.request()
    manager.close()


@offloaded
def test_an_allocator_that_refuses_takes_nothing(strategy):
    class Refusing(StorageComponent):
        def resume(self):
            for step in super().resume():
                if refusing and self.tensors[0] is model.layers[0][1]:
                    raise RuntimeError("out of memory")
                yield step

    refusing = False
    manager = ComponentResidencyManager(CPU, make_component=Refusing, device_module=Device())
    model = Model(manager, strategy)
    model.request()
    refusing = True
    shortage(manager.bring(["model"]))
    assert model.layers[0][0].untyped_storage().nbytes() == 0, "the part that failed gave back its first half"
    refusing = False
    exhaust(manager.leave(["model"]))
    model.request()


@linux
@offloaded
def test_an_unreadable_copy_leaves_its_part_offloaded(strategy):
    manager = host()
    model = Model(manager, strategy)
    model.request()
    file = model.component.units[2]._copy._file
    values = os.pread(file, 1 << 20, 0)
    os.truncate(file, len(values) // 2)
    with pytest.raises(OSError, match="the saved copy ends"):
        model.request()
    assert not model.layers[1][0].any()
    os.pwrite(file, values, 0)
    exhaust(manager.leave(["model"]))
    model.request(passes=2)
    manager.close()


@linux
def test_a_copy_that_cannot_be_written_can_be_written_later():
    manager = host()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()
    with full_disk(limit=0), pytest.raises(OSError, match="too large"):
        model.write(3, 50)
    model.write(3, 50)
    model.request()
    manager.close()


@settings(max_examples=examples(40), stateful_step_count=30)
class AnyOrder(RuleBasedStateMachine):
    """Any order of verbs, on both kinds of places: values survive, and the account of bytes is exact."""

    @initialize(
        make=st.sampled_from([host, accelerator] if sys.platform == "linux" else [accelerator]),
        strategy=st.one_of(
            st.builds(ResidentStrategy),
            st.builds(ComponentOffloadStrategy),
            st.builds(LayerwiseOffloadStrategy, window=st.integers(1, LAYERS + 1)),
        ),
    )
    def build(self, make, strategy):
        self.manager, self.strategy = make(), strategy
        self.model = Model(self.manager, strategy)
        with self.manager.component("weights"):
            self.policy = allocate((10,), torch.float32, CPU)
        self.released = False

    def teardown(self):
        self.manager.close()

    @precondition(lambda self: not self.released)
    @rule()
    def use_all(self):
        self.model.one_pass()

    @precondition(lambda self: not self.released)
    @rule(layers=st.integers(0, LAYERS), steps=st.integers(0, 9))
    def give_up(self, layers, steps):
        bringing = self.manager.bring(["model"])
        for _ in range(steps):
            next(bringing, None)
        bringing.close()
        at_layer = self.manager.use("model")
        for number in range(layers):
            at_layer(number)
            self.model.check(number)

    @precondition(lambda self: not self.released)
    @rule()
    def leave(self):
        exhaust(self.manager.leave(["model"]))

    @rule(data=st.data(), value=st.integers(1, 200))
    def write(self, data, value):
        self.model.write(data.draw(st.integers(0, 2 * LAYERS)), value)

    @precondition(lambda self: not self.released)
    @rule()
    def release(self):
        self.policy.fill_(7.0)
        exhaust(self.manager.release(["weights"]))
        self.released = True
        assert self.manager.registered["model"].device_bytes == 0

    @precondition(lambda self: self.released)
    @rule()
    def resume(self):
        exhaust(self.manager.resume(["weights"]))
        self.released = False
        resident = self.strategy.kind == "resident"
        assert self.model.component.device_bytes == (self.manager.nbytes("model") if resident else 0)
        assert not self.policy.any(), "it has no copy"

    @invariant()
    def every_value_can_be_read(self):
        component = self.model.component
        for tensor, value in zip(self.model.tensors, self.model.values, strict=True):
            assert bool((component.values(tensor) == value).all())

    @invariant()
    def what_is_away_takes_no_memory(self):
        for unit in self.model.component.units:
            if unit.on_device and not unit.is_coming:
                assert all(bool(tensor.any()) for tensor in unit.tensors)
            if not unit.on_device:
                assert not any(t.untyped_storage().nbytes() and bool(t.any()) for t in unit.tensors)


TestAnyOrder = AnyOrder.TestCase
