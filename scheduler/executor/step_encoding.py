"""A step as bytes: a forward batch of the host on the way from rank 0 to its workers.

Invariants: a batch comes back as it was, field by field as its classes declare them. The header has the
numbers, and of each array where it lies; each begins at a multiple of :data:`_ALIGNMENT` bytes.
"""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..execution.forward import ForwardBatch

_ALIGNMENT = 8
"""Size of the widest element, in bytes."""
_PADDING = tuple(bytes(count) for count in range(_ALIGNMENT))


def encode_batch(batch: ForwardBatch) -> tuple[bytes, bytes]:
    """Return header and arrays of a step whose tensors are on the host."""
    parts: list[bytes | memoryview] = []
    end = 0

    def put(found: Any) -> tuple[str, int, tuple[int, ...]]:
        nonlocal end, parts
        array = np.ascontiguousarray(found.numpy() if isinstance(found, Tensor) else found)
        offset, padding = end, -array.nbytes % _ALIGNMENT
        parts += (array.data, _PADDING[padding])
        end += array.nbytes + padding
        return array.dtype.str, offset, array.shape

    header = msgspec.msgpack.Encoder(enc_hook=put).encode(batch)
    return header, b"".join(parts)


def decode_batch(header: bytes | msgspec.Raw, data: bytes | memoryview) -> ForwardBatch:
    arrays = bytearray(data)  # the runner writes into the input ids

    def take(kind: type, place: tuple[str, int, list[int]]) -> Tensor | np.ndarray:
        dtype, offset, shape = place
        array: np.ndarray = np.ndarray(shape, dtype, arrays, offset)
        return torch.from_numpy(array) if kind is Tensor else array

    return msgspec.msgpack.Decoder(ForwardBatch, dec_hook=take).decode(header)
