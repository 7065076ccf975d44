"""Two checkpoints' weights into an engine, by any transport, from this process as the trainer."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, Unpack, get_args

import torch
from safetensors.torch import load_file

from caesura.client import ControlClient
from caesura.client.connection.client_options import UpdateOptions
from caesura.client.trainer import SharedTensors, WeightUpdateGroup
from caesura.io_struct import WeightUpdateReqOutput

Transport = Literal["disk", "tensor", "ipc", "ipc-shared", "distributed"]
"""``ipc-shared`` is ipc by a trainer whose weights are in shared memory; ``ipc`` copies them there."""
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Weights = dict[str, torch.Tensor]


class Trainer:
    """Weights of ``folders``; as a context manager it also closes its process group and shared memory."""

    def __init__(
        self,
        client: ControlClient,
        folders: Sequence[Path],
        transports: Sequence[Transport],
        bucket_bytes: int,
    ) -> None:
        self.client = client
        self._folders = folders
        self._bucket_bytes = bucket_bytes
        self.group = WeightUpdateGroup.create([client]) if "distributed" in transports else None
        self.weights: list[Weights] = [load_file(folder / "model.safetensors") for folder in folders]
        self._shared: list[SharedTensors] = []
        if "ipc-shared" in transports:
            self._shared = [SharedTensors(weights.items()) for weights in self.weights]

    def push(
        self, transport: Transport, which: int, **options: Unpack[UpdateOptions]
    ) -> WeightUpdateReqOutput:
        """Update the engine to the weights of folder number ``which`` and return the final reply."""
        client, size = self.client, self._bucket_bytes
        options.setdefault("weight_version", f"checkpoint {which}")
        tensors = self.weights[which].items()
        match transport:
            case "disk":
                return client.update_weights_from_disk(self._folders[which], **options)
            case "tensor":
                return client.update_weights_from_tensor(tensors, bucket_bytes=size, **options)
            case "ipc":
                return client.update_weights_from_ipc(tensors, bucket_bytes=size, **options)
            case "ipc-shared":
                return client.update_weights_from_ipc(self._shared[which], **options)
            case "distributed":
                assert self.group is not None
                return client.update_weights_from_distributed(
                    tensors, group=self.group, bucket_bytes=size, **options
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.group is not None:
            self.group.close()
        for shared in self._shared:
            shared.close()
