"""Components that come and go by strategy."""

import gc
import logging
import sys

import pytest
import torch
from support.moving_components import (
    CPU,
    LAYERS,
    MIB,
    PLACES,
    STRATEGIES,
    USE,
    Device,
    Model,
    accelerator,
    emptied,
    events,
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
    TRACED_EVENTS,
    ComponentResidencyManager,
    ComponentUse,
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
    assert model.manager.device_bytes("model") == left
    model.manager.close()


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_to_offloaded_components_come_back(make, strategy):
    """Also what is written while it is there, on its way, or was never away; and all of it can be read
    meanwhile.
    """
    manager = make()
    model = Model(manager, strategy())
    component = manager._registered["model"]
    numbers = range(len(model.tensors))
    for first in (100, 120, 140):
        for number in numbers:
            model.write(number, first + number)
        assert [component.values(each).unique().tolist() for each in model.tensors] == [
            [first + number] for number in numbers
        ]
        model.request()
    manager.begin_request("r")
    at_layer = manager.use("r", USE)
    at_layer(0)
    for number in numbers:  # of layerwise components the next layer is on its way, those behind it are away
        model.write(number, 7 + number)
    for layer in range(LAYERS):
        at_layer(layer)
        model.check(layer)
    exhaust(manager.finish_use(USE))
    exhaust(manager.finish_request("r"))
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
    peak = strategy.peak_bytes(model.manager._registered["model"])
    assert peak == model.head.nbytes + min(window, LAYERS) * 8000
    assert model.request(passes=3) == peak
    assert model.manager.still_to_come == peak, "nobody else may take what it needs"
    model.manager.close()


def test_the_next_layer_comes_while_one_is_computed():
    manager = accelerator()
    model = Model(manager, LayerwiseOffloadStrategy())
    model.request()
    manager.begin_request("r")
    at_layer = manager.use("r", USE)
    at_layer(0)
    model.check(0)
    side = manager._module.side
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
    manager.begin_request("r")
    exhaust(manager.before_stage("r", [USE]))
    present = HOST.memory_reserved() - away
    assert present > (84 * MIB if strategy.kind == "offload" else 20 * MIB)
    assert present < (110 * MIB if strategy.kind == "offload" else 56 * MIB)
    model.one_pass()
    exhaust(manager.finish_request("r"))
    expect_gone()
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_a_component_without_options_stays_until_its_memory_is_released_and_comes_back(make):
    manager, tensors = make(), {}
    for number, name in enumerate(("text_encoder", "transformer", "vae"), start=1):
        manager.register(name)
        with manager.component(name):
            tensors[name] = allocate((1000,), torch.float32, CPU).fill_(number)
    manager.begin_request("image")
    for name in tensors:
        use = ComponentUse(name=name)
        exhaust(manager.before_stage("image", [use]))
        manager.use("image", use)(0)
        exhaust(manager.finish_use(use))
    exhaust(manager.finish_request("image"))
    assert emptied(manager) == 0
    assert [manager.device_bytes(name) for name in tensors] == [4000] * 3
    exhaust(manager.release(["weights"]))
    assert [manager.device_bytes(name) for name in tensors] == [0] * 3
    exhaust(manager.resume(["weights"]))
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[1], [2], [3]]
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_the_cache_is_emptied_when_something_has_left_and_at_no_other_time(make):
    manager = make()
    model = Model(manager, ComponentOffloadStrategy())
    manager.register("small", ComponentOffloadStrategy(preserve=False), tag="weights")
    with manager.component("small"):
        allocate((10,), torch.float32, CPU)
    small = ComponentUse(name="small")
    manager.begin_request("r")
    for _ in range(3):
        exhaust(manager.before_stage("r", [USE, small]))
        model.one_pass()
        exhaust(manager.finish_use(small))
    assert emptied(manager) == 0, "a stage boundary is no release point"
    exhaust(manager.finish_request("r"))
    assert emptied(manager) == 1
    assert [name for _, name in events(manager, "leave", "emptied")] == ["model", "small", "model"]

    manager.begin_request("r")
    manager.use("r", small)
    exhaust(manager.finish_request("r"))
    assert emptied(manager) == 1, "it is not memory-intensive"
    manager.begin_request("r")
    exhaust(manager.finish_request("r"))
    assert emptied(manager) == 1, "nothing was used"
    manager.close()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (ResidentStrategy(), 0),
        (ComponentOffloadStrategy(), 1),
        (ComponentOffloadStrategy(keep_after_use=False), 3),
        (LayerwiseOffloadStrategy(), 1),
        (
            LayerwiseOffloadStrategy(keep_after_use=False),
            4,
        ),  # of layers, the end of the request counts as well
    ],
)
def test_how_often_a_strategy_gives_up_the_device(strategy, expected):
    manager = accelerator()
    model = Model(manager, strategy)
    model.request(passes=3)
    assert emptied(manager) == expected


