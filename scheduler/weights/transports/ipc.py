"""Tensors in memory shared by another process of this host.

Invariants:
- The memory is a memfd, reached through ``/proc/{pid}/fd/{fd}``: it has no name, so nothing is left behind whoever dies.
- It is sealed against shrinking before we map it: no truncation can turn a read into SIGBUS.
- One mapping per memory, opened at its first use and closed when the session ends.
"""

import fcntl
import mmap
import os
import stat

from ....io_struct import CaesuraError, ErrorCode, SharedMemoryHandle, UpdateWeightsFromIPCReqInput
from ..source import BufferSource

_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemoryMaps:
    """The shared memories that are open now."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}

    def __len__(self) -> int:
        """How many are mapped."""
        return len(self._maps)

    def open(self, request: UpdateWeightsFromIPCReqInput) -> BufferSource:
        """The tensors of ``request``.

        Raises:
            CaesuraError: ``invalid_request``, the handle is not a sealed memfd of that size, or a spec does not fit it.
        """
        handle = request.handle
        key = (handle.pid, handle.fd, handle.inode)
        if key not in self._maps:
            self._maps[key] = _map(handle)
        view = memoryview(self._maps[key])
        return BufferSource("ipc", request.specs, [view])

    def close(self) -> None:
        """Let every mapping go; it is unmapped with the last piece that still looks into it."""
        self._maps.clear()


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
