"""Collectives between processes of one host over shared memory, compiled (``cpu/collectives.cpp``).

Invariants:
- Waiters notice within tens of milliseconds that a process ended: the system drops its lock on a byte.
- After a failure every call fails until :meth:`Collective.reset` on all ranks, or for ever if one is gone.
- The memory has no name in the file system, and nothing outlives the ranks.
"""

import ctypes
import fcntl
import mmap
import os
import struct

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from . import native
from .native import INT, POINTER, SIZE

BUFFER_BYTES = 1 << 20
"""Bytes per rank and round: enough for the sums of a decode step, few enough to stay in a cache."""
MAX_RANKS = 64

_bytes = native.function("caesura_collective_bytes", SIZE, SIZE, result=SIZE)
_struct_bytes = native.function("caesura_collective_struct_bytes", result=SIZE)
_ALL_REDUCE = native.by_dtype("caesura_all_reduce", POINTER, POINTER, SIZE, INT)
_all_gather = native.function("caesura_all_gather", POINTER, POINTER, SIZE, SIZE, POINTER, SIZE, SIZE, INT)
_broadcast = native.function("caesura_broadcast", POINTER, POINTER, SIZE, SIZE, INT)
_barrier = native.function("caesura_barrier", POINTER)
_abort = native.function("caesura_collective_abort", POINTER)
_reset = native.function("caesura_collective_reset", POINTER)
_assemble = native.function("caesura_collective_assemble", POINTER)
_leave = native.function("caesura_collective_leave", POINTER)

_GONE, _LEFT, _ABORTED, _LATE = 1, 2, 3, 4
_REASONS = {
    _GONE: "its process has ended",
    _LEFT: "it has left the group",
    _ABORTED: "it has given up, or has seen another one fail",
    _LATE: "it did not come in time",
}
_FLOCK = "hhlli4x"
"""Layout of ``struct flock`` on x86-64 Linux: type, whence, start, length, process."""
_F_OFD_SETLK = 37


class RankLostError(CaesuraError):
    """A collective cannot end: another rank is gone, has given up, or was late."""

    def __init__(self, rank: int, lost: int | None, reason: str) -> None:
        """``lost`` is the missing rank, or None if unknown; ``rank`` is this one."""
        who = "another rank" if lost is None else f"rank {lost}"
        super().__init__(
            ErrorCode.INTERNAL, f"rank {rank} waits for {who}: {reason}", rank=rank, lost=lost, reason=reason
        )
        self.rank, self.lost, self.reason = rank, lost, reason


class _Struct(ctypes.Structure):
    _fields_ = [
        ("memory", POINTER),
        *((name, SIZE) for name in ("rank", "size", "bytes", "timeout_ns")),
        *(("fd", ctypes.c_int32), ("round", ctypes.c_uint32), ("resets", ctypes.c_uint32)),
        *(("failure", ctypes.c_int32), ("lost", ctypes.c_int32)),
    ]


class Collective:
    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        """Take ownership of ``fd``, memory that :func:`create` made for ``size`` ranks (else ValueError)."""
        self.rank, self.size = rank, size
        self._fd = fd
        needed = _bytes(size, BUFFER_BYTES)
        if not 0 <= rank < size <= MAX_RANKS or os.fstat(fd).st_size != needed:
            os.close(fd)
            raise ValueError(f"no shared memory for rank {rank} of {size}")
        assert _struct_bytes() == ctypes.sizeof(_Struct), "built from other sources"
        fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        self._memory = mmap.mmap(fd, needed)
        self._first = ctypes.c_char.from_buffer(self._memory)
        address = ctypes.addressof(self._first)
        self._struct = _Struct(
            address, rank, size, BUFFER_BYTES, int(timeout_s * 1e9), fd, round=0, failure=0, lost=-1
        )
        self.address = ctypes.addressof(self._struct)
        """Address for kernels that call collectives themselves; :meth:`check` afterwards."""

    @property
    def buffer_bytes(self) -> int:
        return int(self._struct.bytes)

    def rounds(self, nbytes: int) -> int:
        return -(-nbytes // self.buffer_bytes)

    def assemble(self) -> None:
        """Return when all ranks have come; before anything else."""
        _assemble(self.address)
        self.check()

    def all_reduce(self, x: Tensor) -> None:
        """Replace contiguous ``x``, of :data:`~.native.FLOATS`, by the sum over all ranks."""
        _require(x.is_contiguous() and x.dtype in native.FLOATS, x)
        _ALL_REDUCE[x.dtype](self.address, x.data_ptr(), x.numel(), torch.get_num_threads())
        self.check()

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Write ``x`` [T, w] of each rank side by side into ``out`` [T, n]; further columns are dropped."""
        fits = x.dim() == out.dim() == 2 and x.dtype == out.dtype and len(x) == len(out)
        _require(fits and x.is_contiguous() and out.is_contiguous(), x)
        row, width = out.shape[1] * out.itemsize, x.shape[1] * x.itemsize
        threads = torch.get_num_threads()
        _all_gather(self.address, x.data_ptr(), len(x), width, out.data_ptr(), row, row, threads)
        self.check()

    def broadcast(self, x: Tensor, source: int) -> None:
        """Replace contiguous ``x`` by that of rank ``source``."""
        _require(x.is_contiguous() and 0 <= source < self.size, x)
        _broadcast(self.address, x.data_ptr(), x.nbytes, source, torch.get_num_threads())
        self.check()

    def barrier(self) -> None:
        _barrier(self.address)
        self.check()

    def abort(self) -> None:
        """Make every call that waits for this rank fail, now and later."""
        _abort(self.address)

    def reset(self) -> None:
        _reset(self.address)
        self.check()

    def check(self) -> None:
        failure = self._struct.failure
        if failure:
            lost = self._struct.lost
            raise RankLostError(self.rank, None if lost < 0 else lost, _REASONS[failure])

    def close(self) -> None:
        _leave(self.address)
        del self._first
        self._memory.close()
        os.close(self._fd)


def create(size: int) -> int:
    """Return a file descriptor of zeroed memory for ``size`` ranks."""
    fd = os.memfd_create("caesura-ranks")
    os.truncate(fd, _bytes(size, BUFFER_BYTES))
    return fd


def _require(fits: bool, x: Tensor) -> None:
    if not fits or x.device != torch.device("cpu"):
        raise native.misfit(f"no collective on {x.device}", x)
