"""Ranks that are processes of one host and compute on its CPU: collectives over memory that they share.

Invariants: rank 0 makes the memory and hands out its address; nobody enters :func:`join` for longer than the
timeout. The memory has no name, so nothing is left of a group whatever ends its ranks.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..kernels import native
from ..kernels.collectives import MAX_RANKS, Collective, create
from .group import TensorParallel

TIMEOUT_S = 600.0
"""Longest wait for a rank that lives, in seconds: it may still be loading weights."""


class HostGroup(TensorParallel):
    def __init__(self, collective: Collective) -> None:
        super().__init__(collective.rank, collective.size)
        self.compiled = self._collective = collective

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype in native.FLOATS:
            self._collective.all_reduce(x)
        else:
            x.copy_(summed(self.all_gather(x.view(1, -1)).view(self.size, *x.shape)))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        if out is None:
            out = x.new_empty((x.shape[0], self.size * x.shape[1]))
        self._collective.all_gather(x, out)
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        self._collective.broadcast(x, source)

    def barrier(self) -> None:
        self._collective.barrier()

    def abort(self) -> None:
        self._collective.abort()

    def reset(self) -> None:
        self._collective.reset()

    def close(self) -> None:
        self._collective.close()


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
    fd = create(size)
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
        collective = Collective(fd, rank, size, timeout_s)
    except (OSError, ValueError) as error:
        reason = f"rank {rank} of {size} cannot share memory: {error}"
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, reason=str(error)) from error
    group = HostGroup(collective)
    on_made(group)
    collective.assemble()
    return group
