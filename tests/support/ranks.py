"""Processes that are ranks of groups, and call what a test names."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from caesura.scheduler.models import registry
from caesura.scheduler.parallel import host_group, torch_group
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.weights.transports import disk

from .waiting import PATIENCE_S

ANSWER_S = 120.0
"""Seconds that a test waits for its ranks: longer than any of them takes on a busy machine."""
Job = Callable[..., Any]


class Ranks:
    """``size`` processes of one group over shared memory, or gloo; this one is none of them."""

    def __init__(self, size: int, timeout_s: float = PATIENCE_S, *, gloo: bool = False) -> None:
        # torch is imported once, by a process without threads
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([each.__name__ for each in (torch_group, host_group, registry, disk)])
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, timeout_s, gloo), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        address = self._receive(self._pipes[0])
        for pipe in self._pipes[1:]:
            pipe.send(address)
        for pipe in self._pipes:
            assert self._receive(pipe) == "joined"

    def start(self, job: Job, *arguments: Any) -> None:
        """Have every rank call ``job(group, *arguments)``: a function of a module that they can import."""
        for pipe in self._pipes:
            pipe.send((job, arguments))

    def start_on(self, rank: int, job: Job, *arguments: Any) -> None:
        self._pipes[rank].send((job, arguments))

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        chosen = range(len(self._pipes)) if ranks is None else ranks
        return [self._receive(self._pipes[rank]) for rank in chosen]

    def call(self, job: Job, *arguments: Any) -> list[Any]:
        self.start(job, *arguments)
        return self.results()

    def kill(self, rank: int) -> None:
        """Kill a rank as the system kills a process: nothing of it runs any more."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    @staticmethod
    def _receive(pipe: Connection) -> Any:
        assert pipe.poll(ANSWER_S), "a rank does not answer"
        answer = pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(pipe: Connection, rank: int, size: int, timeout_s: float, gloo: bool) -> None:
    torch.set_num_threads(1)
    found: Any
    if rank == 0:
        found, address = torch_group.listen("127.0.0.1", size) if gloo else host_group.found(size)
        pipe.send(address)
    else:
        found = pipe.recv()
    group: TensorParallel
    if gloo:
        group = torch_group.join(found, rank, size, torch.device("cpu"), torch.float32, timeout_s)
    else:
        group = host_group.join(found, rank, size, timeout_s)
    pipe.send("joined")
    with suppress(EOFError):  # the test is over
        while True:
            job, arguments = pipe.recv()
            pipe.send(_answer(job, group, arguments))


def _answer(job: Job, group: TensorParallel, arguments: tuple[Any, ...]) -> Any:
    try:
        return job(group, *arguments)
    except Exception as error:  # noqa: BLE001 (the test's to judge)
        return _RaisedError(repr(error))


class _RaisedError(Exception):
    """An exception of a rank, as text: errors of the wire cannot be rebuilt from their arguments."""
