"""Packs named torch tensors into buckets of bounded size.

Invariants: a bucket holds at most ``bucket_bytes`` (or one larger row) and fits into one message's frames;
contiguous tensors on the CPU are viewed, not copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ...io_struct.base import MAX_FRAMES
from ...io_struct.weights import DEFAULT_BUCKET_BYTES
from ...transfer.safetensors import DTYPES
from ...transfer.weight_delta import nbytes_of, position_bytes, values_offset
from ..connection.client_options import must_be
from ..exceptions import InvalidRequest

_ALIGNMENT = 64

DTYPE_NAMES = {
    getattr(torch, dtype.torch): name
    for name, dtype in DTYPES.items()
    if name not in ("U64", "U32", "U16")  # which no weights have
}
"""Maps a torch dtype to its name on the wire, which is that of safetensors."""


class SparseTensor:
    """Some elements of a tensor: their flat positions, ascending, and their values, as on the wire."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, count: int, data: Tensor | None = None
    ) -> None:
        """Wrap ``data``, uint8 in the layout of ``transfer/weight_delta.py``, or make room."""
        self.shape = tuple(shape)
        """Shape of the whole tensor."""
        self.dtype = dtype
        """Type of the values."""
        self.count = count
        """Number of elements."""
        if data is None:
            data = torch.zeros(nbytes_of(DTYPE_NAMES[dtype], self.shape, count), dtype=torch.uint8)
        self.data = data
        """Positions, padding and values, uint8 on the CPU."""

    @classmethod
    def of(cls, shape: Sequence[int], positions: Tensor, values: Tensor) -> "SparseTensor":
        """Pack positions of the dtype that ``shape`` needs, and as many values."""
        sparse = cls(shape, values.dtype, positions.numel())
        sparse.positions.copy_(positions)
        sparse.values.copy_(values)
        return sparse

    @property
    def nbytes(self) -> int:
        """Bytes of positions, padding and values."""
        return self.data.nbytes

    @property
    def positions(self) -> Tensor:
        """Flat positions, a view of int32, or of int64 where they need it."""
        size = position_bytes(self.shape)
        return self.data[: self.count * size].view(torch.int32 if size == 4 else torch.int64)

    @property
    def values(self) -> Tensor:
        """Values, a view of :attr:`dtype`."""
        return self.data[values_offset(self.shape, self.count) :].view(self.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the data: the CPU."""
        return self.data.device

    def detach(self) -> "SparseTensor":
        """Return itself."""
        return self


AnyTensor = Tensor | SparseTensor
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Checkpoint names and tensors: a mapping such as ``model.state_dict()``, or pairs."""
Sendable = NamedTensors | Mapping[str, AnyTensor] | Iterable[tuple[str, AnyTensor]]
"""These, or a ``WeightDelta``."""


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
    count: int | None = None
    """Number of elements of a sparse tensor, whose ``rows`` are its bytes."""


@dataclass(slots=True)
class Bucket:
    pieces: list[Piece] = field(default_factory=list)
    """Pieces in the order of their tensors, rows ascending."""
    nbytes: int = 0
    """Bytes with the padding between pieces in shared memory."""


def pairs(named_tensors: Sendable) -> Iterator[tuple[str, Any]]:
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


def _checked(position: int, pair: object) -> tuple[str, AnyTensor]:
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
        reason = f"named_tensors[{position}] must be a pair of name and tensor, not a {type(pair).__name__}"
        raise InvalidRequest(reason, field="named_tensors")
    name, tensor = pair
    if isinstance(tensor, SparseTensor):
        return name, tensor
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


def manifest(named_tensors: Sendable) -> list[TensorSpec]:
    """Return names, shapes and dtypes of all tensors, as ``begin_weight_update`` takes them."""
    return [
        TensorSpec(
            name=name,
            dtype=_dtype_name(name, t),
            shape=list(t.shape),
            count=t.count if isinstance(t, SparseTensor) else None,
        )
        for name, t in pairs(named_tensors)
    ]


def buckets(named_tensors: Sendable, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Iterator[Bucket]:
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


def _cut(name: str, tensor: AnyTensor, bucket_bytes: int) -> Iterator[Piece]:
    shape = tuple(tensor.shape)
    if isinstance(tensor, SparseTensor):
        yield Piece(name, tensor.dtype, shape, 0, tensor.data, tensor.count)
        return
    tensor = tensor.resolve_neg()  # a view that is negative when read holds other bytes
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
        count=piece.count,
    )


def flat_bytes(tensor: AnyTensor) -> Tensor:
    """Return the bytes of a tensor as uint8 [nbytes], contiguous."""
    if isinstance(tensor, SparseTensor):
        return tensor.data
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.cpu().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _dtype_name(name: str, tensor: AnyTensor) -> str:
    found = DTYPE_NAMES.get(tensor.dtype)
    if found is None:
        raise _cannot_send(name, f"has the dtype {tensor.dtype}, which cannot be sent")
    return found


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment of every dtype and cache line."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
