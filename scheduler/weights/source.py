"""Values that a transport delivers: named tensors, in pieces. A transport never sees a model.

Everywhere but on the wire and in files, a tensor of a model of components is called ``component.name``.

Frames of a message are the simplest source: read where libzmq put them (8-byte aligned), never unpickled,
released when the call has been answered. A sender has at most two messages of half a bucket under way.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from ...io_struct import (
    CaesuraError,
    CudaIPCHandle,
    DeltaBase,
    ErrorCode,
    SharedMemoryHandle,
    TensorSpec,
)
from ...transfer.weight_delta import position_bytes, sparse_nbytes, values_offset
from ..runtime.dtypes import DTYPES, NAMES

ELEMENTS = 1 << 18
"""Elements of a delta that are staged at a time, a few milliseconds' work."""
SPAN = 1 << 20
"""Elements of the whole tensor from the first of these to the last, all of which may be quantised again."""
_KEPT = 1 << 15
"""Most specs of all lists for which something is kept; one with a long name counts as several."""
_NAME = 256
"""Characters of a name that count as one spec."""
_ROWS = 128
"""Rows of a matrix whose elements are staged together: those that a quantised weight's blocks have."""


class NamedSpec(Protocol):
    """Description of a tensor before it comes: io_struct's TensorSpec, or safetensors' TensorEntry."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...


@dataclass(slots=True, frozen=True)
class WeightPiece:
    """Some rows of one checkpoint tensor; ``rows`` is valid until the next piece is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_row: int
    """First row in dimension 0; 0 for a scalar."""
    rows: Tensor
    """[n, *shape[1:]], or the scalar itself; the values at ``positions``, where these are given."""
    positions: Tensor | None = None
    """Flat positions, ascending, of elements of a delta. None means rows."""
    is_last: bool = True
    """False if more elements of the tensor follow."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a tensor in a bucket, uint8."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_row: int
    rows: tuple[int, ...]
    offset: int
    """First byte in the bucket."""

    def piece(self, bucket: Tensor) -> WeightPiece:
        nbytes = prod(self.rows) * self.dtype.itemsize
        rows = bucket[self.offset : self.offset + nbytes].view(self.dtype).view(self.rows)
        return WeightPiece(self.name, self.shape, self.dtype, self.start_row, rows)

    def spec(self) -> TensorSpec:
        shape, nbytes = list(self.shape), prod(self.rows) * self.dtype.itemsize
        dtype, start_row = NAMES[self.dtype], self.start_row
        return TensorSpec(
            name=self.name, dtype=dtype, shape=shape, offset=self.offset, nbytes=nbytes, start_row=start_row
        )


Filled = Iterator[tuple[Sequence[Place], Tensor]]
"""Buckets, each valid until the next one is asked for, and what they hold: one piece, or whole tensors."""
Pieces = Generator[WeightPiece | None, None, None]
"""Pieces of a source; None: ask again once woken. It is closed if the update fails in between."""


class WeightSource(Protocol):
    name: str
    total_bytes: int
    complete: bool
    delta: DeltaBase | None
    """Weights that the tensors change, staged until the commit; None if they are written as they come."""

    @property
    def specs(self) -> Sequence[NamedSpec]:
        """All tensors that will come; checked before the first piece is read."""
        ...

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Pieces:
        """Yield pieces of about ``bucket_bytes``; ``skip(name)`` is asked once for each tensor."""
        ...


def chosen(known: tuple[str, ...], named: str | None) -> str | None:
    """Return the component that a call writes if it names ``named``, or None; raises ``invalid_request``."""
    if named is None:
        return known[0] if known else None
    if named not in known:
        said = f"is none of {', '.join(known)}" if known else "is given, and this model has no components"
        reason = f"component = {named!r} {said}"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="component", value=named)
    return named


def in_component(source: WeightSource, component: str | None) -> WeightSource:
    return source if component is None else ComponentSource(source, component)


class ComponentSource:
    def __init__(self, inner: WeightSource, component: str) -> None:
        self.inner = inner
        self.component = component
        self.name, self.total_bytes, self.complete = inner.name, inner.total_bytes, inner.complete
        self.delta = inner.delta
        self.specs = renamed(inner.specs, component)
        self._prefix = f"{component}."

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Pieces:
        with closing(self.inner.pieces(bucket_bytes, lambda name: skip(self._prefix + name))) as pieces:
            for piece in pieces:
                yield None if piece is None else replace(piece, name=self._prefix + piece.name)


def renamed(specs: Iterable[Any], component: str | None) -> list[Any]:
    if component is None:
        return list(specs)
    return [
        msgspec.structs.replace(spec, name=f"{component}.{spec.name}")
        if isinstance(spec, TensorSpec)
        else replace(spec, name=f"{component}.{spec.name}")
        for spec in specs
    ]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Location of a buffer that other processes can map."""

    handle: SharedMemoryHandle | CudaIPCHandle
    start: int
    """First byte in the memory of ``handle``."""
    nbytes: int


