"""Pickles as foreign clients send them. Only this module and tests/unit/io_struct/test_legacy_pickle.py make
any; none is read back but by the latter, which compares Python's unpickler with the product's reader.
"""

import base64
import io
import pickle
import struct
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


def pickled(value: object, protocol: int | None = None) -> bytes:
    return pickle.dumps(value, protocol)


def payload_of(value: object) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


class Made:
    """Pickles as a call of ``module.name(*args)``, with ``state`` for it."""

    def __init__(self, name: str, *args: object, state: object = None) -> None:
        self.name, self.args, self.state = name, args, state


def _code(value: object) -> bytes:
    if isinstance(value, Made):
        module, _, name = value.name.rpartition(".")
        out = _code(module) + _code(name) + pickle.STACK_GLOBAL + _code(tuple(value.args)) + pickle.REDUCE
        return out if value.state is None else out + _code(value.state) + pickle.BUILD
    if isinstance(value, type) and issubclass(value, Made):
        raise TypeError
    if isinstance(value, (tuple, list, dict)):
        flat = [x for pair in value.items() for x in pair] if isinstance(value, dict) else list(value)
        inner = pickle.MARK + b"".join(map(_code, flat))
        if isinstance(value, tuple):
            return inner + pickle.TUPLE
        if isinstance(value, list):
            return pickle.EMPTY_LIST + inner + pickle.APPENDS
        return pickle.EMPTY_DICT + inner + pickle.SETITEMS
    if isinstance(value, torch.dtype):
        return _code("torch") + _code(str(value).removeprefix("torch.")) + pickle.STACK_GLOBAL
    return pickle.dumps(value, 4)[2:-1] if not isinstance(value, str) else _text(value)


def _text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def written(value: object) -> bytes:
    """Return a pickle of ``value`` by hand: what :class:`Made` names need not be importable here."""
    return pickle.PROTO + b"\x04" + _code(value) + pickle.STOP


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
