"""Layout of deltas: the elements of some tensors that differ between two versions of weights.

Invariants:
- Values are absolute, and positions flat in checkpoint layout, strictly ascending.
- In memory and on the wire a tensor is ``TensorSpec.nbytes`` of a buffer: whole, or where ``count`` is set
  its positions (int32, or int64 from 2^31 elements on), zeros to a multiple of 8, and the values.
- A folder holds them in ``delta.safetensors``: ``NAME.positions`` and ``NAME.values``, or ``NAME`` of a whole
  tensor. ``__metadata__`` says what they are, and of which weights. A file appears whole or not at all.
"""

import os
from collections.abc import Sequence
from io import BufferedReader, BytesIO
from math import prod
from pathlib import Path
from typing import Literal

import msgspec

from ..io_struct import TensorSpec
from .safetensors import DTYPES, LENGTH_BYTES, SafetensorsError, header_length, parse_header

DELTA_FILE = "delta.safetensors"
_ALIGNMENT = 8
_WIDE = 1 << 31
"""Elements of a tensor from which on positions are int64."""


class DeltaMetadata(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts about the weights that a delta is of."""

    base_digest: str | None = None
    digest: str | None = None
    """Digest of the weights after it."""
    base_version: str | None = None
    weight_version: str | None = None


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    count: int | None = None


class _FileMetadata(DeltaMetadata, kw_only=True):
    format: Literal["caesura_delta"]
    version: Literal["1"]
    tensors: str
    """JSON of a map from name to :class:`_Tensor`."""


class _Header(msgspec.Struct):
    metadata: _FileMetadata = msgspec.field(name="__metadata__")


def is_delta(folder: str) -> bool:
    """Return True if ``folder`` holds a delta instead of a checkpoint."""
    return os.path.exists(os.path.join(folder, DELTA_FILE))


def position_bytes(shape: Sequence[int]) -> int:
    """Return the size of a position in a tensor of ``shape``."""
    return 8 if prod(shape) >= _WIDE else 4


def values_offset(shape: Sequence[int], count: int) -> int:
    """Return the bytes from the first position of a sparse tensor to its first value."""
    return -(-count * position_bytes(shape) // _ALIGNMENT) * _ALIGNMENT


def sparse_nbytes(shape: Sequence[int], dtype: str, count: int) -> int:
    return values_offset(shape, count) + count * DTYPES[dtype].nbytes


def nbytes_of(dtype: str, shape: Sequence[int], count: int | None) -> int:
    """Return the bytes of a tensor of a delta: whole where ``count`` is None."""
    if count is None:
        return prod(shape) * DTYPES[dtype].nbytes
    return sparse_nbytes(shape, dtype, count)


def placed(tensors: Sequence[TensorSpec]) -> tuple[list[TensorSpec], int]:
    """Return ``tensors`` one after another in one buffer, each aligned, and its size."""
    specs, end = [], 0
    for spec in tensors:
        nbytes = nbytes_of(spec.dtype, spec.shape, spec.count)
        specs.append(msgspec.structs.replace(spec, offset=end, nbytes=nbytes, buffer=0))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return specs, end


def write_delta(
    folder: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    buffers: Sequence[memoryview | bytes | bytearray],
    metadata: DeltaMetadata,
) -> Path:
    """Write a delta, placed in ``buffers`` as on the wire, to ``folder``, which is made; return the file."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    parts = [part for spec in specs for part in _parts(spec)]
    parts.sort(key=lambda part: -DTYPES[part.dtype].nbytes)  # each is aligned to its own size then
    header: dict[str, object] = {"__metadata__": _strings(metadata, specs)}
    end = 0
    for part in parts:
        places = end, end + part.nbytes
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": places}
        end += part.nbytes
    if len(header) != 1 + len(parts):
        raise ValueError("two tensors of the delta have one name in its file")
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    path = Path(folder) / DELTA_FILE
    unfinished = path.with_name(f".{DELTA_FILE}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
            for part in parts:
                whole = memoryview(buffers[part.buffer]).cast("B")
                file.write(whole[part.offset : part.offset + part.nbytes])
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def read_delta(
    file: BufferedReader | BytesIO, size: int | None = None
) -> tuple[DeltaMetadata, list[TensorSpec], bytearray]:
    """Return a delta's metadata, and its tensors in one buffer as on the wire; raises SafetensorsError.

    ``size`` is that of the file in bytes, which one without a descriptor needs.
    """
    size = os.fstat(file.fileno()).st_size if size is None else size
    length = header_length(file.read(LENGTH_BYTES), size)
    header = file.read(length)
    entries = {entry.name: entry for entry in parse_header(header, size - LENGTH_BYTES - length)}
    try:
        metadata = msgspec.json.decode(header, type=_Header).metadata
        tensors = msgspec.json.decode(metadata.tensors, type=dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SafetensorsError(f"is not a delta: {error}") from error
    named = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise SafetensorsError(f"has {name!r} of unknown dtype {tensor.dtype!r}")
        named.append(TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape, count=tensor.count))
    specs, nbytes = placed(named)
    parts = [part for spec in specs for part in _parts(spec)]
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if len(found) != len(parts) or found != {part.name: (part.dtype, part.shape) for part in parts}:
        raise SafetensorsError("holds other tensors than its metadata names")
    buffer = bytearray(nbytes)
    for part in parts:
        file.seek(LENGTH_BYTES + length + entries[part.name].offset)
        if file.readinto(memoryview(buffer)[part.offset : part.offset + part.nbytes]) != part.nbytes:
            raise SafetensorsError("has become shorter while it was read")
    return metadata, specs, buffer


def _parts(spec: TensorSpec) -> list[TensorSpec]:
    """Return the tensors of the file that hold ``spec``, with their places in its buffer."""
    if spec.count is None:
        return [spec]
    values = values_offset(spec.shape, spec.count)
    size = position_bytes(spec.shape)
    positions = msgspec.structs.replace(
        spec, name=f"{spec.name}.positions", dtype=f"I{8 * size}", nbytes=spec.count * size
    )
    of_values = msgspec.structs.replace(
        spec, name=f"{spec.name}.values", offset=spec.offset + values, nbytes=spec.nbytes - values
    )
    return [msgspec.structs.replace(part, shape=[spec.count]) for part in (positions, of_values)]


def _strings(metadata: DeltaMetadata, specs: Sequence[TensorSpec]) -> dict[str, str]:
    tensors = {spec.name: _Tensor(spec.dtype, spec.shape, spec.count) for spec in specs}
    known = {name: value for name, value in msgspec.structs.asdict(metadata).items() if value is not None}
    listed = msgspec.json.encode(tensors).decode()
    return {"format": "caesura_delta", "version": "1", **known, "tensors": listed}
