"""Memory, streams and graphs of one device, whatever its kind.

Invariants:
- ``torch.accelerator`` has one set of names for CUDA, ROCm, XPU, MTIA and private backends. It answers for
  the device that it is given, in every thread; without an index for the thread's current one.
- A device of a kind that it does not serve here is refused by name. Graphs have names of their own yet: those
  of the kind's module.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch

from ...io_struct import CaesuraError, ErrorCode
from .host import HOST


class DeviceModule(Protocol):
    """:class:`Accelerator`, or ``host.HOST`` for the CPU."""

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


class Accelerator:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_reserved(self) -> int:
        return torch.accelerator.memory_reserved(self.device)

    def memory_allocated(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def mem_get_info(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def Stream(self) -> torch.Stream:  # noqa: N802 (torch's name)
        return torch.Stream(self.device)

    def Event(self) -> torch.Event:  # noqa: N802 (torch's name)
        return torch.Event(self.device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    @contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        """Make ``stream`` the current one inside; unlike ``with stream``, within itself, too."""
        before = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.get_device_module(self.device), name)


def device_module_for(device: torch.device | str) -> DeviceModule:
    """Return the module of ``device``; CaesuraError (UNSUPPORTED) if torch does not serve its kind here."""
    device = torch.device(device)
    if device.type == "cpu":
        return HOST
    served = torch.accelerator.current_accelerator()
    if served is None or served.type != device.type:
        kind = "no accelerator" if served is None else served.type
        reason = f"device {device} is not served: this torch serves {kind}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="device", value=str(device))
    return Accelerator(device)


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
    try:
        free, total = module.mem_get_info()
    except NotImplementedError:  # torch's word for an allocator that cannot tell
        return None
    return int(free), int(total)


def use_device(device: str) -> None:
    """Make ``device`` the current one of this thread, so that kernels, which name none, run there."""
    index = torch.device(device).index
    if index is not None and torch.device(device).type != "cpu":
        torch.accelerator.set_device_index(index)
