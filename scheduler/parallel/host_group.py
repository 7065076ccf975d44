"""Ranks that are processes of one host and compute on its CPU: collectives over memory that they share.

The collectives are compiled (``kernels/cpu/collectives.cpp``). Invariants:
- Rank 0 makes the memory and hands out its address; nobody enters :func:`join` for longer than the timeout.
- Waiters notice within tens of milliseconds that a process ended: the system drops its lock on a byte.
- After a failure every call fails until :meth:`HostGroup.reset` on all ranks, or for ever if one is gone.
- The memory has no name, so nothing is left of a group whatever ends its ranks.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..kernels import native
from ..kernels.native import INT, POINTER, SIZE
from .group import RankLostError, TensorParallel

TIMEOUT_S = 600.0
"""Longest wait for a rank that lives, in seconds: it may still be loading weights."""
BUFFER_BYTES = 1 << 20
"""Bytes per rank and round: enough for the sums of a decode step, few enough to stay in a cache."""
MAX_RANKS = 64

_bytes = native.function("caesura_collective_bytes", SIZE, SIZE, result=SIZE)
_struct_bytes = native.function("caesura_collective_struct_bytes", result=SIZE)
_REDUCE = native.by_dtype("caesura_reduce", POINTER, POINTER, SIZE, SIZE, SIZE, INT)
_collect = native.function("caesura_collect", POINTER, POINTER, SIZE, SIZE, POINTER, POINTER, POINTER, INT)
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
"""Layout of ``struct flock`` on 64-bit Linux: type, whence, start, length, process."""
_F_OFD_SETLK = 37


class _Struct(ctypes.Structure):
    _fields_ = [
        ("memory", POINTER),
        *((name, SIZE) for name in ("rank", "size", "bytes", "timeout_ns")),
        *(("fd", ctypes.c_int32), ("round", ctypes.c_uint32), ("resets", ctypes.c_uint32)),
        *(("failure", ctypes.c_int32), ("lost", ctypes.c_int32)),
    ]


class HostGroup(TensorParallel):
    def __init__(self, fd: int, rank: int, size: int, timeout_s: float) -> None:
        """Take ownership of ``fd``, memory that :func:`found` made for ``size`` ranks (else ValueError)."""
        super().__init__(rank, size)
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

    def rounds(self, nbytes: int) -> int:
        """Return how often the buffers are filled for ``nbytes``."""
        return -(-nbytes // BUFFER_BYTES)

    def assemble(self) -> None:
        """Return when all ranks have come; before anything else."""
        _assemble(self.address)
        self.check()

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype not in native.FLOATS:
            x.copy_(summed(self.all_gather(x.view(1, -1)).view(self.size, *x.shape)))
            return
        self._reduce(x, 0, x.numel())

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        begin = sum(counts[: self.rank])
        end, width = begin + counts[self.rank], x.shape[1]
        _require(x.dtype in native.FLOATS and len(x) == sum(counts), x)
        self._reduce(x, begin * width, end * width)
        return x[begin:end]

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        _require(len(x) == counts[self.rank], x)
        return self._collect(x, max(counts), [0] * self.size, counts)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        _require(len(x) == sum(counts[self.rank]), x)
        before = [sum(sent[: self.rank]) for sent in counts]
        return self._collect(x, max(map(sum, counts)), before, [sent[self.rank] for sent in counts])

    def _reduce(self, x: Tensor, begin: int, end: int) -> None:
        _require(x.is_contiguous(), x)
        _REDUCE[x.dtype](self.address, x.data_ptr(), x.numel(), begin, end, torch.get_num_threads())
        self.check()

    def _collect(self, x: Tensor, longest: int, before: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return rows ``[before, before + counts)`` of each rank; the longest ``x`` has ``longest`` rows."""
        x = x.contiguous()
        out = x.new_empty((sum(counts), x.shape[1]))
        _require(x.dim() == 2, x)
        width, numbers = x.shape[1] * x.itemsize, ctypes.c_int64 * self.size
        begins, sizes = (numbers(*(rows * width for rows in each)) for each in (before, counts))
        threads = torch.get_num_threads()
        _collect(
            self.address, x.data_ptr(), x.nbytes, longest * width, begins, sizes, out.data_ptr(), threads
        )
        self.check()
        return out

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        if out is None:
            out = x.new_empty((x.shape[0], self.size * x.shape[1]))
        fits = x.dim() == out.dim() == 2 and x.dtype == out.dtype and len(x) == len(out)
        _require(fits and out.is_contiguous(), x)
        row, width = out.shape[1] * out.itemsize, x.shape[1] * x.itemsize
        threads = torch.get_num_threads()
        _all_gather(self.address, x.data_ptr(), len(x), width, out.data_ptr(), row, row, threads)
        self.check()
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        _require(x.is_contiguous() and 0 <= source < self.size, x)
        _broadcast(self.address, x.data_ptr(), x.nbytes, source, torch.get_num_threads())
        self.check()

    def barrier(self) -> None:
        _barrier(self.address)
        self.check()

    def abort(self) -> None:
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


def summed(parts: Tensor) -> Tensor:
    """Return the sum of ``parts`` [ranks, ...], added in their order, in float32 where that is wider."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


def found(size: int) -> tuple[int, str]:
    """Make memory for ``size`` ranks; return its descriptor and address, or raise ``unsupported``."""
    reason = native.why_not()
    if reason is None and size > MAX_RANKS:
        reason = f"at most {MAX_RANKS} ranks, not {size}"
    if reason is not None:
        message = f"ranks cannot share memory: {reason}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, message, reason=reason, size=size)
    fd = os.memfd_create("caesura-ranks")
    os.truncate(fd, _bytes(size, BUFFER_BYTES))
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def join(
    memory: int | str,
    rank: int,
    size: int,
    timeout_s: float = TIMEOUT_S,
    *,
    on_made: Callable[[HostGroup], object] = lambda _: None,
) -> HostGroup:
    """Enter a group of :func:`found` by its descriptor (rank 0) or its address; return when all have.

    ``on_made`` gets the group before that, to abort the wait for a rank that has ended. RankLostError: some
    are late or gone. CaesuraError ``unsupported``: the memory is not for ``size`` ranks.
    """
    try:
        fd = memory if isinstance(memory, int) else os.open(memory, os.O_RDWR | os.O_CLOEXEC)
        group = HostGroup(fd, rank, size, timeout_s)
    except (OSError, ValueError) as error:
        reason = f"rank {rank} of {size} cannot share memory: {error}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, reason=str(error)) from error
    on_made(group)
    group.assemble()
    return group


def _require(fits: bool, x: Tensor) -> None:
    if not fits or x.device != torch.device("cpu"):
        raise native.misfit(f"no collective on {x.device}", x)
