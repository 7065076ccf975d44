"""Packs named torch tensors into buckets of bounded size.

Invariants: a bucket holds at most ``bucket_bytes`` (or one larger row) and fits into one message's frames;
contiguous tensors on the CPU are viewed, not copied.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ...io_struct.base import MAX_FRAMES
from ...io_struct.weights import DEFAULT_BUCKET_BYTES
from ...transfer.safetensors import DTYPES
from ..connection.client_options import must_be
from ..exceptions import InvalidRequest

_ALIGNMENT = 64

DTYPE_NAMES = {
    getattr(torch, dtype.torch): name
    for name, dtype in DTYPES.items()
    if name not in ("U64", "U32", "U16")  # which no weights have
}
"""Maps a torch dtype to its name on the wire, which is that of safetensors."""

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Checkpoint names and tensors: a mapping such as ``model.state_dict()``, or pairs."""


@dataclass(slots=True)
class Piece:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start_row: int
    """Position of the first of these rows in dimension 0; 0 for a scalar."""
    rows: Tensor
    """[n, *shape[1:]], or the scalar itself. Contiguous, on the device of the tensor."""


@dataclass(slots=True)
class Bucket:
    pieces: list[Piece] = field(default_factory=list)
    """Pieces in the order of their tensors, rows ascending."""
    nbytes: int = 0
    """Bytes with the padding between pieces in shared memory."""


def pairs(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Return each name with its tensor; InvalidRequest if there are none, or one cannot be sent."""
    if isinstance(named_tensors, torch.nn.Module):
        raise InvalidRequest(
            f"named_tensors is a {type(named_tensors).__name__}: pass checkpoint_tensors(model), which has"
            " the names of the checkpoint, or model.state_dict()",
            field="named_tensors",
        )
    if isinstance(named_tensors, (str, Tensor)) or not isinstance(named_tensors, Iterable):
        raise InvalidRequest(
            f"named_tensors must be pairs of name and tensor or a dict, not a {type(named_tensors).__name__}",
            field="named_tensors",
        )
    each = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    return (_checked(position, pair) for position, pair in enumerate(each))


def _checked(position: int, pair: object) -> tuple[str, Tensor]:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        reason = f"named_tensors[{position}] must be a pair of name and tensor, not a {type(pair).__name__}"
        raise InvalidRequest(reason, field="named_tensors")
    name, tensor = pair
    if not isinstance(tensor, Tensor):
        raise _cannot_send(name, f"is a {type(tensor).__name__}, not a torch.Tensor")
    if hasattr(tensor, "full_tensor"):
        raise _cannot_send(name, "is sharded: gather it first, with its full_tensor()")
    if tensor.is_meta:
        raise _cannot_send(name, "has no values: it lies on the device meta")
    if tensor.layout != torch.strided:
        raise _cannot_send(name, f"has the layout {tensor.layout}: make it dense first")
    _dtype_name(name, tensor)
    return name, tensor


def _cannot_send(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tensor {name!r} {reason}", field=name)


def manifest(named_tensors: NamedTensors) -> list[TensorSpec]:
    """Return names, shapes and dtypes of all tensors, as ``begin_weight_update`` takes them."""
    return [
        TensorSpec(name=name, dtype=_dtype_name(name, t), shape=list(t.shape))
        for name, t in pairs(named_tensors)
    ]


def buckets(named_tensors: NamedTensors, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield the tensors in their order, packed into buckets."""
    bucket = Bucket()
    for name, tensor in pairs(named_tensors):
        for piece in _cut(name, tensor.detach(), bucket_bytes):
            size = padded(piece.rows.nbytes)
            is_full = bucket.nbytes + size > bucket_bytes or len(bucket.pieces) == MAX_FRAMES - 1
            if bucket.pieces and is_full:
                yield bucket
                bucket = Bucket()
            bucket.pieces.append(piece)
            bucket.nbytes += size
    if bucket.pieces:
        yield bucket


def bucket_size(bucket_bytes: object) -> int:
    """Return ``bucket_bytes``, or raise ``invalid_request`` if it is no size."""
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise must_be("bucket_bytes", bucket_bytes, "an integer of at least 1")
    return bucket_bytes


def as_frames(bucket: Bucket) -> tuple[list[TensorSpec], list[memoryview]]:
    """Return specs and one frame per piece, in place if it is on the CPU."""
    frames = [_bytes_of(piece.rows) for piece in bucket.pieces]
    return [spec_of(piece, buffer=number) for number, piece in enumerate(bucket.pieces)], frames


def _cut(name: str, tensor: Tensor, bucket_bytes: int) -> Iterator[Piece]:
    shape = tuple(tensor.shape)
    if tensor.nbytes <= bucket_bytes:
        yield Piece(name, tensor.dtype, shape, 0, tensor.contiguous())
        return
    rows = shape[0] if shape else 1
    step = max(1, bucket_bytes * rows // tensor.nbytes)
    for start in range(0, rows, step):
        part = tensor.narrow(0, start, min(step, rows - start)) if shape else tensor
        yield Piece(name, tensor.dtype, shape, start, part.contiguous())


def spec_of(piece: Piece, *, buffer: int = 0, offset: int = 0) -> TensorSpec:
    """Return the description of ``piece``, which begins ``offset`` bytes into frame ``buffer``."""
    return TensorSpec(
        name=piece.name,
        dtype=DTYPE_NAMES[piece.dtype],
        shape=list(piece.shape),
        offset=offset,
        nbytes=piece.rows.nbytes,
        start_row=piece.start_row,
        buffer=buffer,
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.cpu().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _dtype_name(name: str, tensor: Tensor) -> str:
    found = DTYPE_NAMES.get(tensor.dtype)
    if found is None:
        raise _cannot_send(name, f"has the dtype {tensor.dtype}, which cannot be sent")
    return found


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of every dtype and cache line."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
