"""Host memory that processes of one host share: a memfd, which others reach through ``/proc/{pid}/fd/{fd}``.

Invariants:
- The memory has no name: it disappears when no process uses it, whoever dies.
- It is sealed against shrinking and growing before another process maps it: no truncation can turn a read
  into SIGBUS. Its pages are reserved when it is created, so a full /dev/shm is an error then, not a crash.
- A handle is checked against the memory that it leads to before that is mapped.
"""

import errno
import fcntl
import mmap
import os
import stat

from ..io_struct import CaesuraError, ErrorCode, SharedMemoryHandle

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create(nbytes: int) -> tuple[SharedMemoryHandle, mmap.mmap]:
    """Return handle and mapping of new memory, or ``out_of_memory``; the caller closes ``handle.fd``."""
    descriptor = os.memfd_create("caesura-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        mapping = mmap.mmap(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        reason = f"no {nbytes} bytes of shared memory: {error.strerror}"
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=nbytes) from error
    inode = os.fstat(descriptor).st_ino
    return SharedMemoryHandle(pid=os.getpid(), fd=descriptor, inode=inode, nbytes=nbytes), mapping


def is_owned(handle: SharedMemoryHandle) -> bool:
    """Return True if the memory of ``handle`` is still open in the process that created it."""
    try:
        return os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_ino == handle.inode
    except OSError:
        return False


def map_memory(handle: SharedMemoryHandle) -> mmap.mmap:
    """Map the memory of another process, a sealed memfd of the handle's size."""
    try:
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _bad(handle, f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != handle.inode:
            raise _bad(handle, "is not the memory that the handle describes")
        if found.st_size != handle.nbytes:
            raise _bad(handle, f"has {found.st_size} bytes, not {handle.nbytes}")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise _bad(handle, "is a file, not a memfd") from error
        if seals & _SEALS != _SEALS:
            raise _bad(handle, "is not sealed against shrinking and growing")
        # Writable only because torch.frombuffer wants that; readers never write here.
        return mmap.mmap(
            descriptor, handle.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise _bad(handle, f"cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _bad(handle: SharedMemoryHandle, problem: str) -> CaesuraError:
    name = f"shared memory {handle.fd} of process {handle.pid}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{name} {problem}", field="handle", value=name)
