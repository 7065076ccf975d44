"""Weights as FP8, int8 or numbers of four bits, in blocks with one float32 scale each.

DeepSeek-V3 (Liu et al., 2024, arXiv:2412.19437, section 3.3). A value is ``float8_e4m3fn * scale``. The
checkpoint holds ``X.weight`` [out, in] and ``X.weight_scale_inv`` [ceil(out / rows), ceil(in / columns)];
blocks at the edges are smaller.

Invariants:
- Storage holds the checkpoint's bytes. Parts of a fused weight keep a grid each, from their own first row.
- A wider float is quantised block by block, each when its rows are complete: the result depends on the tensor
  alone. At most one row of blocks waits, in the model's workspace, as float32.
- If the values are kept that a weight is quantised of, a delta changes elements of these, and of their blocks
  what then differs: the result is that of the whole tensor, bit for bit.
- No derived value outlives a product, so nothing mixes a new weight with an old scale. On the CPU compiled
  kernels have a layout of their own (``matrix.py``); otherwise at most ``CHUNK`` elements (or one row) are
  dequantised at a time. Accelerators multiply by the stored bytes (``fp8_products.py``), or refuse the model.
- A dequantised element is ``float32(weight) * scale``, rounded once to the dtype of the product.

int8 is for the CPU: a value is a whole number up to 127 times the scale of a block, 128 inputs of one output;
products are those of :func:`~..kernels.linear.int8_product`. So are int4, whole numbers up to 7, and MXFP4,
twice the numbers of E2M1, in blocks of 32 inputs: packed they take four bits each, elsewhere they are int8.
What is packed a compiled kernel quantises, with equal bits.

Rounding is that of transformers' ``FineGrainedFP8Config`` bit for bit, where its result is finite.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ...io_struct import CaesuraError, ErrorCode
from ...transfer import words
from ...transfer.weight_digest import Copy
from ..kernels.experts import Groups
from ..kernels.linear import FP8, INT8, int8_product
from ..kernels.quantize import quantize_rows
from ..memory.workspace import Workspace
from ..runtime.dtypes import torch_name
from . import fp8_products
from .fp8_products import BLOCK, Dense, Grouped, Quantizer, Rows
from .parameters import (
    CASTABLE,
    DelegatingSlot,
    Parameter,
    Place,
    Placement,
    ScaleBlocks,
    WeightSlot,
    Written,
)
from .sharding import parts_with

FP8_MAX = 448.0
_MAX = {FP8: FP8_MAX, INT8: 127.0}

CHUNK = 1 << 20
"""Elements that are dequantised or quantised at a time: 4 MB as float32."""
_TINY = FP8_MAX / torch.finfo(torch.float32).max
"""Blocks below are zero: the reciprocal of their scale would be infinite."""

# e4m3fn to float16 by integers, several times faster than torch's conversion on the CPU: sign, exponent and
# mantissa moved to their places give the value over 2^(15 - 7), subnormal ones included.
_SHIFT, _PLACES, _REBIAS = 7, -0x4080, 2.0**8
# 0x7F is NaN: one more carries into bit 7, times 255 that is 0x7F80, a NaN of float16.
_MAGNITUDE, _CARRY, _NAN_BITS = 0x7F, 0x80, 0xFF


def scale_shape(blocks: ScaleBlocks, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // blocks.rows), -(-columns // blocks.columns)


def quantize(values: Tensor, blocks: ScaleBlocks) -> tuple[Tensor, Tensor]:
    """Quantise float32 [n, in] to FP8 or int8 and its grid's scales, the largest to 448, or 127, or 7.

    Blocks of zeros have scale 1; NaN and infinities stay not finite. Scales of E2M1 are those of MXFP4,
    halved as its numbers are doubled: the largest value's power of two over that of the largest number.
    """
    size, grid = values.shape, scale_shape(blocks, *values.shape)
    shape = (grid[0], blocks.rows, grid[1], blocks.columns)
    rows, columns = grid[0] * blocks.rows, grid[1] * blocks.columns
    if size != (rows, columns):
        values = functional.pad(values, (0, columns - size[1], 0, rows - size[0]))
    tiles = values.reshape(shape)
    largest = tiles.abs().amax(dim=(1, 3), keepdim=True)
    most = _MAX[blocks.dtype] if blocks.codes is None else float(blocks.codes.numbers.max())
    if blocks.codes is not None and blocks.codes.by_powers:
        steps = (131 - torch.frexp(largest).exponent << 23).view(torch.float32)  # 2^(4 - exponent)
        factors = torch.where(largest < _TINY, 1.0, torch.where(largest.isfinite(), steps, torch.nan))
        scaled = _rounded_to_e2m1(tiles * factors).clamp_(-most, most)
    else:
        factors = torch.where(
            largest < _TINY, 1.0, largest.reciprocal() * most
        )  # a division rounds otherwise
        scaled = (tiles * factors).clamp_(-most, most)
    if blocks.dtype == INT8:
        scaled = scaled.round_().nan_to_num_()
    quantized = scaled.to(blocks.dtype).view(rows, columns)
    return quantized[: size[0], : size[1]], factors.reciprocal().view(grid)


def _rounded_to_e2m1(numbers: Tensor) -> Tensor:
    """Round to the numbers of :data:`~..kernels.linear.E2M1`, or to 16; of two as near to the even code."""
    bits = numbers.view(torch.int32)  # from 4 on they have one bit of mantissa
    odd = (bits >> 22).bitwise_and_(1)
    large = odd.add_(bits).add_(0x1FFFFF).bitwise_and_(~0x3FFFFF).view(torch.float32)
    return torch.where(numbers.abs() < 4, numbers.round(), large)


def dequantize(weight: Tensor, scales: Tensor, columns: int, out: Tensor, workspace: Workspace) -> Tensor:
    """Write FP8 ``weight`` [n, in] times ``scales`` float32 [n, ceil(in / columns)] to ``out``."""
    device = weight.device
    values = out
    if out.dtype != torch.float32:
        values = workspace.take("fp8 values", tuple(weight.shape), torch.float32, device)
    if device.type == "cpu":
        scales = scales * _REBIAS
        values.copy_(_shifted(weight, workspace))
    else:
        values.copy_(weight)
    whole = weight.shape[1] // columns
    values[:, : whole * columns].unflatten(1, (whole, columns)).mul_(scales[:, :whole, None])
    if whole < scales.shape[1]:
        values[:, whole * columns :].mul_(scales[:, whole:])
    if values is not out:
        out.copy_(values)
    return out


def _shifted(weight: Tensor, workspace: Workspace) -> Tensor:
    """Return ``weight * 2^-8`` as float16, exact; NaN stays NaN."""
    scratch = workspace.take("fp8 bits", (2, *weight.shape), torch.int16, weight.device)
    bits, nan = scratch[0], scratch[1]
    bits.copy_(weight.view(torch.int8))
    torch.bitwise_and(bits, _MAGNITUDE, out=nan).add_(1).bitwise_and_(_CARRY).mul_(_NAN_BITS)
    return bits.bitwise_left_shift_(_SHIFT).bitwise_and_(_PLACES).bitwise_or_(nan).view(torch.float16)


class Originals(Parameter):
    """Values that a weight is quantised of, in the dtype of the placement, row by row."""

    __slots__ = ("encoded",)

    def __init__(self, name: str, rows: int, in_features: int, place: Placement) -> None:
        super().__init__(f"{name}_original", (rows, in_features), place.dtype, place.device)
        self.encoded: set[int] = set()
        """First rows of the parts that came quantised last, so that these values are others."""


class EncodedScales(DelegatingSlot):
    """``X.weight_scale_inv`` as it comes by itself: the originals that are kept are of other scales then."""

    __slots__ = ("_first", "_inner", "_kept")

    def __init__(self, inner: WeightSlot, kept: Originals, first: int) -> None:
        super().__init__(inner.name, inner.parameter, inner.shape, inner.dtype)
        self._inner, self._kept, self._first = inner, kept, first

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        yield self._inner, rows, start

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        self._kept.encoded.add(self._first)
        return super().update(rows, start, compare=compare)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._inner.read(start, stop)

    def places(self, positions: Tensor) -> Iterator[Place]:
        return self._inner.places(positions)


class ScaledSlot(WeightSlot):
    """``X.weight``: as it is stored, or any wider float, which brings its scales with it."""

    __slots__ = (
        "_blocks",
        "_device",
        "_encoded",
        "_first",
        "_is_packed",
        "_kept",
        "_originals",
        "_scales",
        "_stored",
        "_workspace",
    )

    def __init__(
        self,
        stored: WeightSlot,
        scales: WeightSlot,
        blocks: ScaleBlocks,
        place: Placement,
        *,
        packed: WeightSlot | None = None,
        kept: Originals | None = None,
        first: int = 0,
    ) -> None:
        """``packed``: rows as products take them; ``kept``: those before, from row ``first`` on, or None."""
        super().__init__(stored.name, stored.parameter, stored.shape, blocks.dtype)
        self._blocks, self._workspace, self._device = blocks, place.workspace, place.device
        self._stored, self._scales, self._is_packed = stored, scales, packed is not None
        self._encoded, self._kept, self._first = packed or stored, kept, first
        self._originals = None if kept is None else kept.slot(self.name, first, self.shape[0])

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in CASTABLE or dtype == self.dtype

    def fills(self, dtype: torch.dtype) -> str | None:
        """Return the name of the scales, unless they come by themselves."""
        return None if dtype == self.dtype else self._scales.name

    @property
    def original_dtype(self) -> torch.dtype | None:
        return None if self._kept is None or self._first in self._kept.encoded else self._kept.data.dtype

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        """Write rows; those of an incomplete block wait for the call that completes it."""
        if rows.dtype == self.dtype:
            self._require_codes(rows)
            if self._kept is not None:
                self._kept.encoded.add(self._first)
            return self._stored.update(rows, start, compare=compare)
        changed = not compare
        if self._kept is not None:
            self._kept.encoded.discard(self._first)
        for slot, values, first in self.parts(rows, start):
            changed |= slot.update(values, first, compare=not changed)
        return changed

    def write(self, rows: Tensor, start: int) -> None:
        self.update(rows, start, compare=False)

    def copy_of(self, rows: Tensor, start: int) -> Copy | None:
        is_checked = self._blocks.codes is not None or self._kept is not None
        return None if is_checked or rows.dtype != self.dtype else self._stored.copy_of(rows, start)

    def differs(self, rows: Tensor, start: int) -> bool:
        """Return True for rows to quantise: a difference shows only when a block is complete."""
        return rows.dtype != self.dtype or self._stored.differs(rows, start)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._stored.read(start, stop)

    def parts(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        if rows.dtype == self.dtype:
            yield self, rows, start
            return
        if self._originals is not None:
            rows = rows.to(self._originals.dtype)
            yield self._originals, rows, start
        for first, values in self._whole_blocks(rows, start):
            yield from self._quantized(values, first)

    def places(self, positions: Tensor) -> Iterator[Place]:
        if self.original_dtype is None:
            yield from self._stored.places(positions)
            return
        assert self._originals is not None, "they have a dtype"
        for place in self._originals.places(positions):
            yield place._replace(follows=partial(self.changed_blocks, self._originals, positions))

    def changed_blocks(self, originals: WeightSlot, positions: Tensor, values: Tensor) -> Iterator[Written]:
        """Yield what changes with elements of ``originals``: all of a block's that change are among them."""
        (total, width), height = self.shape, self._blocks.rows
        step = max(1, CHUNK // (height * width)) * height
        sizes = [min(step, total - start) * width for start in range(0, total, step)]
        for number, chosen, own in parts_with(positions, sizes):
            begin, end = (int(own[at]) // (width * height) for at in (0, -1))
            start, stop = number * step + begin * height, number * step + (end + 1) * height
            rows = originals.read(start, min(stop, total)).clone()
            rows.view(-1)[own.long() - begin * height * width] = values[chosen]
            for slot, new, first in self._quantized(rows, start):
                old = slot.read(first, first + len(new))
                found, _, changed = words.changed(old, new.contiguous())
                for storage, places, which, _ in slot.places(found + first * slot.shape[1]):
                    yield storage, places, changed if which is None else changed[which]

    def _require_codes(self, rows: Tensor) -> None:
        codes = self._blocks.codes
        if codes is not None and not codes.have(rows):
            reason = "has numbers that no code of four bits stands for"
            told = [{"name": self.name, "reason": reason}]
            raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, f"{self.name} {reason}", mismatched=told)

    def _quantized(self, values: Tensor, first: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        """Yield rows of blocks from ``first`` on as they are stored, and their scales."""
        if self._is_packed and self.dtype == INT8:
            weight, scales = quantize_rows(values, self._blocks.codes, self._workspace)
        else:
            weight, scales = quantize(values.to(device=self._device, dtype=torch.float32), self._blocks)
        yield self._encoded, weight, first
        yield self._scales, scales, first // self._blocks.rows

    def _whole_blocks(self, rows: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of all blocks that ``rows`` complete, some at a time."""
        height, (total, width) = self._blocks.rows, self.shape
        step = max(1, CHUNK // (height * width)) * height
        position, end = start, start + rows.shape[0]
        while position < end:
            block = position // height * height
            block_end = min(block + height, total)
            if position == block and end >= block_end:
                until = min(position + step, total if end == total else end // height * height)
                yield position, rows[position - start : until - start]
            else:
                until = min(end, block_end)
                kept = self._workspace.take("fp8 rows", (height, width), torch.float32, self._device)
                kept[position - block : until - block].copy_(rows[position - start : until - start])
                if until == block_end:
                    yield block, kept[: until - block]
            position = until


class ScaledMatrix:
    """One weight [out, in] and its product; as :class:`~.matrix.Matrix`, but quantised and not packed."""

    packed: Tensor | None = None
    scales: Tensor | None = None

    def __init__(
        self,
        name: str,
        part_rows: Sequence[int],
        in_features: int,
        blocks: ScaleBlocks,
        place: Placement,
        *,
        count: int = 1,
        multiplies: bool = True,
    ) -> None:
        """Stack ``part_rows`` of checkpoint tensors, ``count`` times; refuse what no library multiplies."""
        self._place, self._blocks = place, blocks
        self._count, self._height = count, sum(part_rows)
        self._dense = fp8_products.dense_for(place.device) if multiplies else None
        if self._dense is not None:
            require_blocks(name, part_rows[:-1], in_features, blocks, place)
        grids = [scale_shape(blocks, rows, in_features) for rows in part_rows]
        self._grid_height = sum(length for length, _ in grids)
        self._weight = Parameter(name, (self._height * count, in_features), blocks.dtype, place.device)
        self._scales = Parameter(
            f"{name}_scale_inv", (self._grid_height * count, grids[0][1]), torch.float32, place.device
        )
        self._originals = (
            Originals(name, self._height * count, in_features, place) if blocks.keeps_originals else None
        )
        self._parts: dict[int, int] = {}  # first row to that of the grid
        of_row = []
        start = first = 0
        for rows, (length, _) in zip(part_rows, grids, strict=True):
            self._parts[start] = first
            of_row.append(first + torch.arange(rows, dtype=torch.int32) // blocks.rows)
            start, first = start + rows, first + length
        self._scale_of_row = torch.cat(of_row).to(place.device)  # of the first of ``count``

    @property
    def quantizer(self) -> Quantizer | None:
        """Return what quantises rows where they come from, or None if products take rows as they are."""
        dense = self._dense
        return None if dense is None or self._height % dense.rows else dense.quantizer(self._place.device)

    def product(
        self, x: Rows, bias: Tensor | None = None, out: Tensor | None = None, *, first: int = 0
    ) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` [T, in]: outputs from ``first``, those of ``out``."""
        outputs, inputs = self._weight.data.shape
        if self._dense is not None:
            assert first == 0, "experts have products of their own"
            return self._multiplied(self._dense, x, bias, out)
        assert isinstance(x, Tensor), "quantised for a library"
        if self._blocks.dtype == INT8:
            here = slice(first, first + (outputs if out is None else out.shape[1]))
            scales = self._scales.data.index_select(0, self._scales_of(here))
            y = int8_product(x, self._weight.data[here], scales, bias, self._blocks.columns)
            return y if out is None else out.copy_(y)
        if out is None:
            out = x.new_empty((x.shape[0], outputs))
        for start, end in chunks(out.shape[1], inputs):
            shape = end - start, inputs
            weight = self._place.workspace.take("fp8 weight", shape, x.dtype, x.device)
            self.dequantize(weight, first + start)
            if bias is None:
                torch.mm(x, weight.t(), out=out[:, start:end])
            else:
                torch.addmm(bias[start:end], x, weight.t(), out=out[:, start:end])
        return out

    def _multiplied(self, dense: Dense, x: Rows, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Multiply on an accelerator; outputs at the end that the library refuses are dequantised."""
        outputs, inputs = self._weight.data.shape
        whole = outputs - outputs % dense.rows
        y = dense.compute(x, self._weight.data[:whole], self._scales.data[: -(-whole // BLOCK)])
        if whole < outputs:
            assert isinstance(x, Tensor), "not quantised then"
            weight = self._place.workspace.take("fp8 weight", (outputs - whole, inputs), x.dtype, x.device)
            y = torch.cat([y, x @ self.dequantize(weight, whole).t()], dim=1)
        if bias is not None:
            return torch.add(y, bias, out=out)
        return y if out is None else out.copy_(y)

    def dequantize(self, out: Tensor, start: int = 0) -> Tensor:
        """Write rows ``[start, start + n)`` of the weight to ``out`` [n, in] of any float dtype."""
        for first, last in chunks(*out.shape):
            here = slice(start + first, start + last)
            scales = self._scales.data.index_select(0, self._scales_of(here))
            part, columns = out[first:last], self._blocks.columns
            dequantize(self._weight.data[here], scales, columns, part, self._place.workspace)
        return out

    def _scales_of(self, here: slice) -> Tensor:
        """Return the row of scales of each row ``here``."""
        if self._count == 1:
            return self._scale_of_row[here]
        rows = torch.arange(here.start, here.stop, device=self._scale_of_row.device)
        return self._scale_of_row[rows % self._height] + rows // self._height * self._grid_height

    def slots(self, module: str, start: int, length: int, number: int = 0) -> Iterator[WeightSlot]:
        """Yield weight and scales of the part that begins at row ``start`` of one weight."""
        first, grid_rows = self._parts[start] + number * self._grid_height, -(-length // self._blocks.rows)
        start += number * self._height
        scales = self._scales.slot(f"{module}.weight_scale_inv", first, grid_rows)
        weight = self._weight.slot(f"{module}.weight", start, length)
        kept = self._originals
        yield ScaledSlot(weight, scales, self._blocks, self._place, kept=kept, first=start)
        yield scales if kept is None else EncodedScales(scales, kept, start)

    def parameters(self) -> Iterator[Parameter]:
        yield self._weight
        yield self._scales
        if self._originals is not None:
            yield self._originals


class ScaledExpertMatrix(ScaledMatrix):
    """One weight [out, in] of each expert; as :class:`~.experts.ExpertMatrix`, but quantised."""

    def __init__(
        self,
        name: str,
        count: int,
        part_rows: Sequence[int],
        in_features: int,
        blocks: ScaleBlocks,
        place: Placement,
    ) -> None:
        """Take the output features of the checkpoint tensors that an expert's weight is stacked from."""
        found = fp8_products.experts_for(place.device)
        if found is not None:
            require_blocks(name, part_rows, in_features, blocks, place)
        self._grouped: Grouped | None = None if found is None else found.grouped
        super().__init__(name, part_rows, in_features, blocks, place, count=count, multiplies=found is None)

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Return FP8 [experts, out, in] and scales [experts, out / rows, in / columns], of whole blocks."""
        weight, scales = (each.data.unflatten(0, (self._count, -1)) for each in self.parameters())
        return weight, scales

    def packed_product(self, x: Tensor, groups: Groups, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """Write each row of ``x`` [pairs, in] times its expert's weight to ``out``; on the CPU."""
        starts, experts = groups.starts[: groups.count + 1], groups.experts[: groups.count]
        self._by_expert(x, experts.tolist(), starts.tolist(), out)
        if bias is None:
            return out
        return out.add_(bias.index_select(0, groups.of_rows))

    def plain_product(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the same in fresh memory; ``ends`` [experts]: the end of each expert's sorted rows."""
        if self._grouped is not None:
            return self._grouped(x, ends, *self.operands)
        assert x.device.type == "cpu", "a loop over experts waits for the device"
        starts = [0, *ends.tolist()]
        return self._by_expert(x, range(len(ends)), starts, x.new_empty((x.shape[0], self._height)))

    def _by_expert(self, x: Tensor, experts: Sequence[int], starts: list[int], out: Tensor) -> Tensor:
        for expert, (start, end) in zip(experts, pairwise(starts), strict=True):
            if end > start:  # the others are not dequantised
                self.product(x[start:end], out=out[start:end], first=expert * self._height)
        return out


def require_blocks(
    name: str, part_rows: Sequence[int], in_features: int, blocks: ScaleBlocks, place: Placement
) -> None:
    """Refuse (``unsupported``) blocks, or a dtype but bfloat16, that no library for accelerators takes."""
    if place.dtype != torch.bfloat16:
        reason = f"products in bfloat16, not {torch_name(place.dtype)}"
    elif (blocks.rows, blocks.columns) != (BLOCK, BLOCK):
        reason = f"blocks of {BLOCK} x {BLOCK}, not {blocks.rows} x {blocks.columns}"
    elif in_features % BLOCK or any(rows % BLOCK for rows in part_rows):
        reason = f"sizes in multiples of {BLOCK}, not {[*part_rows]} x {in_features} of {name}"
    else:
        return
    message = f"FP8 on {place.device} needs {reason}"
    raise CaesuraError(ErrorCode.UNSUPPORTED, message, field="quantization_config")


def chunks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // width)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