def test_a_use_that_keeps_nothing_leaves_nothing():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy(keep_after_use=False))
    manager.begin_request("r")
    model.one_pass()
    assert manager.device_bytes("model") == 0
    model.one_pass()
    assert manager.device_bytes("model") == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_warm_up_keeps_what_the_strategy_says(keep):
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy(keep_on_warm_up=keep))
    model.request(warm_up=True)
    assert manager.device_bytes("model") == (manager.nbytes("model") if keep else 0)
    model.request()
    assert manager.device_bytes("model") == 0


def test_components_in_use_stay():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    for request in ("r", "s"):
        manager.begin_request(request)
        model.one_pass(request)
    exhaust(manager.finish_request("r"))
    assert manager.device_bytes("model") == manager.nbytes("model")
    exhaust(manager.finish_request("s"))
    assert manager.device_bytes("model") == 0


def test_a_component_that_is_not_there_is_traced():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    decoder = ComponentUse(name="vae", memory_intensive=True)
    manager.begin_request("r")
    exhaust(manager.before_stage("r", [decoder, USE]))
    manager.use("r", decoder)(0)
    model.one_pass()
    exhaust(manager.finish_use(decoder))
    exhaust(manager.finish_request("r"))
    assert events(manager, "missing") == [("missing", "vae")] * 2
    assert [
        (e.detail, e.nbytes) for e in manager.trace if (e.event, e.component) == ("finish_use", "vae")
    ] == [("missing", 0)]
    assert not any(e.ms or e.nbytes for e in manager.trace if e.component == "vae")


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
        steps["release" if events(manager, "leave") else "leave"] += 1
        now[0] += 60.0
    ms = {event.event: event.ms for event in manager.trace}
    assert steps["release"] >= 3
    assert ms == {kind: pytest.approx(3000.0 * (count + 1)) for kind, count in steps.items()}
    size = manager.nbytes("weights")
    assert f"release weights resident: {size} bytes, {ms['release']:.1f} ms" in caplog.messages


def test_every_event_says_what_moved():
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()
    model.request()
    total = manager.nbytes("model")
    assert [(e.event, e.component, e.strategy, e.nbytes, e.detail) for e in manager.trace] == [
        ("begin_request", "r", "", 0, ""),
        ("use", "model", "offload", total, ""),
        ("finish_use", "model", "offload", 0, ""),
        ("keep", "model", "offload", total, "after_use"),
        ("leave", "model", "offload", total, ""),
        ("emptied", "model", "", 0, "after_release"),
        ("finish_request", "r", "", 0, ""),
        ("begin_request", "r", "", 0, ""),
        ("arrive", "model", "offload", total, ""),
        ("use", "model", "offload", total, ""),
        ("finish_use", "model", "offload", 0, ""),
        ("keep", "model", "offload", total, "after_use"),
        ("leave", "model", "offload", total, ""),
        ("emptied", "model", "", 0, "after_release"),
        ("finish_request", "r", "", 0, ""),
    ]
    assert all(e.ms >= 0 and e.at > 1e9 for e in manager.trace)
    assert {e.event for e in manager.trace if e.ms} == {"arrive", "leave", "emptied"}
    for _ in range(TRACED_EVENTS):
        manager.begin_request("r")
    assert len(manager.trace) == TRACED_EVENTS


def kept(manager: ComponentResidencyManager) -> list[str]:
    return [event.detail for event in manager.trace if event.event == "keep"]


def test_refusals_say_why():
    manager = accelerator()
    Model(manager, ComponentOffloadStrategy(keep_on_warm_up=True)).request(warm_up=True)
    assert kept(manager) == ["after_use", "warm_up"]
    manager = accelerator()
    Model(manager, ResidentStrategy()).request()
    assert kept(manager) == ["after_use", "resident"]
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy(keep_after_use=False))
    for request in ("r", "s"):
        manager.begin_request(request)
        model.one_pass(request)
    exhaust(manager.finish_request("r"))
    assert kept(manager) == ["in_use"]


def test_the_end_of_a_request_passes_over_what_it_has_not_used():
    manager = accelerator()
    manager.register("unused", ComponentOffloadStrategy(), tag="weights")
    with manager.component("unused"):
        allocate((10,), torch.float32, CPU)
    Model(manager, ComponentOffloadStrategy()).request()
    assert manager.device_bytes("model") == 0


@pytest.mark.parametrize("share,emptied", [(1.5, 1), (0.5, 0)])
def test_a_large_component_is_memory_intensive_whatever_its_label_says(share, emptied):
    size = Model(accelerator(), ComponentOffloadStrategy()).manager.nbytes("model")
    device = Device(total=int(size / residency_module.LARGE_SHARE / share))
    model = Model(accelerator(device), ComponentOffloadStrategy())
    model.use = ComponentUse(name="model", memory_intensive=False)
    model.request()
    assert device.emptied == emptied