_Value = TypeVar("_Value")


class BySpecs(Generic[_Value]):
    """Values kept for lists of specs, until others with the same first tensor and length come.

    They are forgotten all at once when there would be too many; a list that is too long is not kept.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], tuple[list[Any], _Value]] = {}
        self._count = 0

    def get(self, specs: Sequence[Any]) -> tuple[list[Any], _Value] | None:
        """Return the specs that were put, which compare faster with themselves, and their value."""
        found = self._found.get(_key(specs)) if specs else None
        return found if found is not None and found[0] == specs else None

    def put(self, specs: list[Any], value: _Value) -> None:
        cost = _cost(specs)
        if not 0 < cost <= _KEPT:
            return
        replaced, _ = self._found.pop(_key(specs), ((), None))
        self._count += cost - _cost(replaced)
        if self._count > _KEPT:
            self._found.clear()
            self._count = cost
        self._found[_key(specs)] = specs, value


Fitting = BySpecs[tuple[list[int], int]]
"""Sizes of buffers that specs were found to fit, and the bytes of all tensors."""


def _cost(specs: Sequence[Any]) -> int:
    return sum(1 + len(spec.name) // _NAME for spec in specs)


def _key(specs: Sequence[Any]) -> tuple[str, int, int]:
    return specs[0].name, getattr(specs[0], "start_row", 0), len(specs)


class BufferSource:
    """Tensors that are in memory: frames of a message, or shared memory."""

    complete = False

    def __init__(
        self,
        name: str,
        specs: list[TensorSpec],
        buffers: Sequence[memoryview | Tensor],
        memory: SharedMemory | None = None,
        delta: DeltaBase | None = None,
        fitting: Fitting | None = None,
    ) -> None:
        """Raise ``invalid_request`` if a spec does not fit, unless equal ones are ``fitting`` such buffers.

        Other ranks map ``memory``.
        """
        self.name = name
        self.buffers = buffers
        self.memory = memory
        self.delta = delta
        sizes = [len(buffer) for buffer in buffers]
        known = None if fitting is None else fitting.get(specs)
        if known is not None and known[1][0] == sizes:
            self.specs, (_, self.total_bytes) = known
            return
        self.specs, self.total_bytes = specs, sum(spec.nbytes for spec in specs)
        for spec in specs:
            _require_fitting(spec, sizes)
        if fitting is not None:
            fitting.put(specs, (sizes, self.total_bytes))

    @property
    def is_one_buffer(self) -> bool:
        """True if all tensors are in one buffer on the host."""
        return bool(self.specs) and len(self.buffers) == 1 and isinstance(self.buffers[0], memoryview)

    def pieces(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Generator[WeightPiece, None, None]:
        for spec in self.specs:
            if not skip(spec.name):
                yield from self.pieces_of(spec, bucket_bytes)

    def pieces_of(self, spec: TensorSpec, bucket_bytes: int) -> Iterator[WeightPiece]:
        buffer = self.buffers[spec.buffer]
        if isinstance(buffer, Tensor):
            yield from cut(spec, buffer[spec.offset : spec.offset + spec.nbytes], bucket_bytes)
        elif spec.count is not None or not 0 < spec.nbytes <= bucket_bytes:
            data = torch.empty(0, dtype=torch.uint8)  # frombuffer takes no empty ones
            if spec.nbytes:
                data = torch.frombuffer(buffer, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
            yield from cut(spec, data, bucket_bytes)
        else:
            dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
            count = spec.nbytes // dtype.itemsize
            rows = torch.frombuffer(buffer, dtype=dtype, count=count, offset=spec.offset)
            if len(shape) != 1:
                rows = rows.view((-1, *shape[1:]) if shape else ())
            yield WeightPiece(spec.name, shape, dtype, spec.start_row, rows)


def cut(spec: TensorSpec, data: Tensor, bucket_bytes: int) -> Iterator[WeightPiece]:
    """Yield the rows of ``spec`` in pieces of about ``bucket_bytes``; ``data`` is uint8, whole rows."""
    dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
    if spec.count is not None:
        yield from _elements(spec, data)
        return
    row_bytes = prod(shape[1:]) * dtype.itemsize
    if not data.numel():
        yield WeightPiece(spec.name, shape, dtype, spec.start_row, torch.empty(shape, dtype=dtype))
        return
    step = max(1, bucket_bytes // row_bytes)
    for start in range(0, data.numel() // row_bytes, step):
        part = data[start * row_bytes : (start + step) * row_bytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        rows = part.view(dtype).view((-1, *shape[1:]) if shape else ())
        yield WeightPiece(spec.name, shape, dtype, spec.start_row + start, rows)


def _elements(spec: TensorSpec, data: Tensor) -> Iterator[WeightPiece]:
    """Yield the elements of a sparse tensor in pieces; refuse positions that do not ascend within it.

    Pieces end with whole experts, or after a multiple of so many rows: no block of a weight is in two.
    """
    assert spec.count is not None
    dtype, shape, count = DTYPES[spec.dtype], tuple(spec.shape), spec.count
    data = data.clone()  # aligned, and nobody else's: what is checked stays so
    kind = torch.int64 if position_bytes(shape) == 8 else torch.int32
    positions = data[: count * kind.itemsize].view(kind)
    values = data[values_offset(shape, count) :].view(dtype)
    inside = not count or (int(positions[0]) >= 0 and int(positions[-1]) < prod(shape))
    if not inside or not bool((positions[1:] > positions[:-1]).all()):
        raise _invalid(spec, f"has positions that do not ascend within its {prod(shape)} elements")
    together, start = max(1, prod(shape[1:]) * (1 if len(shape) > 2 else _ROWS)), 0
    while start < max(count, 1):
        span = min(int(positions[start]) + SPAN, prod(shape)) if count else 0
        end = min(start + ELEMENTS, int(torch.searchsorted(positions, span)))
        if end < count:
            border = int(positions[end - 1]) // together * together + together
            end = int(torch.searchsorted(positions, min(border, prod(shape))))
        yield WeightPiece(
            spec.name, shape, dtype, 0, values[start:end], positions[start:end].cpu(), is_last=end >= count
        )
        start = max(end, 1)


def _require_fitting(spec: TensorSpec, sizes: Sequence[int]) -> None:
    """Raise unless the spec lies in its buffer and is a whole number of rows."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise _invalid(spec, f"has the unknown dtype {spec.dtype!r}")
    if spec.buffer >= len(sizes):
        raise _invalid(spec, f"lies in buffer {spec.buffer} of {len(sizes)}")
    size = sizes[spec.buffer]
    if spec.offset + spec.nbytes > size:
        raise _invalid(spec, f"ends at byte {spec.offset + spec.nbytes} of a buffer of {size}")
    if spec.offset % dtype.itemsize:
        raise _invalid(spec, f"starts at byte {spec.offset}, which is not aligned to {spec.dtype}")
    if spec.count is not None:
        if spec.start_row:
            raise _invalid(spec, f"is sparse, and starts at row {spec.start_row}")
        if spec.count > prod(spec.shape) or spec.nbytes != sparse_nbytes(spec.shape, spec.dtype, spec.count):
            raise _invalid(spec, f"of shape {spec.shape} has {spec.nbytes} bytes for {spec.count} elements")
        return
    row_bytes = prod(spec.shape[1:]) * dtype.itemsize
    rows = spec.shape[0] if spec.shape else 1
    given = spec.nbytes // row_bytes if row_bytes else rows
    if given * row_bytes != spec.nbytes or spec.start_row + given > rows or (given == 0 < rows):
        raise _invalid(spec, f"of shape {spec.shape} has {spec.nbytes} bytes from row {spec.start_row} on")


def _invalid(spec: TensorSpec, problem: str) -> CaesuraError:
    reason = f"tensor {spec.name!r} {problem}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="specs", value=spec.name)
