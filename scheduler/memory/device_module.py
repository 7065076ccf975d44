"""torch's module for a kind of device, bound to one device of that kind, and what it can do.

Invariants:
- torch answers for its *current* device, which is the first one unless somebody has said otherwise, and each thread has its own. What is
  asked through a bound module is asked for the bound device, whichever thread asks.
- Every device has the figures of :class:`DeviceModule`; one that a backend does not give is 0. What some devices lack is
  asked for by the functions at the end, and ``empty_cache`` by ``device_memory.py``, but by nothing else.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import torch

from .host import HOST

_TAKE_DEVICE = ("current_stream", "mem_get_info", "memory_allocated", "memory_reserved", "synchronize")
"""Functions whose first parameter is the device, on CUDA, ROCm, XPU, NPU and MUSA alike."""


class DeviceModule(Protocol):
    """``torch.cuda``, ``torch.xpu``, ``torch.npu``, …, or ``host.HOST`` for the CPU. All sizes are in bytes."""

    def memory_reserved(self) -> int:
        """Taken from the system, in use or not."""
        ...

    def memory_allocated(self) -> int:
        """Handed out to tensors."""
        ...


class DeviceEvent(Protocol):
    """``torch.cuda.Event``."""

    def record(self) -> None:
        """On the current stream."""
        ...

    def query(self) -> bool:
        """Whether what was there when it was recorded is done."""
        ...

    def synchronize(self) -> None:
        """Until it is."""
        ...


class DeviceStream(Protocol):
    """``torch.cuda.Stream``."""

    def wait_stream(self, stream: "DeviceStream") -> None:
        """What comes next here comes after what is there now."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """What comes next here comes after ``event``."""
        ...

    def record_event(self) -> DeviceEvent:
        """An event of this moment."""
        ...

    def synchronize(self) -> None:
        """Until it is idle."""
        ...


class StreamModule(DeviceModule, Protocol):
    """A device whose work the host enqueues."""

    def Stream(self) -> DeviceStream:  # noqa: N802 (torch's name)
        """A new one."""
        ...

    def Event(self) -> DeviceEvent:  # noqa: N802 (torch's name)
        """A new one."""
        ...

    def current_stream(self) -> DeviceStream:
        """Of this thread."""
        ...

    def stream(self, stream: DeviceStream) -> AbstractContextManager[Any]:
        """Makes ``stream`` the current one within the block."""
        ...

    def synchronize(self) -> None:
        """Until the device is idle."""
        ...


class DeviceGraph(Protocol):
    """``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        """What the current stream is given from now on is recorded."""
        ...

    def capture_end(self) -> None:
        """Until now."""
        ...

    def replay(self) -> None:
        """Give it to the current stream again."""
        ...


class GraphModule(StreamModule, Protocol):
    """A device whose work can be captured."""

    def CUDAGraph(self) -> DeviceGraph:  # noqa: N802 (torch's name)
        """A new one."""
        ...

    def graph_pool_handle(self) -> object:
        """Memory that graphs may share."""
        ...


class BoundDeviceModule:
    """``module`` with its calls made for ``device``; without an index, for whichever is current."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self.device = device

    def memory_reserved(self) -> int:
        """See :class:`DeviceModule`; MPS has names of its own, as it has for the next figure."""
        return self._figure("memory_reserved", "driver_allocated_memory")

    def memory_allocated(self) -> int:
        """See :class:`DeviceModule`."""
        return self._figure("memory_allocated", "current_allocated_memory")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if (
            self.device.index is None or self.device.type == "mps"
        ):  # MPS has one device, its functions no parameter
            return found
        if name in _TAKE_DEVICE:
            return partial(found, self.device)
        return partial(found, device=self.device) if name == "Stream" else found

    def _figure(self, *names: str) -> int:
        for name in names:
            if hasattr(self.module, name):
                return int(self.__getattr__(name)())
        return 0


def device_module_for(device: torch.device | str) -> DeviceModule:
    """The module that manages ``device``'s memory and streams.

    Raises:
        RuntimeError: torch knows no such device.
    """
    device = torch.device(device)
    return HOST if device.type == "cpu" else BoundDeviceModule(torch.get_device_module(device), device)


def nvidia_generation(device: torch.device) -> int | None:
    """Major compute capability of an NVIDIA device, 9 for Hopper; None for others. ROCm calls its devices cuda, and an MI300's
    capability is 9.4."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)[0]


def streams_of(module: DeviceModule) -> StreamModule | None:
    """``module``, where it has streams."""
    return cast("StreamModule", module) if hasattr(module, "Stream") else None


def graphs_of(module: DeviceModule) -> GraphModule | None:
    """``module``, where it has graphs."""
    return cast("GraphModule", module) if hasattr(module, "CUDAGraph") else None


def free_and_total(module: DeviceModule) -> tuple[int, int] | None:
    """Bytes that the system has left, and has. None: the backend does not tell."""
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info()
        return int(free), int(total)
    if hasattr(module, "recommended_max_memory") and hasattr(module, "driver_allocated_memory"):  # MPS
        most = int(module.recommended_max_memory())
        return max(0, most - int(module.driver_allocated_memory())), most
    return None


def use_device(device: str) -> None:
    """Make ``device`` the current one of this thread: what names no device, as kernels do, then runs where the tensors are."""
    set_device = getattr(torch.get_device_module(device), "set_device", None)
    if set_device is not None and ":" in device:
        set_device(torch.device(device))
