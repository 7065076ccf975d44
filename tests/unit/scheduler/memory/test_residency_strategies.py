"""Components that come and go by strategy."""

import gc
import logging
import re
import sys

import pytest
import torch
from support.moving_components import (
    CPU,
    LAYERS,
    MIB,
    PLACES,
    STRATEGIES,
    Device,
    Model,
    accelerator,
    emptied,
    exhaust,
    host,
)

from caesura.scheduler.memory import residency as residency_module
from caesura.scheduler.memory.device_memory import empty_device_cache
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    ResidentStrategy,
)
from caesura.scheduler.memory.residency import (
    ComponentResidencyManager,
    allocate,
)


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_there_when_a_layer_is_computed(make, strategy):
    model = Model(make(), strategy())
    total = sum(tensor.nbytes for tensor in model.tensors)
    assert model.manager.nbytes("model") == total
    mosts = [model.request(passes=2) for _ in range(3)]
    per_layer = 8000
    expected = {"resident": total, "offload": total, "layerwise": model.head.nbytes + 2 * per_layer}[
        strategy.kind
    ]
    assert mosts[1:] == [expected] * 2
    left = 0 if strategy is not ResidentStrategy else total
    assert model.manager.registered["model"].device_bytes == left
    model.manager.close()


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_to_offloaded_components_come_back(make, strategy):
    manager = make()
    model = Model(manager, strategy())
    numbers = range(len(model.tensors))
    for first in (100, 120, 140):
        for number in numbers:
            model.write(number, first + number)
        assert [model.component.values(each).unique().tolist() for each in model.tensors] == [
            [first + number] for number in numbers
        ]
        model.request()
    at_layer = manager.use("model")
    at_layer(0)
    for number in numbers:  # of layerwise components the next layer is on its way, those behind it are away
        model.write(number, 7 + number)
    for layer in range(LAYERS):
        at_layer(layer)
        model.check(layer)
    exhaust(manager.leave(["model"]))
    model.request()
    manager.close()


@pytest.mark.skipif(sys.platform != "linux", reason="files are Linux's way")
def test_a_copy_that_cannot_be_written_raises_and_can_be_written_again(monkeypatch):
    manager = host()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()

    def full(file, data, offset):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        with pytest.raises(OSError, match="no space"):
            model.write(3, 50)
    model.write(3, 50)
    model.request()
    manager.close()


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("window", [1, 2, 3, LAYERS, LAYERS + 3])
def test_a_window_is_never_exceeded(make, window):
    model = Model(make(), LayerwiseOffloadStrategy(window=window))
    model.request()
    strategy = LayerwiseOffloadStrategy(window=window)
    peak = strategy.peak_bytes(model.component)
    assert peak == model.head.nbytes + min(window, LAYERS) * 8000
    assert model.request(passes=3) == peak
    assert model.manager.still_to_come == peak, "nobody else may take what it needs"
    model.manager.close()


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


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])
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
def test_a_resident_component_stays_until_its_memory_is_released_and_comes_back(make):
    manager, tensors = make(), {}
    for number, name in enumerate(("text_encoder", "transformer", "vae"), start=1):
        manager.register(name, ResidentStrategy())
        with manager.component(name):
            tensors[name] = allocate((1000,), torch.float32, CPU).fill_(number)
    for name in tensors:
        exhaust(manager.bring([name]))
        manager.use(name)(0)
    exhaust(manager.leave(tensors))
    assert emptied(manager) == 0
    assert [manager.registered[name].device_bytes for name in tensors] == [4000] * 3
    exhaust(manager.release(["weights"]))
    assert [manager.registered[name].device_bytes for name in tensors] == [0] * 3
    exhaust(manager.resume(["weights"]))
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[1], [2], [3]]
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_the_cache_is_emptied_when_something_has_left_and_at_no_other_time(make):
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


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(ResidentStrategy(), 0), (ComponentOffloadStrategy(), 1), (LayerwiseOffloadStrategy(), 1)],
)
def test_how_often_a_strategy_gives_up_the_device(strategy, expected):
    manager = accelerator()
    model = Model(manager, strategy)
    model.request(passes=3)
    assert emptied(manager) == expected


def test_the_time_of_a_move_is_work_and_not_what_happened_between(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="caesura")
    now = [5.0]

    def read() -> float:
        now[0] += 3.0
        return now[0]

    monkeypatch.setattr(residency_module, "perf_counter", read)
    manager = accelerator()
    Model(manager, ComponentOffloadStrategy())
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


def test_the_log_says_what_moved(caplog):
    caplog.set_level(logging.DEBUG, logger="caesura.scheduler.memory.residency")
    model = Model(accelerator(), ComponentOffloadStrategy())
    model.request()
    model.request()
    total = model.manager.nbytes("model")
    assert [re.sub(r", [\d.]+ ms", "", message) for message in caplog.messages] == [
        f"leave model offload: {total} bytes",
        "emptied model: 0 bytes",
        f"arrive model offload: {total} bytes",
        f"leave model offload: {total} bytes",
        "emptied model: 0 bytes",
    ]


@pytest.mark.parametrize("share,emptied", [(1.5, 1), (0.5, 0)])
def test_a_large_component_is_memory_intensive_whatever_was_registered(share, emptied):
    size = Model(accelerator(), ComponentOffloadStrategy()).manager.nbytes("model")
    device = Device(total=int(size / residency_module.LARGE_SHARE / share))
    Model(accelerator(device), ComponentOffloadStrategy(), memory_intensive=False).request()
    assert device.emptied == emptied
