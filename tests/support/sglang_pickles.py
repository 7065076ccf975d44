"""Tensors in the pickles of SGLang's clients."""

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import torch


@contextmanager
def shared_by_file_name() -> Iterator[None]:
    """Have storages shared by the names of files, as a server can open them."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def pickled(value: object) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class FlattenedTensorMetadata:
    """SGLang's struct, by name and fields."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    """SGLang's struct, by name and fields."""

    values: list[bytes]


def flattened(weights: Mapping[str, torch.Tensor]) -> dict[str, object]:
    metadata, end = [], 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.numel()))
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in weights.values()]
    return {"flattened_tensor": torch.cat(flat), "metadata": metadata}
