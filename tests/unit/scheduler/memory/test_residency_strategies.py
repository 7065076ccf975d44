"""Components that come and go by strategy: the same code over host memory with files and over a stand-in for an accelerator."""

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.properties import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from caesura.scheduler.memory.residency import (
    TRACED_EVENTS,
    ComponentResidencyManager,
    ComponentUse,
    allocate,
)
from caesura.scheduler.memory.storage import MappedComponent, StorageComponent

MIB = 1 << 20
CPU = torch.device("cpu")
USE = ComponentUse(name="model", memory_intensive=True)
LAYERS = 5


class Event:
    """Complete when what its stream had been given has been done."""

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self.target = stream.done + len(stream.pending)

    def query(self) -> bool:
        """Whoever polls gives the copies time: one is done at every look."""
        self.stream.run(1)
        return self.stream.done >= self.target


class Stream(TorchDispatchMode):
    """What is given to it while it is current happens later: when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Any] = []
        self.done = 0
        self.waited_for_others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, func
        self.pending.append(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def run(self, count: int) -> None:
        for work in self.pending[:count]:
            work()
            self.done += 1
        del self.pending[:count]

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for_others += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        event.stream.run(event.target - event.stream.done)

    def synchronize(self) -> None:
        self.run(len(self.pending))


class Device:
    """A device module with streams whose copies lag, and a count of how often its cache was emptied."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.emptied = 0
        self.side = Stream()
        self._compute = Stream()
        self._total = total

    def mem_get_info(self) -> tuple[int, int]:
        return self._total, self._total

    def Stream(self) -> Stream:  # noqa: N802 (torch's name)
        return self.side

    def current_stream(self) -> Stream:
        return self._compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with stream:
            yield

    def empty_cache(self) -> None:
        self.emptied += 1

    def memory_reserved(self) -> int:
        return 0

    def memory_allocated(self) -> int:
        return 0


class CountingHost:
    """The CPU's own module, with a count."""

    def __init__(self) -> None:
        self.emptied = 0

    def empty_cache(self) -> None:
        self.emptied += 1
        HOST.empty_cache()

    def __getattr__(self, name: str) -> Any:
        if name == "Stream":
            raise AttributeError(name)
        return getattr(HOST, name)


def host(**options: Any) -> ComponentResidencyManager:
    return ComponentResidencyManager(CPU, device_module=CountingHost(), **options)


def accelerator(device: Device | None = None, **options: Any) -> ComponentResidencyManager:
    return ComponentResidencyManager(
        CPU, make_component=StorageComponent, device_module=device or Device(), **options
    )


PLACES = [
    pytest.param(
        host, marks=pytest.mark.skipif(sys.platform != "linux", reason="files are Linux's way"), id="host"
    ),
    pytest.param(accelerator, id="streams"),
]
STRATEGIES = [ResidentStrategy, ComponentOffloadStrategy, LayerwiseOffloadStrategy]


def exhaust(steps: Iterator[None]) -> int:
    return sum(1 for _ in steps)


class Model:
    """A component of a head and layers, all of different values; ``head`` is in no layer."""

    def __init__(self, manager: ComponentResidencyManager, strategy: Any, elements: int = 1000) -> None:
        self.manager, self.use = manager, USE
        manager.register("model", strategy, tag="weights")
        with manager.component("model"):
            self.head = allocate((elements,), torch.float32, CPU)
            self.layers = [
                [allocate((elements,), torch.float32, CPU), allocate((2, elements), torch.bfloat16, CPU)]
                for _ in range(LAYERS)
            ]
        manager.divide("model", self.layers)
        self.values = [number + 1 for number in range(len(self.tensors))]
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.fill_(value)

    def write(self, number: int, value: int) -> None:
        """Overwrite a tensor wherever its values are, in two pieces of another dtype."""
        tensor, half = self.tensors[number], self.tensors[number].numel() // 2
        movable = self.manager._movables["model"]
        for start, count in ((0, half), (half, tensor.numel() - half)):
            movable.write(tensor, start, torch.full((count,), value, dtype=torch.float64))
        self.values[number] = value

    @property
    def tensors(self) -> list[Tensor]:
        return [self.head, *(tensor for layer in self.layers for tensor in layer)]

    def check(self, number: int) -> None:
        """Layer ``number`` holds what was written to it."""
        first = 1 + 2 * number
        for tensor, value in zip(self.layers[number], self.values[first : first + 2], strict=True):
            assert bool((tensor == value).all()), f"layer {number}"

    def one_pass(self, request: str = "r") -> int:
        """A stage that uses all layers in order; the most bytes that were on the device."""
        exhaust(self.manager.before_stage(request, [self.use]))
        at_layer = self.manager.use(request, self.use)
        most = 0
        for number in range(LAYERS):
            at_layer(number)
            self.check(number)
            most = max(most, self.manager.device_bytes("model"))
        assert bool((self.head == self.values[0]).all())
        exhaust(self.manager.finish_use(self.use))
        return most

    def request(self, passes: int = 1, **options: bool) -> int:
        self.manager.begin_request("r", **options)
        most = max(self.one_pass() for _ in range(passes))
        exhaust(self.manager.finish_request("r"))
        return most


