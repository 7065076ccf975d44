"""The meeting of a weight update group's ranks in a store of this process; every wait has a limit."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...io_struct import InitWeightsUpdateGroupReqInput, InitWeightsUpdateGroupReqOutput
from ...transfer.process_group import Backend, serve_store
from ..exceptions import EngineError, GroupError
from .two_phase import started

if TYPE_CHECKING:
    from ..connection.blocking import ControlClient

GRACE_S = 5.0
"""Seconds between one side's end of something and the other's."""


def invite(
    clients: "Sequence[ControlClient]",
    address: str,
    port: int,
    name: str,
    backend: Backend,
    limits: tuple[float, float],
    *,
    ranks: Sequence[int],
    first_rank: int = 1,
) -> list[Future[Any]]:
    """Ask every engine to join with its ``ranks``; ``limits`` are seconds for joining and a broadcast."""
    return [
        started(
            client,
            InitWeightsUpdateGroupReqInput(
                master_address=address,
                master_port=port,
                rank_offset=rank,
                world_size=first_rank + sum(ranks),
                group_name=name,
                backend=backend,
                timeout_s=limits[0],
                broadcast_timeout_s=limits[1],
            ),
            InitWeightsUpdateGroupReqOutput,
        )
        for rank, client in zip(accumulate(ranks, initial=first_rank), clients, strict=False)
    ]


def await_ranks(joining: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until every rank has joined; raise the error of the first that has not, in their order."""
    done, late = wait(joining, timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
    for future in joining:
        if future in done:
            future.result()
    if late:
        raise GroupError(f"{len(late)} of {len(joining)} ranks did not join within {timeout_s:g} s")


def make_store(address: str, port: int, limit: timedelta, size: int = 1) -> tuple[Any, bool]:
    """Return a store for ``size`` ranks in this process, and True if ``address`` is one of this host."""
    try:
        return serve_store(address, port, size, limit)
    except (OSError, RuntimeError) as error:
        raise GroupError(f"cannot serve on {address}:{port}: {error}") from error


def common_backend(clients: "Sequence[ControlClient]", timeout_s: float) -> Backend:
    """Return nccl if this process and every engine have CUDA devices, else gloo."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "gloo"
    return backend_of(clients, timeout_s)


def backend_of(engines: "Sequence[ControlClient]", timeout_s: float) -> Backend:
    """Return nccl if every engine is on a CUDA device, else gloo."""
    devices = [client.status(timeout=timeout_s).device for client in engines]
    return "nccl" if all(device.startswith("cuda") for device in devices) else "gloo"


def ranks_of(clients: "Sequence[ControlClient]", timeout_s: float) -> list[int]:
    return [1 + len(client.status(timeout=timeout_s).ranks) for client in clients]


def leave(clients: "Sequence[ControlClient]", name: str, timeout_s: float) -> None:
    """Have each engine leave a group, if it is in it and not gone."""
    for client in clients:
        with contextlib.suppress(EngineError):
            client.destroy_weights_update_group(name, timeout=timeout_s)


def beside(work: Callable[[], Any]) -> Future[Any]:
    """Run ``work`` in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  it crosses to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="caesura-group", daemon=True).start()
    return future
