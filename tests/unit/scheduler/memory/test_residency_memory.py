"""Memory of components that come and go: shortages, releases by tag, copies and backups."""

import sys

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.moving_components import (
    CPU,
    LAYERS,
    PLACES,
    STRATEGIES,
    CountingHost,
    Device,
    Model,
    accelerator,
    exhaust,
    host,
)
from support.properties import examples

from caesura.io_struct import CaesuraError
from caesura.scheduler.memory import residency as residency_module
from caesura.scheduler.memory.host_copy import FileCopy, PinnedCopy
from caesura.scheduler.memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    ResidentStrategy,
)
from caesura.scheduler.memory.residency import (
    ComponentResidencyManager,
    allocate,
)
from caesura.scheduler.memory.storage import MappedComponent, StorageComponent


def test_admissible_memory_is_that_of_offloaded_components():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    total = manager.nbytes("model")
    assert (manager.still_to_come, manager.registered_bytes) == (0, total)
    model.request()
    assert (manager.still_to_come, manager.registered_bytes) == (total, 0)


def test_the_allocator_knows_of_storage_and_not_of_mappings():
    assert accelerator().in_allocator
    assert not ComponentResidencyManager(CPU, make_component=MappedComponent).in_allocator


@pytest.mark.parametrize("platform,mapped", [("linux", True), ("darwin", False), ("win32", False)])
def test_only_linux_maps_what_is_allocated(monkeypatch, platform, mapped):
    monkeypatch.setattr(residency_module.sys, "platform", platform)
    manager = ComponentResidencyManager(CPU)
    monkeypatch.undo()
    assert manager.in_allocator is not mapped


def test_one_byte_that_is_not_free_is_a_shortage():
    manager = host()
    manager.register("byte", ComponentOffloadStrategy())
    with manager.component("byte"):
        tensor = allocate((1,), torch.uint8, CPU)
    manager.registered["byte"].divide([[tensor]])
    exhaust(manager.release(["weights"]))
    manager.module.free = 0
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.bring(["byte"]))
    assert caught.value.detail == {"needed_bytes": 1, "free_bytes": 0}
    manager.close()


def test_only_a_release_of_the_weights_takes_registered_components():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    exhaust(manager.release(["kv_cache"]))
    assert model.component.device_bytes == manager.nbytes("model")
    exhaust(manager.release(["weights"]))
    assert model.component.device_bytes == 0


def test_an_accelerator_without_streams_keeps_its_copies_in_memory():
    module = CountingHost()
    assert isinstance(ComponentResidencyManager("mps", device_module=module).make_copy(), PinnedCopy)
    assert isinstance(ComponentResidencyManager("cpu", device_module=Device()).make_copy(), PinnedCopy)
    manager = ComponentResidencyManager("cpu", device_module=module)
    assert isinstance(manager.make_copy(), FileCopy)
    manager.close()


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_release_by_tag_keeps_the_values(make, strategy):
    manager = make()
    model = Model(manager, strategy())
    with manager.component("weights"):
        policy = allocate((1000,), torch.float32, CPU).fill_(7.0)
    for _ in range(2):
        exhaust(manager.release(["weights"]))
        assert manager.registered["model"].device_bytes == 0
        exhaust(manager.resume(["weights"]))
        assert not policy.any()
        resident = strategy is ResidentStrategy
        assert manager.registered["model"].device_bytes == (manager.nbytes("model") if resident else 0)
        model.request()
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


def test_resuming_counts_components_that_return_with_the_tag():
    manager = accelerator()
    Model(manager, ResidentStrategy())
    with manager.component("weights"):
        allocate((1000,), torch.float32, CPU)
    exhaust(manager.release(["weights"]))
    needed = manager.nbytes("model") + 4000
    manager.module.free = needed - 1
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.resume(["weights"]))
    assert caught.value.detail == {"needed_bytes": needed, "free_bytes": needed - 1}
    assert manager.registered["model"].device_bytes == 0


def test_a_shortage_is_found_before_anything_is_brought():
    manager = host()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()
    manager.module.free = 1234
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.bring(["model"]))
    assert caught.value.code == "out_of_memory"
    assert caught.value.detail == {"needed_bytes": manager.nbytes("model"), "free_bytes": 1234}
    assert manager.registered["model"].device_bytes == 0
    manager.module.free = None
    model.request()
    manager.close()


@pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])
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
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.bring(["model"]))
    assert caught.value.code == "out_of_memory"
    assert model.layers[0][0].untyped_storage().nbytes() == 0, "the part that failed gave back its first half"
    refusing = False
    exhaust(manager.leave(["model"]))
    model.request()


@pytest.mark.skipif(sys.platform != "linux", reason="files are Linux's way")
@pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])
def test_an_unreadable_copy_leaves_its_part_offloaded(strategy, monkeypatch):
    manager = host()
    model = Model(manager, strategy)
    model.request()
    load, failing = FileCopy.load, 3  # parts are read in order: the head, layers 0, 1, …

    def sometimes(self, tensors):
        nonlocal failing
        failing -= 1
        if failing == 0:
            raise OSError("input/output error")
        yield from load(self, tensors)

    monkeypatch.setattr(FileCopy, "load", sometimes)
    with pytest.raises(OSError, match="input/output"):
        model.request()
    assert not model.layers[1][0].any()
    exhaust(manager.leave(["model"]))
    model.request(passes=2)
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
        self.released = False
        self.moved = False

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
        exhaust(self.manager.release(["weights"]))
        self.released = True
        assert self.manager.registered["model"].device_bytes == 0

    @precondition(lambda self: self.released)
    @rule()
    def resume(self):
        exhaust(self.manager.resume(["weights"]))
        self.released = False

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