def emptied(manager: ComponentResidencyManager) -> int:
    return manager._module.emptied


def events(manager: ComponentResidencyManager, *kinds: str) -> list[tuple[str, str]]:
    return [(event.event, event.component) for event in manager.trace if event.event in kinds]


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_there_when_a_layer_is_computed(make, strategy):
    """Three requests of two passes: the first one finds what was built, the others what was brought."""
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
def test_what_is_written_while_it_is_away_is_what_comes(make, strategy):
    """Also what is written while it is there, on its way, or was never away; and all of it can be read meanwhile."""
    manager = make()
    model = Model(manager, strategy())
    movable = manager._movables["model"]
    numbers = range(len(model.tensors))
    for first in (100, 120, 140):
        for number in numbers:
            model.write(number, first + number)
        assert [movable.values(each).unique().tolist() for each in model.tensors] == [
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
    peak = strategy.peak_bytes(model.manager._movables["model"])
    assert peak == model.head.nbytes + min(window, LAYERS) * 8000
    assert model.request(passes=3) == peak
    assert model.manager.still_to_come == peak, "nobody else may take what it needs"
    model.manager.close()


def test_the_next_layer_comes_while_one_is_computed():
    """The copies of layer 1 have been given to the side stream, and have not happened, while layer 0 is used."""
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
    """96 MB by the kernel's own count, down and up again, values exact."""
    manager = ComponentResidencyManager(CPU)
    gc.collect()
    empty_device_cache(HOST)
    nothing, allocated = HOST.memory_reserved(), HOST.memory_allocated()
    model = Model(manager, strategy, elements=2 * MIB)
    full = HOST.memory_reserved()

    def expect_gone() -> None:
        assert manager.movable_bytes == 0
        left = HOST.memory_reserved() - nothing
        assert left < 8 * MIB, f"malloc has handed out {HOST.memory_allocated() - allocated} of them"

    assert full - nothing > 84 * MIB
    assert manager.movable_bytes > 84 * MIB
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
    """Several of a pipeline, none of which anybody has thought about: a stage may use them like any others."""
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


def test_what_another_request_uses_stays():
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


def test_what_may_still_come_is_what_is_away(monkeypatch):
    manager = accelerator()
    model = Model(manager, ComponentOffloadStrategy())
    total = manager.nbytes("model")
    assert (manager.still_to_come, manager.movable_bytes) == (0, total)
    model.request()
    assert (manager.still_to_come, manager.movable_bytes) == (total, 0)


def test_the_allocator_knows_of_storage_and_not_of_mappings():
    assert accelerator().in_allocator
    assert not ComponentResidencyManager(CPU, make_component=MappedComponent).in_allocator


@pytest.mark.parametrize("platform,mapped", [("linux", True), ("darwin", False), ("win32", False)])
def test_only_linux_maps_what_is_allocated(monkeypatch, platform, mapped):
    monkeypatch.setattr(residency_module.sys, "platform", platform)
    manager = ComponentResidencyManager(CPU)
    monkeypatch.undo()
    assert manager.in_allocator is not mapped


def test_one_byte_that_is_not_free_is_a_shortage(monkeypatch):
    manager = host()
    manager.register("byte", ComponentOffloadStrategy(), tag="weights")
    with manager.component("byte"):
        tensor = allocate((1,), torch.uint8, CPU)
    manager.divide("byte", [[tensor]])
    exhaust(manager.release(["weights"]))
    monkeypatch.setattr(residency_module, "available_memory_if_known", lambda *_, **__: 0)
    manager.begin_request("r")
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.before_stage("r", [ComponentUse(name="byte")]))
    assert caught.value.detail == {"needed_bytes": 1, "free_bytes": 0}
    manager.close()


