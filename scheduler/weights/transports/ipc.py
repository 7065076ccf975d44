"""Tensors in memory shared by another process of this host.

Invariants:
- The memory is a memfd, reached through ``/proc/{pid}/fd/{fd}``: it has no name, so nothing is left behind whoever dies.
- It is sealed against shrinking before we map it: no truncation can turn a read into SIGBUS.
- One mapping per memory, opened at its first use. At most :data:`KEPT` are kept between sessions, since mapping costs more than
  copying does, and none longer than its owner lives (:meth:`SharedMemoryMaps.collect`).
- Device memory is cuda_ipc.py's business; it is closed when the session ends.
"""

import fcntl
import mmap
import os
import stat

import torch
from torch import Tensor

from ....io_struct import (
    CaesuraError,
    CudaIPCHandle,
    ErrorCode,
    SharedMemoryHandle,
    UpdateWeightsFromIPCReqInput,
)
from ..source import BufferSource, SharedMemory
from .cuda_ipc import CudaMemories

KEPT = 4
"""Page faults on a fresh mapping take 90 ms per GB here, a copy out of a mapping that exists 63 ms."""

_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemoryMaps:
    """The shared memories that are open now, on the host and on the engine's device."""

    def __init__(self, device: str) -> None:
        """``device`` is the engine's."""
        self._device = torch.device(device)
        self._maps: dict[SharedMemoryHandle, mmap.mmap] = {}
        self._cuda = CudaMemories(self._device)

    def __len__(self) -> int:
        """How many are mapped."""
        return len(self._maps) + len(self._cuda)

    def collect(self) -> None:
        """Let go of memories whose owner has closed them, or is gone."""
        for handle in [handle for handle in self._maps if not _is_owned(handle)]:
            del self._maps[handle]

    def open(self, request: UpdateWeightsFromIPCReqInput) -> BufferSource:
        """The tensors of ``request``; raises as :meth:`view`, and ``invalid_request`` where a spec does not fit."""
        handle = request.handle
        return BufferSource("ipc", request.specs, [self.view(handle)], SharedMemory(handle, 0, handle.nbytes))

    def view(self, handle: SharedMemoryHandle | CudaIPCHandle) -> memoryview | Tensor:
        """The bytes of ``handle``, valid until :meth:`close`: of a memfd, or uint8 [nbytes] on the engine's device.

        Raises:
            CaesuraError: ``invalid_request``, it is not a sealed memfd of that size, or not memory of the engine's device.
        """
        if isinstance(handle, CudaIPCHandle):
            if self._device.type != "cuda":
                raise CaesuraError(
                    ErrorCode.INVALID_REQUEST,
                    f"the engine runs on {self._device.type}, it cannot open device memory",
                    field="handle",
                    value=handle.device_uuid,
                )
            return self._cuda.view(handle)
        known = self._maps.pop(handle, None)
        if known is None or not _is_owned(handle):
            known = _map(handle)
        self._maps[handle] = known  # the last one used is the last one given up
        return memoryview(known)

    def end_session(self) -> None:
        """Let go of all but the memories used last; what is let go is unmapped with the last piece that looks into it."""
        self._cuda.close()
        self.collect()
        for handle in list(self._maps)[:-KEPT]:
            del self._maps[handle]

    def close(self) -> None:
        """Let everything go."""
        self._maps.clear()
        self._cuda.close()


def _is_owned(handle: SharedMemoryHandle) -> bool:
    try:
        return os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_ino == handle.inode
    except OSError:
        return False


def _map(handle: SharedMemoryHandle) -> mmap.mmap:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _bad(handle, f"cannot be opened: {error.strerror}") from error
    try:
        _check(handle, descriptor)
        # Writable only because torch.frombuffer wants that; the engine never writes here.
        return mmap.mmap(
            descriptor, handle.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise _bad(handle, f"cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _check(handle: SharedMemoryHandle, descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_ino != handle.inode:
        raise _bad(handle, "is not the memory that the handle describes")
    if found.st_size != handle.nbytes:
        raise _bad(handle, f"has {found.st_size} bytes, not {handle.nbytes}")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise _bad(handle, "is a file, not a memfd") from error
    if seals & _REQUIRED_SEALS != _REQUIRED_SEALS:
        raise _bad(handle, "is not sealed against shrinking and growing")


def _bad(handle: SharedMemoryHandle, problem: str) -> CaesuraError:
    name = f"shared memory {handle.fd} of process {handle.pid}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{name} {problem}", field="handle", value=name)
