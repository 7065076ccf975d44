"""torch's module for a kind of device, bound to one device of that kind, and what it can do.

torch answers for its *current* device, the first one by default, and each thread has its own; a bound module
answers for the bound device in every thread. A figure that a backend does not give is 0. The protocols are
the parts of ``torch.cuda`` and its siblings that are used here.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import torch

from .host import HOST

_TAKE_DEVICE = ("current_stream", "mem_get_info", "memory_allocated", "memory_reserved", "synchronize")
"""Functions whose first parameter is the device, on CUDA, ROCm, XPU, NPU and MUSA alike."""


class DeviceModule(Protocol):
    """``torch.cuda``, ``torch.xpu``, ``torch.npu``, …, or ``host.HOST`` for the CPU."""

    def memory_reserved(self) -> int: ...

    def memory_allocated(self) -> int: ...


class StreamModule(DeviceModule, Protocol):
    def Stream(self) -> torch.Stream:  # noqa: N802 (torch's name)
        ...

    def Event(self) -> torch.Event:  # noqa: N802 (torch's name)
        ...

    def current_stream(self) -> torch.Stream: ...

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]: ...

    def synchronize(self) -> None: ...


class GraphModule(StreamModule, Protocol):
    def CUDAGraph(self) -> torch.cuda.CUDAGraph:  # noqa: N802 (torch's name)
        ...

    def graph_pool_handle(self) -> object: ...


class BoundDeviceModule:
    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self.device = device

    def memory_reserved(self) -> int:
        return self._figure("memory_reserved")

    def memory_allocated(self) -> int:
        return self._figure("memory_allocated")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if ":" not in str(self.device):  # none in particular: torch answers for its current one
            return found
        if name in _TAKE_DEVICE:
            return partial(found, self.device)
        return partial(found, device=self.device) if name == "Stream" else found

    def _figure(self, name: str) -> int:
        return int(self.__getattr__(name)()) if hasattr(self.module, name) else 0


def device_module_for(device: torch.device | str) -> DeviceModule:
    """Return the module of ``device``; raises RuntimeError if torch knows no such device."""
    device = torch.device(device)
    return HOST if device.type == "cpu" else BoundDeviceModule(torch.get_device_module(device), device)


def nvidia_generation(device: torch.device) -> int | None:
    """Return the major compute capability of an NVIDIA device, or None: ROCm calls its devices cuda, too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)[0]


def streams_of(module: DeviceModule) -> StreamModule | None:
    return cast("StreamModule", module) if hasattr(module, "Stream") else None


def graphs_of(module: DeviceModule) -> GraphModule | None:
    return cast("GraphModule", module) if hasattr(module, "CUDAGraph") else None


def free_and_total(module: DeviceModule) -> tuple[int, int] | None:
    """Return the bytes that the system has left, and has; None if the backend does not tell."""
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info()
    return int(free), int(total)


def use_device(device: str) -> None:
    """Make ``device`` the current one of this thread, so that kernels, which name none, run there."""
    set_device = getattr(torch.get_device_module(device), "set_device", None)
    if set_device is not None and ":" in device:
        set_device(torch.device(device))
