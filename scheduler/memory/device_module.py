"""torch's module for a kind of device, bound to one device of that kind.

Invariants:
- torch answers for its *current* device, which is the first one unless somebody has said otherwise, and each thread has its own. What is
  asked through a bound module is asked for the bound device, whichever thread asks.
- Nothing is added: what torch's module lacks, the bound module lacks, so ``hasattr`` still tells what a backend can do.
"""

from functools import partial
from typing import Any

import torch

from .host import HOST

_TAKE_DEVICE = ("current_stream", "mem_get_info", "memory_allocated", "memory_reserved", "synchronize")
"""Functions whose first parameter is the device, on CUDA, ROCm, XPU, NPU and MUSA alike."""


class BoundDeviceModule:
    """``module`` with its calls made for ``device``, which names an index."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module = module
        self.device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if name in _TAKE_DEVICE:
            return partial(found, self.device)
        return partial(found, device=self.device) if name == "Stream" else found


def device_module_for(device: torch.device | str) -> Any:
    """The module that manages ``device``'s memory and streams.

    Without an index it is torch's own, which answers for the current device; MPS has one device and functions of its own.

    Raises:
        RuntimeError: torch knows no such device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HOST
    module = torch.get_device_module(device)
    return module if device.index is None or device.type == "mps" else BoundDeviceModule(module, device)
