"""The header of a safetensors file (https://huggingface.co/docs/safetensors), and dtype names, also the
wire's.

Invariant: a header's length is checked against a limit and what is there before it is read, and its tensors
cover the data behind it without gap or overlap, each as many bytes as its shape and dtype say.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, NamedTuple

import msgspec

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8

_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch.save, pickle


class Dtype(NamedTuple):
    torch: str
    """Name of the dtype in torch, and in a config.json."""
    nbytes: int


DTYPES = {
    "F64": Dtype("float64", 8),
    "F32": Dtype("float32", 4),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "I64": Dtype("int64", 8),
    "I32": Dtype("int32", 4),
    "I16": Dtype("int16", 2),
    "I8": Dtype("int8", 1),
    "U64": Dtype("uint64", 8),
    "U32": Dtype("uint32", 4),
    "U16": Dtype("uint16", 2),
    "U8": Dtype("uint8", 1),
    "BOOL": Dtype("bool", 1),
}
"""By safetensors' name, which is the wire's."""
NAMES_BY_TORCH = {dtype.torch: name for name, dtype in DTYPES.items()}


class SafetensorsError(ValueError):
    """A file's fault, to follow its name in a sentence."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    shape: list[int]
    offset: int
    """Bytes from the end of the header."""
    nbytes: int


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Shape = Annotated[list[_Count], msgspec.Meta(max_length=64)]
"""At most torch's limit: a product of millions would take minutes."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Count, _Count]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)


def header_length(prefix: bytes, size: int, limit: int = MAX_HEADER_BYTES) -> int:
    """Return the length of the header behind ``prefix``, the first eight of ``size`` bytes."""
    if len(prefix) < LENGTH_BYTES:
        raise SafetensorsError(f"is truncated: {size} bytes, less than a header's length field")
    length = int.from_bytes(prefix, "little")
    if prefix.startswith(_PICKLE_MAGIC) and length > size:
        raise SafetensorsError("is a pickle or zip file, not safetensors; pickles are never read")
    if length > limit:
        reason = f"is not safetensors: its header would be {length} bytes long, of at most {limit}"
        raise SafetensorsError(reason)
    if LENGTH_BYTES + length > size:
        reason = f"is truncated within its header: {size} bytes of at least {LENGTH_BYTES + length}"
        raise SafetensorsError(reason)
    return length


def parse_header(header: bytes | memoryview, data_bytes: int) -> list[TensorEntry]:
    """Return the tensors, in file order, of a file with ``data_bytes`` behind its header."""
    try:
        raw = _header.decode(header)
        raw.pop("__metadata__", None)
        entries = {name: _entry.decode(value) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SafetensorsError(f"is not safetensors: its header is not valid ({error})") from error
    tensors: list[TensorEntry] = []
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise SafetensorsError(f"has {name!r} of unknown dtype {entry.dtype!r}")
        if end - begin != prod(entry.shape) * dtype.nbytes:
            raise SafetensorsError(f"has {name!r} with {end - begin} bytes for {entry.dtype} {entry.shape}")
        if begin != position:
            reason = f"has {name!r} at offset {begin} where {position} was due: a gap or an overlap"
            raise SafetensorsError(reason)
        tensors.append(TensorEntry(name, entry.dtype, entry.shape, begin, end - begin))
        position = end
    if position != data_bytes:
        kind = "is truncated" if data_bytes < position else "has trailing data"
        raise SafetensorsError(f"{kind}: {data_bytes} bytes of data where its header promises {position}")
    return tensors


def file_of_one(name: str, dtype: str, shape: Sequence[int], data: bytes) -> bytes:
    """Return a whole file with one tensor; the library's own writer takes other arguments in each version."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": (0, len(data))}
    header = msgspec.json.encode({name: entry})
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + data
