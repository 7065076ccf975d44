"""Flushes of verl's ``delta_sharded`` checkpoint engine, read as what a delta sends.

A flush is three tensors: ``__delta_spec__`` (JSON), ``__values__``, and ``__positions__``, int32 within each
parameter, unless the flush is dense. It names no base, so nothing tells one of other weights.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

import msgspec
import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ...transfer.safetensors import DTYPES
from ..exceptions import InvalidRequest
from .buckets import SparseTensor
from .sparse_updates import WeightDelta

SPEC, POSITIONS, VALUES = "__delta_spec__", "__positions__", "__values__"
_POSITION_BYTES = 4


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: list[int]
    pos_start: int
    """First byte in the positions."""
    pos_end: int
    pos_width: int
    val_start: int
    """First element in the values."""
    val_end: int


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    encoding: Literal["indices", "dense"]
    params: list[_Entry]
    checksum: int
    is_last: bool = False


def read_flush(named_tensors: Iterable[tuple[str, Tensor]]) -> WeightDelta | dict[str, Tensor]:
    """Return the delta that a flush is, or the tensors of a dense one, for ``update_weights_from_tensor``.

    InvalidRequest if a flush is torn, has an encoding or a field that is not known, or an element twice.
    """
    tensors = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in named_tensors}
    try:
        spec = msgspec.json.decode(tensors[SPEC].numpy().tobytes(), type=_Spec)
        values = tensors[VALUES]
    except (KeyError, msgspec.DecodeError) as error:
        raise _refused(f"has no manifest or values: {error}") from error
    positions = tensors.get(POSITIONS, torch.empty(0, dtype=torch.uint8))
    if (found := _checksum(positions) ^ _checksum(values) << 1) != spec.checksum:
        raise _refused(f"has the checksum {found}, not {spec.checksum}")
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    whole: dict[str, Tensor] = {}
    shapes = {entry.name: entry.shape for entry in spec.params}
    for entry in spec.params:
        own = values[entry.val_start : entry.val_end].to(_dtype(entry))
        at = positions[entry.pos_start : entry.pos_end]
        count = prod(entry.shape) if spec.encoding == "dense" else at.numel() // _POSITION_BYTES
        if own.numel() != count or entry.shape != shapes[entry.name]:
            raise _refused(f"has {own.numel()} values of {entry.name!r} {entry.shape} for {count} places")
        if spec.encoding == "dense":
            whole[entry.name] = own.view(entry.shape)
        elif entry.pos_width != _POSITION_BYTES:
            raise _refused(f"has positions of {entry.pos_width} bytes, not {_POSITION_BYTES}")
        else:
            parts.setdefault(entry.name, []).append((at.view(torch.int32), own))
    if spec.encoding == "dense":
        return whole
    return WeightDelta(
        {
            name: _sorted(name, shapes[name], *map(torch.cat, zip(*each, strict=True)))
            for name, each in parts.items()
        }
    )


def read_frames(
    parts: Iterable[tuple[Sequence[TensorSpec], Sequence[memoryview]]],
) -> WeightDelta | dict[str, Tensor]:
    """Read a flush whose tensors lie in frames."""
    return read_flush(
        (spec.name, torch.frombuffer(frame, dtype=getattr(torch, DTYPES[spec.dtype].torch)))
        for specs, frames in parts
        for spec, frame in zip(specs, frames, strict=True)
        if frame
    )


def _sorted(name: str, shape: list[int], positions: Tensor, values: Tensor) -> SparseTensor:
    positions, order = positions.sort()
    inside = not positions.numel() or (positions[0] >= 0 and positions[-1] < prod(shape))
    if not inside or (positions[1:] == positions[:-1]).any():
        raise _refused(f"has elements of {name!r} twice, or outside of {shape}")
    return SparseTensor.of(shape, positions, values[order])


def _checksum(tensor: Tensor) -> int:
    return int(torch.hash_tensor(tensor).item()) if tensor.numel() else 0


def _dtype(entry: _Entry) -> torch.dtype:
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise _refused(f"has the dtype {entry.dtype!r}")
    return found


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the flush {reason}", field="serialized_named_tensors")
