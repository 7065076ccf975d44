"""Components that come and go, over host memory with files and over a stand-in for an accelerator."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    ResidentStrategy,
)
from caesura.scheduler.memory.residency import ComponentResidencyManager, allocate
from caesura.scheduler.memory.storage import StorageComponent

from . import lagging_streams

MIB = 1 << 20
CPU = torch.device("cpu")
LAYERS = 5


class Event(lagging_streams.Event):
    def query(self) -> bool:
        """Do one copy, and return True if the event has passed: whoever polls gives the copies time."""
        self.stream.run(1)
        return self.stream.done >= self.place


class Stream(lagging_streams.Stream):
    """A stream whose copies happen later: when somebody waits for it, or polls."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for_others = 0

    def run(self, count: int) -> None:
        self.run_to(self.done + min(count, len(self.pending)))

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for_others += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: lagging_streams.Event) -> None:
        event.synchronize()


class Device:
    """A device module with streams whose copies lag, and a count of how often its cache was emptied."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.emptied = 0
        self.side = Stream()
        self._compute = Stream()
        self.free = self._total = total

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self._total

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
    """The CPU's own module, with a count, and free memory that a test may set."""

    def __init__(self) -> None:
        self.emptied = 0
        self.free: int | None = None

    def mem_get_info(self) -> tuple[int, int]:
        free, total = HOST.mem_get_info()
        return free if self.free is None else self.free, total

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

    def __init__(
        self,
        manager: ComponentResidencyManager,
        strategy: Any,
        elements: int = 1000,
        *,
        memory_intensive: bool = True,
    ) -> None:
        self.manager = manager
        self.component = manager.register("model", strategy, memory_intensive=memory_intensive)
        with manager.component("model"):
            self.head = allocate((elements,), torch.float32, CPU)
            self.layers = [
                [allocate((elements,), torch.float32, CPU), allocate((2, elements), torch.bfloat16, CPU)]
                for _ in range(LAYERS)
            ]
        self.component.divide(self.layers)
        self.values = [number + 1 for number in range(len(self.tensors))]
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.fill_(value)

    def write(self, number: int, value: int) -> None:
        """Overwrite a tensor wherever its values are, in two pieces of another dtype."""
        tensor, half = self.tensors[number], self.tensors[number].numel() // 2
        for start, count in ((0, half), (half, tensor.numel() - half)):
            self.component.write(tensor, start, torch.full((count,), value, dtype=torch.float64))
        self.values[number] = value

    @property
    def tensors(self) -> list[Tensor]:
        return [self.head, *(tensor for layer in self.layers for tensor in layer)]

    def check(self, number: int) -> None:
        first = 1 + 2 * number
        for tensor, value in zip(self.layers[number], self.values[first : first + 2], strict=True):
            assert bool((tensor == value).all()), f"layer {number}"

    def one_pass(self) -> int:
        """Run a stage that uses all layers in order; return the most bytes that were on the device."""
        exhaust(self.manager.bring(["model"]))
        at_layer = self.manager.use("model")
        most = 0
        for number in range(LAYERS):
            at_layer(number)
            self.check(number)
            most = max(most, self.manager.registered["model"].device_bytes)
        assert bool((self.head == self.values[0]).all())
        return most

    def request(self, passes: int = 1) -> int:
        most = max(self.one_pass() for _ in range(passes))
        exhaust(self.manager.leave(["model"]))
        return most


def emptied(manager: ComponentResidencyManager) -> int:
    return manager.module.emptied
