"""A step as bytes: what a forward batch of the host is on the way from rank 0 to its workers.

Invariants:
- A batch comes back as it was, field by field as its classes declare them: what is added to these travels without a word here.
- The header has the numbers, and of each array where it lies; each begins at a multiple of :data:`_ALIGNMENT` bytes.
"""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..execution.forward import ForwardBatch

_ALIGNMENT = 8
"""Bytes: of the widest element."""
_PADDING = tuple(bytes(count) for count in range(_ALIGNMENT))


class _Writer:
    """Arrays of one frame, one behind the other."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self._end = 0

    def put(self, found: Any) -> tuple[str, int, tuple[int, ...]]:
        """Of a tensor or array: its dtype, where it lies, and its shape."""
        array = np.ascontiguousarray(found.numpy() if isinstance(found, Tensor) else found)
        offset = self._end
        padding = -array.nbytes % _ALIGNMENT
        self.parts += (array.data, _PADDING[padding])
        self._end += array.nbytes + padding
        return array.dtype.str, offset, array.shape


class _Reader:
    """The same, of a frame that came."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = bytearray(data)  # the runner writes into the input ids

    def take(self, kind: type, place: tuple[str, int, list[int]]) -> Tensor | np.ndarray:
        """As :meth:`_Writer.put` was given it."""
        dtype, offset, shape = place
        array: np.ndarray = np.ndarray(shape, dtype, self._data, offset)
        return torch.from_numpy(array) if kind is Tensor else array


def encode_batch(batch: ForwardBatch) -> tuple[bytes, bytes]:
    """Header and arrays of a step whose tensors are on the host."""
    writer = _Writer()
    header = msgspec.msgpack.Encoder(enc_hook=writer.put).encode(batch)
    return header, b"".join(writer.parts)


def decode_batch(header: bytes | msgspec.Raw, data: bytes | memoryview) -> ForwardBatch:
    """What :func:`encode_batch` was given, with arrays of its own."""
    return msgspec.msgpack.Decoder(ForwardBatch, dec_hook=_Reader(data).take).decode(header)
