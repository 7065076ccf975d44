"""Emptying the device allocator, and reading it, alike on every device.

- :func:`empty_device_cache` is the only caller of an ``empty_cache`` in this project. A running engine calls
  it through one :class:`DeviceCache`: ordered after the work of the forward stream, logged under the name of
  its place (docs/explanation/memory.md), and counted. Reading memory has no side effect.
- An operation that failed gives unused blocks back before it is answered. The caller has let go of the
  exception by then, since a traceback keeps the tensors of the frames that it passed.
"""

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ...io_struct import CaesuraError, EmptyCacheTotal, ErrorCode, RankMemory
from .device_module import DeviceModule, device_module_for, free_and_total

logger = logging.getLogger(__name__)

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
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class MinReduce(Protocol):
    def all_reduce_min(self, value: int) -> int: ...


@dataclass(frozen=True, slots=True)
class DeviceMemoryReading:
    reserved: int
    """Taken from the system, in use or not."""
    allocated: int
    """Handed out to tensors."""

    @classmethod
    def of(cls, device_module: DeviceModule) -> "DeviceMemoryReading":
        return cls(device_module.memory_reserved(), device_module.memory_allocated())


@dataclass(frozen=True, slots=True)
class EmptyCacheReport:
    reserved_before: int
    reserved_after: int
    others: tuple[RankMemory, ...] = ()

    @property
    def freed(self) -> int:
        """Bytes returned to the system; 0 when something else allocated more meanwhile."""
        return max(0, self.reserved_before - self.reserved_after)

    def describe(self, verb: str) -> str:
        """Return the line ``verb: reserved 812.0 MB -> 640.0 MB (freed 172.0 MB)``; an MB is 2^20 bytes."""
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
    """Return True if an error says, in whichever library's words, that an allocation has failed."""
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
) -> int | None:
    """Return the bytes that ``device`` (all of ``group``) can still get; None if the backend does not tell.

    CPU: the smaller of MemAvailable and what the cgroups leave. The allocator's unused blocks count only
    after ``empty_cache``.
    """
    module = device_module_for(device)
    if empty_cache:
        empty_device_cache(module)
    known = free_and_total(module)
    if known is None or group is None:
        return None if known is None else known[0]
    return group.all_reduce_min(known[0])


def refuse_defeating_settings(environ: Mapping[str, str]) -> None:
    """Refuse expandable segments beside a memory saver: both map physical memory behind torch's ranges."""
    for name in _ALLOC_CONF:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                reason = f"{name} sets expandable_segments, which defeats the memory saver: unset it"
                raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=name, value=environ[name])


EmptyCachePlace = Literal[
    "start",
    "continue",
    "flush",
    "lease_expiry",
    "update",
    "release",
    "resume",
    "component",
    "idle",
    "failure",
]
"""Reason for an emptying (docs/explanation/memory.md lists them)."""

_LOGGED_AS_INFO: dict[EmptyCachePlace, str] = {
    "continue": "continue_generation",
    "flush": "flush_cache",
    "lease_expiry": "lease_expiry",
    "release": "release_memory",
}
"""Names of the places whose line operators read; the others log at DEBUG."""


class DeviceCache:
    def __init__(
        self,
        device_module: DeviceModule,
        *,
        synchronize: Callable[[], None] = lambda: None,
        elsewhere: Callable[[str], Sequence[RankMemory]] = lambda place: (),
        note_failure: Callable[[str, int], None] = lambda what, freed: None,
    ) -> None:
        """``elsewhere`` empties other ranks; ``note_failure`` hears what failed and the bytes given back."""
        self.module = device_module
        self._synchronize = synchronize
        self._elsewhere = elsewhere
        self._note_failure = note_failure
        self._counts: dict[EmptyCachePlace, int] = {}
        self._freed: dict[EmptyCachePlace, int] = {}

    @property
    def reserved(self) -> int:
        return self.module.memory_reserved()

    def empty(self, place: EmptyCachePlace, *, reserved_before: int | None = None) -> EmptyCacheReport:
        """Return unused blocks once the forward stream is idle; ``reserved_before`` is an earlier reading."""
        self._synchronize()
        before = self.reserved if reserved_before is None else reserved_before
        empty_device_cache(self.module)
        report = EmptyCacheReport(before, self.reserved, tuple(self._elsewhere(place)))
        self._counts[place] = self._counts.get(place, 0) + 1
        self._freed[place] = self._freed.get(place, 0) + report.freed
        name = _LOGGED_AS_INFO.get(place)
        level = logging.DEBUG if name is None else logging.INFO
        logger.log(level, "%s", report.describe(name or place))
        return report

    def after_failure(self, what: str) -> None:
        """Give back what a failed operation, ``what``, has left unused; never raises."""
        try:
            freed = self.empty("failure").freed
        except RuntimeError as error:
            logger.error("the device cache could not be emptied after a failure", exc_info=error)
            freed = 0
        self._note_failure(what, freed)

    def totals(self) -> list[EmptyCacheTotal]:
        return [
            EmptyCacheTotal(place=place, count=count, freed_bytes=self._freed[place])
            for place, count in self._counts.items()
        ]