def test_the_time_of_a_move_is_work_and_not_what_happened_between(monkeypatch, caplog):
    """A clock that goes on by 3 s whenever it is read; between two steps, by a minute."""
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


def test_a_release_by_tag_takes_what_goes_with_that_tag_alone():
    """Tags are equal by their letters, wherever they come from."""
    for tag in ("weights", "kv_cache"):
        manager = accelerator()
        for name in ("weights", "kv_cache"):
            manager.register(f"of {name}", ComponentOffloadStrategy(), tag=name)
            with manager.component(f"of {name}"):
                allocate((10,), torch.float32, CPU)
        exhaust(manager.release(["".join(list(tag))]))
        found = {name: manager.device_bytes(f"of {name}") for name in ("weights", "kv_cache")}
        assert found == {"weights": 40, "kv_cache": 40} | {tag: 0}


def test_an_accelerator_without_streams_keeps_its_copies_in_memory():
    module = CountingHost()
    assert isinstance(ComponentResidencyManager("mps", device_module=module)._make_copy(), PinnedCopy)
    assert isinstance(ComponentResidencyManager("cpu", device_module=Device())._make_copy(), PinnedCopy)
    manager = ComponentResidencyManager("cpu", device_module=module)
    assert isinstance(manager._make_copy(), FileCopy)
    manager.close()


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
    """Why the model stayed, event by event."""
    return [event.detail for event in manager.trace if event.event == "keep"]


def test_what_stays_says_why():
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
    """``share`` of what counts as large."""
    size = Model(accelerator(), ComponentOffloadStrategy()).manager.nbytes("model")
    device = Device(total=int(size / residency_module.LARGE_SHARE / share))
    model = Model(accelerator(device), ComponentOffloadStrategy())
    model.use = ComponentUse(name="model", memory_intensive=False)
    model.request()
    assert device.emptied == emptied


@pytest.mark.parametrize("make", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_release_by_tag_keeps_the_values(make, strategy):
    """What is always on the device comes back with the tag, the others when they are used."""
    manager = make()
    model = Model(manager, strategy())
    with manager.component("weights"):
        policy = allocate((1000,), torch.float32, CPU).fill_(7.0)
    for _ in range(2):
        exhaust(manager.release(["weights"]))
        assert manager.device_bytes("model") == 0
        exhaust(manager.resume(["weights"]))
        assert not policy.any()
        resident = strategy is ResidentStrategy
        assert manager.device_bytes("model") == (manager.nbytes("model") if resident else 0)
        model.request()
    assert {kind for kind, _ in events(manager, "release", "resume")} == {"release", "resume"}
    manager.close()


@pytest.mark.parametrize("make", PLACES)
def test_a_tag_that_is_backed_up_comes_back_as_it_was_last(make):
    """The copy lags behind where there are streams, and is there when the resume ends."""
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


def test_resuming_counts_what_comes_back_with_the_tag(monkeypatch):
    manager = accelerator()
    Model(manager, ResidentStrategy())
    with manager.component("weights"):
        allocate((1000,), torch.float32, CPU)
    exhaust(manager.release(["weights"]))
    needed = manager.nbytes("model") + 4000
    monkeypatch.setattr(residency_module, "available_memory_if_known", lambda *_, **__: needed - 1)
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.resume(["weights"]))
    assert caught.value.detail == {"needed_bytes": needed, "free_bytes": needed - 1}
    assert manager.device_bytes("model") == 0


def test_a_shortage_is_found_before_anything_is_brought(monkeypatch):
    manager = host()
    model = Model(manager, ComponentOffloadStrategy())
    model.request()
    monkeypatch.setattr(residency_module, "available_memory_if_known", lambda *_, **__: 1234)
    manager.begin_request("r")
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.before_stage("r", [USE]))
    assert caught.value.code == "out_of_memory"
    assert caught.value.detail == {"needed_bytes": manager.nbytes("model"), "free_bytes": 1234}
    assert manager.device_bytes("model") == 0
    monkeypatch.undo()
    model.request()
    manager.close()


@pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])
def test_an_allocator_that_refuses_takes_nothing(strategy):
    class Refusing(StorageComponent):
        def resume(self):
            for step in super().resume():
                if refusing and self._tensors[0] is model.layers[0][1]:
                    raise RuntimeError("out of memory")
                yield step

    refusing = False
    manager = ComponentResidencyManager(CPU, make_component=Refusing, device_module=Device())
    model = Model(manager, strategy)
    model.request()
    refusing = True
    manager.begin_request("r")
    with pytest.raises(CaesuraError) as caught:
        exhaust(manager.before_stage("r", [USE]))
    assert caught.value.code == "out_of_memory"
    assert model.layers[0][0].untyped_storage().nbytes() == 0, "the part that failed gave back its first half"
    refusing = False
    exhaust(manager.finish_request("r"))
    model.request()


@pytest.mark.skipif(sys.platform != "linux", reason="files are Linux's way")
@pytest.mark.parametrize("strategy", [ComponentOffloadStrategy(), LayerwiseOffloadStrategy()])
def test_a_copy_that_cannot_be_read_leaves_the_part_away(strategy, monkeypatch):
    """By the loop or by the thread that reads ahead; the next attempt finds everything again."""
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
    exhaust(manager.finish_request("r"))
    model.request(passes=2)
    manager.close()


@settings(max_examples=examples(40), stateful_step_count=30)
class AnyOrder(RuleBasedStateMachine):
    """Any order of verbs, on both kinds of places: values survive, and the account of bytes is exact."""

    @initialize(
        make=st.sampled_from([host, accelerator] if sys.platform == "linux" else [accelerator]),
        strategy=st.one_of(
            st.builds(ResidentStrategy),
            st.builds(ComponentOffloadStrategy, keep_after_use=st.booleans(), keep_on_warm_up=st.booleans()),
            st.builds(
                LayerwiseOffloadStrategy,
                window=st.integers(1, LAYERS + 1),
                keep_after_use=st.booleans(),
                keep_on_warm_up=st.booleans(),
            ),
        ),
    )
    def build(self, make, strategy):
        self.manager, self.strategy = make(), strategy
        self.model = Model(self.manager, strategy)
        self.open: set[str] = set()
        self.released = False
        self.moved = False

    def teardown(self):
        self.manager.close()

    @rule(request=st.sampled_from("rs"), warm_up=st.booleans())
    def begin(self, request, warm_up):
        self.manager.begin_request(request, warm_up=warm_up)
        self.open.add(request)

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data())
    def use_all(self, data):
        self.model.one_pass(data.draw(st.sampled_from(sorted(self.open))))

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data(), layers=st.integers(0, LAYERS), steps=st.integers(0, 9))
    def give_up(self, data, layers, steps):
        """A stage that is abandoned: while things are brought, or before some layer."""
        request = data.draw(st.sampled_from(sorted(self.open)))
        bringing = self.manager.before_stage(request, [USE])
        for _ in range(steps):
            next(bringing, None)
        bringing.close()
        at_layer = self.manager.use(request, USE)
        for number in range(layers):
            at_layer(number)
            self.model.check(number)

    @precondition(lambda self: self.open and not self.released)
    @rule(data=st.data())
    def finish(self, data):
        request = data.draw(st.sampled_from(sorted(self.open)))
        exhaust(self.manager.finish_request(request))
        self.open.remove(request)

    @rule(data=st.data(), value=st.integers(1, 200))
    def write(self, data, value):
        """At any moment, also while a stage is abandoned half-way or all memory is released."""
        self.model.write(data.draw(st.integers(0, 2 * LAYERS)), value)

    @precondition(lambda self: not self.released)
    @rule()
    def release(self):
        exhaust(self.manager.release(["weights"]))
        self.released = True
        assert self.manager.device_bytes("model") == 0

    @precondition(lambda self: self.released)
    @rule()
    def resume(self):
        exhaust(self.manager.resume(["weights"]))
        self.released = False

    @invariant()
    def every_value_can_be_read(self):
        movable = self.manager._movables["model"]
        for tensor, value in zip(self.model.tensors, self.model.values, strict=True):
            assert bool((movable.values(tensor) == value).all())

    @invariant()
    def the_account_is_exact(self):
        parts = self.manager._movables["model"].parts
        for part in parts:
            if part.on_device and not part._coming:
                assert all(bool(tensor.any()) for tensor in part.tensors)
            if not part.on_device:
                assert not any(t.untyped_storage().nbytes() and bool(t.any()) for t in part.tensors)


TestAnyOrder = AnyOrder.TestCase
