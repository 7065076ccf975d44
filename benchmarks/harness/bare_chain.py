"""A chain without engines: processes that receive buckets over gloo, copy each once and pass it on.

Its sender spends what gloo and the kernel's loopback make of the same bytes with as many receivers on the
same cores. The difference to a chain of engines is the engines' and their messages'.
"""

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from caesura.client.trainer import WeightUpdateGroup

_HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=300)


def _link(store: Any, number: int, rank: int) -> Any:
    """Return one end of a link like the engines' (transfer/process_group.py)."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HOST)]
    options._threads, options._timeout = 2, _LIMIT
    return dist.ProcessGroupGloo(PrefixStore(f"link {number}", store), rank, 2, options)


def _broadcast(link: Any, view: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = _LIMIT
    return link.broadcast([view], options)


def _pass_on(port: int, number: int, is_last: bool, sizes: Sequence[int], turns: Any, done: Any) -> None:
    """Receive and pass on one update for each release of ``turns``; release ``done`` after each."""
    torch.set_num_threads(1)
    store = TCPStore(_HOST, port, is_master=False)
    source = _link(store, number, 1)
    behind = None if is_last else _link(store, number + 1, 0)
    buffers = [torch.empty(max(sizes), dtype=torch.uint8) for _ in range(2)]
    copy = torch.empty(max(sizes), dtype=torch.uint8)
    while True:
        turns.acquire()
        under_way: list[Any] = [None, None]
        for at, size in enumerate(sizes):
            if under_way[at % 2] is not None:
                under_way[at % 2].wait()
            view = buffers[at % 2][:size]
            _broadcast(source, view).wait()
            if behind is not None:
                under_way[at % 2] = _broadcast(behind, view)
            copy[:size].copy_(view)
        for work in under_way:
            if work is not None:
                work.wait()
        done.release()


class BareChain:
    """Processes that receive, and the sender in this one."""

    def __init__(self, receivers: int, parts: Sequence[list[tuple[str, torch.Tensor]]]) -> None:
        self._stack = ExitStack()
        self._parts = parts
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        sizes = [sum(tensor.nbytes for _, tensor in part) for part in parts]
        self._turns = [context.Semaphore(0) for _ in range(receivers)]
        self._done = context.Semaphore(0)
        for number, turns in enumerate(self._turns):
            arguments = (store.port, number, number + 1 == receivers, sizes, turns, self._done)
            process = context.Process(target=_pass_on, args=arguments, daemon=True)
            process.start()
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
        self._group = WeightUpdateGroup(_link(store, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()
        self._stack.close()

    def update(self) -> None:
        """Send all parts, as a chain's trainer does, and wait until every receiver has them.

        What the kernel counts as acknowledged is all of it then, as after an update that engines have
        answered.
        """
        for turns in self._turns:
            turns.release()
        for part in self._parts:
            self._group.send(part, "flattened_bucket", lambda: False)
        for _ in self._turns:
            self._done.acquire()
