"""Weights of matrix products, in the layout of the library that computes the product.

Invariants:
- A matrix is packed if compiled kernels serve its device and dtype, and plain otherwise; nobody outside asks.
- Packed storage is written through its slots only, row by row and in place, without a second copy.
- The product of a packed matrix is the same for a row whatever the other rows are, bit for bit.
- A quantised weight is packed as bytes, or as codes of four bits, made wider in registers
  (``kernels/linear.py``), with a block's scale for each of its outputs. Slots speak the checkpoint's layout.
  (Unpackable: ``scaled_blocks.py``.)
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...transfer import words
from ...transfer.weight_digest import Copy
from ..kernels import TORCH, best
from ..kernels import linear as kernel
from ..kernels.linear import Scales
from ..memory.offload import OffloadableComponent
from .parameters import OffloadableSlot, Parameter, Place, Placement, PlainSlot, ScaleBlocks, WeightSlot
from .scaled_blocks import EncodedScales, Originals, ScaledMatrix, ScaledSlot


class PackedSlot(WeightSlot):
    """Rows of a packed matrix as a checkpoint tensor [rows, in]."""

    __slots__ = ("_codes", "_start", "_storage")

    def __init__(
        self,
        name: str,
        parameter: str,
        storage: Tensor,
        start: int,
        shape: tuple[int, int],
        codes: kernel.Codes | None = None,
    ) -> None:
        """``codes``: the rows are int8, and stored as these."""
        super().__init__(name, parameter, shape, storage.dtype if codes is None else kernel.INT8)
        self._storage, self._codes = storage, codes
        self._start = start

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        if compare:
            return kernel.update_rows(self._storage, self._cast(rows), self._start + start)
        self.write(rows, start)
        return True

    def write(self, rows: Tensor, start: int) -> None:
        kernel.pack_rows(self._storage, self._cast(rows), self._start + start)

    def copy_of(self, rows: Tensor, start: int) -> Copy | None:
        if self._codes is not None or not self.takes_as_is(rows):
            return None
        return kernel.packing(self._storage, rows, self._start + start)

    def differs(self, rows: Tensor, start: int) -> bool:
        return not kernel.equal_rows(self._storage, self._cast(rows), self._start + start)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = len(range(*slice(start, stop).indices(self.shape[0])))
        width = self.shape[1] if self._codes is None else self.shape[1] // 2
        out = torch.empty((rows, width), dtype=self._storage.dtype)
        kernel.unpack_rows(self._storage, self._start + start, out)
        return out if self._codes is None else self._codes.decode(out)

    def places(self, positions: Tensor) -> Iterator[Place]:
        if self._codes is not None:
            yield from super().places(positions)
        places = kernel.places(self._storage, self._start, self.shape[1], positions)
        yield Place(self._storage.view(-1), places, None)

    def _cast(self, rows: Tensor) -> Tensor:
        rows = rows.to(device=self._storage.device, dtype=self.dtype).contiguous()
        return rows if self._codes is None else self._codes.encode(rows)


class OffloadablePackedSlot(OffloadableSlot):
    """A packed matrix [rows, in] that is one whole parameter of its component."""

    __slots__ = ()

    def __init__(self, parameter: Parameter, movable: OffloadableComponent, shape: tuple[int, ...]) -> None:
        super().__init__(parameter, movable)
        self.shape = shape

    def write(self, rows: Tensor, start: int) -> None:
        """Write rows. Raises OSError if the copy on the host cannot be written."""
        whole = kernel.whole_panels(start, start + len(rows))
        panels = self._movable.values(self._tensor)[whole].clone()
        self._packed(panels).write(rows, start - whole.start)
        self._movable.write(self._tensor, whole.start * panels.shape[1], panels)

    def differs(self, rows: Tensor, start: int) -> bool:
        return self._packed(self._movable.values(self._tensor)).differs(rows, start)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._packed(self._movable.values(self._tensor)).read(start, stop)

    def _packed(self, storage: Tensor) -> PackedSlot:
        rows, inputs = self.shape
        return PackedSlot(self.name, self.parameter, storage, 0, (rows, inputs))


class ScalesSlot(WeightSlot):
    """``X.weight_scale_inv`` of a weight whose scales are stored for each output."""

    __slots__ = ("_height", "_lines")

    def __init__(self, name: str, parameter: str, lines: Tensor, height: int) -> None:
        """Map blocks of ``height`` outputs to ``lines`` [blocks, outputs], their part of the storage."""
        super().__init__(name, parameter, (-(-lines.shape[1] // height), lines.shape[0]), lines.dtype)
        self._lines, self._height = lines, height

    def write(self, rows: Tensor, start: int) -> None:
        outputs = self._lines[:, start * self._height :][:, : len(rows) * self._height]
        values = rows.to(self.dtype).t()
        if self._height > 1:
            values = values.repeat_interleave(self._height, dim=1)
        outputs.copy_(values[:, : outputs.shape[1]])  # the last block may be smaller

    def copy_of(self, rows: Tensor, start: int) -> Copy | None:
        lines = self._lines
        if not self.takes_as_is(rows) or words.library() is None:
            return None
        spread = torch.tensor([lines.data_ptr(), 4 * lines.stride(0), self._height, lines.shape[1]])
        functions = "caesura_words_spread", "caesura_words_spread_equal"
        return Copy(spread, start, *map(words.address, functions))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = self._lines[:, :: self._height][:, start:stop].t()
        # Contiguous also where there is one: its bytes may be viewed.
        return rows.clone(memory_format=torch.contiguous_format)

    def places(self, positions: Tensor) -> Iterator[Place]:
        blocks, outputs = self._lines.shape
        line = self._lines.stride(0)
        rows = positions // blocks
        first = (positions - rows * blocks) * line + rows * self._height
        storage = self._lines.as_strided(((blocks - 1) * line + outputs,), (1,))
        for output in range(self._height):  # one scale has a place for each
            chosen = (rows * self._height + output < outputs).nonzero().squeeze(1)
            yield Place(storage, first[chosen] + output, chosen)


def packs(in_features: int, place: Placement, blocks: ScaleBlocks | None = None) -> bool:
    """Return True if compiled kernels multiply by rows of ``in_features``, with scales if they are given."""
    if blocks is not None and not (
        place.device.type == "cpu"
        and kernel.scalable(in_features, blocks.columns, blocks.dtype, blocks.codes)
    ):
        return False
    return best("linear", place.device, place.dtype) != TORCH and kernel.packable(in_features, place.dtype)


class Stored:
    """One weight [out, in], or ``count`` of them, packed each from a panel of its own on, or plain."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        place: Placement,
        *,
        packed: bool,
        blocks: ScaleBlocks | None = None,
        count: int | None = None,
    ) -> None:
        """``blocks``: blocks of weights that are packed in FP8, int8 or codes."""
        self._shape, self._place, self._blocks = (out_features, in_features), place, blocks
        self._height = out_features
        dtype, codes = (place.dtype, None) if blocks is None else (blocks.dtype, blocks.codes)
        shape: tuple[int, ...] = self._shape if count is None else (count, *self._shape)
        self._is_packed = packed
        if packed:
            self._height, columns = kernel.storage_shape(out_features, in_features, dtype, codes)
            shape = (count or 1) * self._height, columns
            dtype = dtype if codes is None else torch.uint8
        self.parameter = Parameter(name, shape, dtype, place.device)
        self._scales: Scales | None = None
        if blocks is not None:
            self._grid, padded = kernel.scales_shape(out_features, in_features, blocks.columns)
            lines = (count or 1) * self._grid, padded
            self._lines = Parameter(f"{name}_scale_inv", lines, torch.float32, place.device)
            self._scales = Scales(self._lines.data, blocks.columns, blocks.dtype, codes)
            self._originals: Originals | None = None
            if blocks.keeps_originals:
                self._originals = Originals(name, (count or 1) * out_features, in_features, place)

    @property
    def packed(self) -> Tensor | None:
        """Packed storage, or None if it is plain."""
        return self.parameter.data if self._is_packed else None

    @property
    def scales(self) -> Tensor | None:
        """Scales of a packed weight that is quantised, else None."""
        return None if self._blocks is None else self._lines.data

    def slot(
        self, checkpoint_name: str, start: int = 0, length: int | None = None, number: int = 0
    ) -> WeightSlot:
        """Return the slot of a checkpoint tensor, rows ``[start, start + length)`` of one weight."""
        length = self._shape[0] - start if length is None else length
        first, data, inputs = number * self._height + start, self.parameter.data, self._shape[1]
        if self._is_packed:
            codes = None if self._blocks is None else self._blocks.codes
            return PackedSlot(checkpoint_name, self.parameter.name, data, first, (length, inputs), codes)
        return PlainSlot(checkpoint_name, self.parameter.name, data.view(-1, inputs).narrow(0, first, length))

    def slot_of_all(self) -> WeightSlot | None:
        """Return the slot of all weights as one matrix, or None if there are rows between them."""
        data, inputs = self.parameter.data, self._shape[1]
        if not self._is_packed:
            return PlainSlot("", self.parameter.name, data.view(-1, inputs))
        if self._height != self._shape[0]:
            return None
        return PackedSlot("", self.parameter.name, data, 0, (len(data), inputs))

    def slots(self, module: str, start: int, length: int, number: int = 0) -> Iterator[WeightSlot]:
        """Yield the slot of a checkpoint module's weight, and that of its scales if it has some."""
        weight = self.slot(f"{module}.weight", start, length, number)
        if self._blocks is None:
            yield weight
            return
        lines = self._lines.data.narrow(0, number * self._grid, self._grid).narrow(1, start, length)
        scales = ScalesSlot(f"{module}.weight_scale_inv", self._lines.name, lines, self._blocks.rows)
        packed = weight
        if self._blocks.codes is not None:
            first, data, shape = (
                number * self._height + start,
                self.parameter.data,
                (length, self._shape[1] // 2),
            )
            packed = PackedSlot(weight.name, weight.parameter, data, first, shape)
        row = number * self._shape[0] + start
        kept = self._originals
        yield ScaledSlot(weight, scales, self._blocks, self._place, packed=packed, kept=kept, first=row)
        yield scales if kept is None else EncodedScales(scales, kept, row)

    def parameters(self) -> Iterator[Parameter]:
        yield self.parameter
        if self._blocks is not None:
            yield self._lines
            if self._originals is not None:
                yield self._originals


def scaled_matrix(
    name: str, part_rows: Sequence[int], in_features: int, blocks: ScaleBlocks, place: Placement
) -> "Matrix | ScaledMatrix":
    """Return a quantised weight, stacked from parts of ``part_rows``, packed if it can be."""
    if any(part_rows) and packs(in_features, place, blocks):
        return Matrix(name, sum(part_rows), in_features, place, blocks=blocks)
    return ScaledMatrix(name, part_rows, in_features, blocks, place)


class Matrix(Stored):
    """One weight [out, in] and its product."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        place: Placement,
        *,
        packed: bool = True,
        blocks: ScaleBlocks | None = None,
    ) -> None:
        """``packed=False``: rows are gathered only, which a plain layout does faster."""
        packed = packed and packs(in_features, place, blocks)
        super().__init__(name, out_features, in_features, place, packed=packed, blocks=blocks)
        self._product: kernel.Product | None = None
        if packed:
            self._product = kernel.Product(self.parameter.data, *self._shape, self._scales, place.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` [T, in], in ``out`` [T, out] if given (contiguous)."""
        if self._product is not None:
            return self._product(x, bias, out)
        data = self.parameter.data
        if out is None:
            return functional.linear(x, data, bias)
        if bias is None:
            return torch.mm(x, data.t(), out=out)
        return torch.addmm(bias, x, data.t(), out=out)

    def wide_product(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` of a packed matrix in float32, not rounded, in fresh memory."""
        assert self._product is not None, "a plain weight"
        return self._product(x, wide=True)

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` (int64 [T]) as [T, in], in fresh memory."""
        data = self.parameter.data
        if self._product is None:
            return functional.embedding(ids, data)
        return kernel.gather_rows(data, ids, torch.empty((len(ids), self._shape[1]), dtype=data.dtype))
