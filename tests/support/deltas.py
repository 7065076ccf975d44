"""Deltas as a trainer sends them, made of two versions in plain torch, and sent by each transport."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caesura.client.trainer import SharedTensors
from caesura.io_struct import (
    DeltaBase,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from caesura.transfer.safetensors import NAMES_BY_TORCH
from caesura.transfer.weight_delta import DeltaMetadata, placed, write_delta

from .plain_trainer import PlainTrainer
from .scripted import EngineDriver

Weights = Mapping[str, Tensor]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SentDelta:
    """The elements of ``new`` that differ from ``old``; tensors of ``whole`` as they are."""

    def __init__(self, old: Weights, new: Weights, whole: Collection[str] = ()) -> None:
        tensors: list[tuple[TensorSpec, bytes]] = []
        for name, value in new.items():
            flat = value.contiguous().view(-1).view(BITS[value.itemsize])
            spec = TensorSpec(
                name=name, dtype=NAMES_BY_TORCH[str(value.dtype).removeprefix("torch.")], shape=[*value.shape]
            )
            if name in whole:
                tensors.append((spec, flat.numpy().tobytes()))
                continue
            before = old[name].contiguous().view(-1).view(flat.dtype)
            (positions,) = (before != flat).nonzero(as_tuple=True)
            if len(positions):
                data = positions.int().numpy().tobytes()
                data += bytes(-len(data) % 8) + flat[positions].numpy().tobytes()
                spec = TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape, count=len(positions))
                tensors.append((spec, data))
        self.specs, size = placed([spec for spec, _ in tensors])
        self.buffer = bytearray(size)
        for spec, (_, data) in zip(self.specs, tensors, strict=True):
            assert len(data) == spec.nbytes
            self.buffer[spec.offset : spec.offset + spec.nbytes] = data

    def bytes_of(self, spec: TensorSpec) -> Tensor:
        return torch.frombuffer(self.buffer, dtype=torch.uint8)[spec.offset : spec.offset + spec.nbytes]


def some_changed(weights: Weights, share: float = 0.01, seed: int = 0) -> dict[str, Tensor]:
    """Return copies of which a share of elements, at least two of a tensor, have other bits."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in weights.items():
        flat = value.clone().contiguous().view(-1)
        count = min(flat.numel(), max(2, round(share * flat.numel())))
        chosen = torch.randperm(flat.numel(), generator=generator)[:count]
        bits = flat.view(BITS[flat.itemsize])
        bits[chosen] ^= 1 << (0 if flat.itemsize == 1 else 2 * flat.itemsize)
        found[name] = flat.view(value.shape)
    return found


def by_tensor(driver: EngineDriver, sent: SentDelta, base: DeltaBase, folder: Path, **fields: Any) -> Any:
    message = UpdateWeightsFromTensorReqInput(specs=sent.specs, delta=base, **fields)
    return driver.call(message, buffers=[memoryview(sent.buffer)], max_ticks=100_000)


def by_ipc(driver: EngineDriver, sent: SentDelta, base: DeltaBase, folder: Path, **fields: Any) -> Any:
    with SharedTensors([("all", torch.frombuffer(sent.buffer, dtype=torch.uint8))]) as shared:
        handle = shared.memory.handle
        message = UpdateWeightsFromIPCReqInput(specs=sent.specs, handle=handle, delta=base, **fields)
        return driver.call(message, max_ticks=100_000)


def by_disk(driver: EngineDriver, sent: SentDelta, base: DeltaBase, folder: Path, **fields: Any) -> Any:
    write_delta(folder, sent.specs, [sent.buffer], DeltaMetadata())
    message = UpdateWeightFromDiskReqInput(model_path=str(folder), delta=base, **fields)
    return driver.call(message, max_ticks=100_000)


def by_broadcast(driver: EngineDriver, sent: SentDelta, base: DeltaBase, folder: Path, **fields: Any) -> Any:
    trainer = PlainTrainer(world_size=1 + driver.engine.config.tp)
    trainer.beside(trainer.join)
    driver.call(trainer.init_message(), max_ticks=100_000)
    trainer.finish()
    tensors = {spec.name: sent.bytes_of(spec).clone() for spec in sent.specs}
    trainer.beside(lambda: trainer.broadcast_each(tensors))
    message = UpdateWeightsFromDistributedReqInput(specs=sent.specs, delta=base, **fields)
    reply = driver.call(message, max_ticks=100_000)
    trainer.finish()
    trainer.close()
    return reply


ROADS: dict[str, Callable[..., Any]] = {
    "tensor": by_tensor, "ipc": by_ipc, "disk": by_disk, "distributed": by_broadcast,
}  # fmt: skip
