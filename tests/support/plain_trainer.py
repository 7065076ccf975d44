"""A trainer that shares no code with this project: rank 0 of a process group, as the field makes it."""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from caesura.client.trainer import manifest
from caesura.io_struct import InitWeightsUpdateGroupReqInput, UpdateWeightsFromDistributedReqInput

from .waiting import PATIENCE_S

Weights = dict[str, torch.Tensor]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def weights_of(path: Path) -> Weights:
    return load_file(path / "model.safetensors")


def update_message(weights: Weights, **fields: object) -> UpdateWeightsFromDistributedReqInput:
    return UpdateWeightsFromDistributedReqInput(specs=manifest(weights.items()), **fields)


class PlainTrainer:
    """Rank 0 as trainers of the field make it."""

    def __init__(
        self, name: str = "weight_update_group", world_size: int = 2, timeout_s: float = PATIENCE_S
    ) -> None:
        self.name, self.port, self.world_size = name, free_port(), world_size
        self.timeout = timedelta(seconds=timeout_s)
        self.group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None

    def init_message(self, rank: int = 1, **fields: object) -> InitWeightsUpdateGroupReqInput:
        values = {"group_name": self.name, "world_size": self.world_size, "timeout_s": PATIENCE_S, **fields}
        return InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1", master_port=self.port, rank_offset=rank, **values
        )

    def join(self) -> None:
        address = f"tcp://127.0.0.1:{self.port}"
        store, rank, size = next(iter(dist.rendezvous(address, 0, self.world_size, timeout=self.timeout)))
        store.set_timeout(self.timeout)
        named = {"group_name": self.name, "timeout": self.timeout}
        prefixed = dist.PrefixStore(self.name, store)
        self.group, _ = c10d._new_process_group_helper(size, rank, [], "gloo", prefixed, **named)
        c10d._world.pg_group_ranks[self.group] = {number: number for number in range(size)}

    def beside(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        assert self._thread is not None
        self._thread.join()
        assert not self._thread.is_alive()

    def broadcast_each(self, weights: Weights) -> None:
        for tensor in weights.values():
            dist.broadcast(tensor, 0, group=self.group)

    def broadcast_flat(self, weights: Weights) -> None:
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in weights.values()]
        dist.broadcast(torch.cat(flat), 0, group=self.group)

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
