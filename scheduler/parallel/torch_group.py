"""Ranks on several hosts, or with an accelerator each: collectives by the backends of torch.distributed.

Invariants:
- A backend is used bare, without torch's registry of process groups: it leaves no global state.
- gloo only carries bytes: sums are taken here, in the order of ranks, so they have the bits of those over
  shared memory. NCCL sums by itself: all ranks get the same bits, which may depend on the number of elements.
- Ranks that would compute otherwise than rank 0 (other kernels, another torch) are refused when the group
  forms: each rank samples for itself, and a single other bit could make it sample another token.
- A gloo backend ends with its last reference, which closes its connections and so tells the others: whoever
  gives up or fails lets go of it.
- On the CPU a collective that cannot end raises. On an accelerator it is enqueued, and nobody waits for it:
  who notices that a rank is gone calls :meth:`TorchGroup.abort`.

NCCL's way is written against torch 2.13 and has not been run on several GPUs.
"""

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ...io_struct import CaesuraError, ErrorCode
from ..kernels import serving
from .group import RankLostError, TensorParallel
from .host_group import TIMEOUT_S, summed

_NCCL_IN_TORCH = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # wait() orders streams; the host goes on
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a watchdog ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class TorchGroup(TensorParallel):
    """A group over gloo, or NCCL where tensors are on CUDA."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Take the store of :func:`listen`; :meth:`assemble` before anything else."""
        super().__init__(rank, size)
        self._store, self._device = store, device
        self._timeout = timedelta(seconds=timeout_s)
        self._generation = 0
        self._made: SimpleQueue[Any] = SimpleQueue()
        """The next backend, or an error, or None if this rank gives up before."""
        self._backend: Any = None
        self._is_lost = False

    def assemble(self) -> None:
        """Return when all ranks have come. RankLostError: they have not in time, or this one has given up."""
        if self._is_lost:  # looked at with the queue in place in which a loss from now on is told
            raise self._given_up()
        self._backend = self._make()

    def all_reduce(self, x: Tensor) -> None:
        if x.device.type == "cuda":
            self._end(self._live().allreduce([x]))
        else:
            x.copy_(summed(self._gathered(x)))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = self._gathered(x.contiguous())
        if out is None:
            out = x.new_empty((x.shape[0], self.size * x.shape[1]))
        width = x.shape[1]
        for rank, part in enumerate(parts):
            target = out[:, rank * width : (rank + 1) * width]
            target.copy_(part[:, : target.shape[1]])
        return out

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        parts = self._gathered(_padded(x, max(counts)))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        own, longest = counts[self.rank], max(counts)
        if x.device.type == "cuda":
            blocks = torch.cat([_padded(part, longest) for part in x.split(list(counts))])
            out = x.new_empty((longest, x.shape[1]))
            self._end(self._live()._reduce_scatter_base(out, blocks))
            return out[:own]
        parts = self.all_to_all(x, [counts] * self.size)
        return summed(parts.view(self.size, own, x.shape[1])).to(x.dtype)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        received = [sent[self.rank] for sent in counts]
        out = x.new_empty((sum(received), x.shape[1]))
        sizes = received, list(counts[self.rank])
        rows = (each.contiguous().view(torch.uint8) for each in (out, x))
        self._end(self._live().alltoall_base(*rows, *sizes))
        return out

    def broadcast(self, x: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._end(self._live().broadcast([_as_bytes(x)], options))

    def barrier(self) -> None:
        # On an accelerator it is one for the device alone.
        self.all_reduce(torch.zeros(1, device=self._device))

    def abort(self) -> None:
        backend, self._backend = self._backend, None
        self._made.put(None)
        if backend is not None and self._device.type == "cuda":
            backend.abort()

    def lose(self) -> None:
        self._is_lost = True
        self.abort()

    def reset(self) -> None:
        self.abort()
        self._generation, self._made = self._generation + 1, SimpleQueue()
        self.assemble()

    def close(self) -> None:
        self.abort()

    def _live(self) -> Any:
        if self._backend is None:
            raise self._given_up()
        return self._backend

    def _given_up(self) -> RankLostError:
        return RankLostError(self.rank, None, "this rank has given up, or has seen another one fail")

    def _make(self) -> Any:
        store = PrefixStore(f"ranks/{self._generation}", self._store)
        if self._device.type == "cuda":
            os.environ.update(_NCCL_IN_TORCH)
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        made = self._made

        def make() -> None:
            try:
                made.put(dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout))
            except RuntimeError as error:
                made.put(RankLostError(self.rank, None, str(error)))

        # In a thread, as it waits for a rank that has ended until the timeout.
        Thread(target=make, name="caesura-gloo", daemon=True).start()
        found = made.get()
        if found is None or isinstance(found, RankLostError):
            raise found or self._given_up()
        return found

    def _gathered(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        if x.device.type == "cuda":
            self._end(self._live()._allgather_base(_as_bytes(parts), _as_bytes(x)))
        else:
            self._end(self._live().allgather([[_as_bytes(part) for part in parts]], [_as_bytes(x)]))
        return parts

    def _end(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()
            return
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            self.abort()
            raise RankLostError(self.rank, None, str(error)) from error


def listen(host: str, size: int) -> tuple[Store, str]:
    """Return rank 0's store and its address ``host:port``; torch itself would listen on all addresses."""
    family, *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server((host, 0), family=family, backlog=size)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def join(
    store: Store | str,
    rank: int,
    size: int,
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float = TIMEOUT_S,
    *,
    on_made: Callable[[TorchGroup], object] = lambda _: None,
) -> TorchGroup:
    """Enter a group that computes in ``dtype``, by the store of :func:`listen` (rank 0) or its address.

    ``on_made`` gets the group before that, to abort the wait for a rank that has ended. RankLostError: some
    rank is not there in time. ``unsupported``: it would compute otherwise than rank 0.
    """
    try:
        if isinstance(store, str):
            host, _, port = store.rpartition(":")
            store = TCPStore(host, int(port), size, is_master=False, timeout=timedelta(seconds=timeout_s))
        mine = f"torch {torch.__version__}, {serving(device, dtype)}"
        if rank == 0:
            store.set("computes", mine)
        theirs = store.get("computes").decode()
    except RuntimeError as error:
        raise RankLostError(rank, 0, str(error)) from error
    if mine != theirs:
        reason = (
            f"rank {rank} would sample other tokens than rank 0: "
            f"it computes with {mine}, rank 0 with {theirs}"
        )
        raise CaesuraError(ErrorCode.UNSUPPORTED, reason, rank=rank)
    group = TorchGroup(store, rank, size, device, timeout_s)
    on_made(group)
    group.assemble()
    return group


def _padded(x: Tensor, rows: int) -> Tensor:
    return x.contiguous() if len(x) == rows else torch.cat((x, x.new_zeros((rows - len(x), x.shape[1]))))


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
