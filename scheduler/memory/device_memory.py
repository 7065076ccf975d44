"""Emptying the device allocator, and reading it, alike on every device.

- :func:`empty_device_cache` is the only caller of an ``empty_cache`` in this project, and it is called from
  named places only (docs/explanation/memory.md).
- Reading memory has no side effect: it neither empties, nor synchronises, nor initialises a device.
- Everything works on a *device module* (``device_module.py``). What one lacks reads as 0, except free memory,
  which is an error.
"""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ...io_struct import CaesuraError, ErrorCode, RankMemory
from .device_module import DeviceModule, device_module_for, free_and_total

_MIB = 1 << 20
_NO_MEMORY = (
    "can't allocate memory",  # torch's CPU allocator
    "cannot allocate memory",  # the C library
    "not enough memory",
    "out of memory",
    # CUDA_ERROR_OUT_OF_MEMORY, UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY: what driver calls return
    "out_of_memory",
    "outofmemory",  # hipErrorOutOfMemory
    "out_of_device_memory",
    "out_of_host_memory",
    "errormemoryallocation",  # cudaErrorMemoryAllocation
    "bad_alloc",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
)
"""Words of libraries' errors, in lower case."""
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class MinReduce(Protocol):
    def all_reduce_min(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemoryReading:
    """State of an allocator, in bytes."""

    reserved: int
    """Taken from the system, in use or not."""
    allocated: int
    """Handed out to tensors."""

    @classmethod
    def of(cls, device_module: DeviceModule) -> "DeviceMemoryReading":
        return cls(device_module.memory_reserved(), device_module.memory_allocated())


@dataclass(frozen=True, slots=True)
class EmptyCacheReport:
    """Reserved bytes around one emptying."""

    reserved_before: int
    reserved_after: int
    others: tuple[RankMemory, ...] = ()
    """Readings of the engine's other ranks."""

    @property
    def freed(self) -> int:
        """Bytes returned to the system; 0 when something else allocated more meanwhile."""
        return max(0, self.reserved_before - self.reserved_after)

    def describe(self, verb: str) -> str:
        """Return the log line: ``verb: reserved 812.0 MB -> 640.0 MB (freed 172.0 MB)``, with MB of 2^20
        bytes.
        """
        before, after, freed = (
            round(size / _MIB, 1) + 0.0  # + 0.0 turns -0.0 into 0.0
            for size in (self.reserved_before, self.reserved_after, self.freed)
        )
        return f"{verb}: reserved {before:.1f} MB -> {after:.1f} MB (freed {freed:.1f} MB)"


def empty_device_cache(device_module: DeviceModule) -> bool:
    """Return the allocator's unused blocks to the system; False where the module has no cache to empty."""
    empty_cache = getattr(device_module, "empty_cache", None)
    if empty_cache is None:
        return False
    empty_cache()
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that an allocation on a device or the host has failed.

    Accelerators have an exception of their own; torch's CPU allocator and the libraries below it only have
    words.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, CaesuraError):
        return error.code == ErrorCode.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(words in text for words in _NO_MEMORY)


def get_available_memory(
    device: torch.device | str, empty_cache: bool = False, group: MinReduce | None = None
) -> int:
    """Return the bytes that an allocation on ``device`` can still get from the system.

    CPU: the smaller of MemAvailable and what the cgroups leave. MPS: the recommended working set minus what
    the driver holds. Everything else: the module's ``mem_get_info``.

    Args:
        empty_cache: return the allocator's unused blocks first; they do not count as available otherwise.
        group: ranks whose minimum is returned; by default this rank alone.

    Raises:
        CaesuraError: ``unsupported``, the backend does not tell.
    """
    device = torch.device(device)
    module = device_module_for(device)
    if empty_cache:
        empty_device_cache(module)
    known = free_and_total(module)
    if known is None:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED, f"device {device} does not report its free memory", device=str(device)
        )
    available = known[0]
    return available if group is None else group.all_reduce_min(available)


def available_memory_if_known(
    device: torch.device | str, empty_cache: bool = False, group: MinReduce | None = None
) -> int | None:
    """Return :func:`get_available_memory`, or None where the backend does not tell."""
    try:
        return get_available_memory(device, empty_cache, group)
    except CaesuraError as error:
        if error.code != ErrorCode.UNSUPPORTED:
            raise
        return None


def refuse_defeating_settings(
    device: torch.device | str, memory_saver: bool, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuse (``invalid_request``) allocator settings under which released memory would not come back.

    Expandable segments map physical memory behind the allocator's own virtual ranges, and so does a memory
    saver: the two cannot own the same pages.
    """
    if not memory_saver or torch.device(device).type == "cpu":
        return
    for name in _ALLOC_CONF:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise CaesuraError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name} sets expandable_segments, which defeats the memory saver: unset it",
                    field=name,
                    value=environ[name],
                )
