"""Products with packed weights, and the only functions that know the packed layout (``cpu/linear.cpp``).

Invariants:
- Storage is one tensor of the weight's dtype and :func:`storage_shape`, allocated once as zeros. Rows in
  checkpoint layout are written in any pieces and order; the result depends on the rows alone.
- A row of a product has the same bits whatever the other rows, their number, and the number of threads.
- With float8_e4m3fn weights and :class:`Scales` the product is, to the last bit, that of the dequantised
  weight, ``float32(weight) * scale`` rounded once to the dtype of ``x``. With AMX it is that of AVX-512.
- With int8 weights and scales it is that of :func:`int8_product`, with every instruction set; also where
  four bits stand for a number, two in a byte (:class:`Codes`).
- ValueError is raised for shapes, dtypes or strides that do not fit together.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...transfer.weight_digest import Copy
from . import native
from .native import INT, POINTER, SIZE

_PRODUCTS = native.by_dtype(
    "caesura_linear", POINTER, SIZE, POINTER, POINTER, SIZE, *[POINTER] * 3, *[SIZE] * 4, INT, POINTER, INT
)
_BATCHES = native.by_dtype(
    "caesura_batched_linear", POINTER, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE, *[SIZE] * 4, INT
)
_ROWS = (POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, INT)
_pack = native.function("caesura_pack_rows", *_ROWS)
_unpack = native.function("caesura_unpack_rows", *_ROWS)
_equal = native.function("caesura_equal_rows", *_ROWS, result=INT)
_gather = native.function("caesura_gather_rows", POINTER, POINTER, POINTER, *[SIZE] * 3, INT, result=INT)

_PANEL = 32
"""Outputs are padded to a multiple of this."""
_TILE_BYTES = 64
"""Rows are padded to a multiple of this."""


FP8, INT8 = torch.float8_e4m3fn, torch.int8
INT8_COLUMNS = 128
"""Inputs that share a scale of an int8 weight."""
CODE_COLUMNS = 32
"""Inputs that share a scale of a weight of four bits."""
_MOST, _TINY = 127.0, 1e-30  # smaller blocks are zero
_WORD = 4
"""Bytes that products take at once."""


class Codes:
    """Whole numbers that four bits stand for."""

    def __init__(self, numbers: Sequence[int], *, by_powers: bool = False) -> None:
        """Take the number of each of 16 codes; ``by_powers``: their scales are powers of two."""
        self.numbers = torch.tensor(numbers, dtype=torch.int8)
        self.by_powers = by_powers
        both = torch.stack((self.numbers.repeat(16), self.numbers.repeat_interleave(16)), dim=1)
        self._pairs = both.view(torch.int16).flatten()
        self._bytes = torch.zeros(1 << 16, dtype=torch.uint8)
        for byte, pair in reversed([*enumerate(self._pairs.tolist())]):  # of two codes for zero the lower one
            self._bytes[pair] = byte

    def have(self, numbers: Tensor) -> bool:
        """Return True if each of ``numbers`` has a code."""
        return bool(torch.isin(numbers, self.numbers.to(numbers.device)).all())

    def encode(self, numbers: Tensor) -> Tensor:
        """Return int8 [n, in] as uint8 [n, in / 2], in the order of ``cpu/linear_int8.h``."""
        ordered = numbers.reshape(len(numbers), numbers.shape[1] // 8, 2, 4).transpose(2, 3).contiguous()
        pairs = ordered.view(torch.int16).flatten().int() & 0xFFFF
        return self._bytes.index_select(0, pairs).view(len(numbers), numbers.shape[1] // 2)

    def decode(self, words: Tensor) -> Tensor:
        """Return what :meth:`encode` has encoded."""
        found = self._pairs.index_select(0, words.flatten().int()).view(torch.int8)
        return found.view(len(words), words.shape[1] // 4, 4, 2).transpose(2, 3).flatten(1)


INT4 = Codes((*range(8), *range(-8, 0)))
E2M1 = Codes((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), by_powers=True)
"""Twice the numbers of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3)."""


class Scales(NamedTuple):
    lines: Tensor
    """float32 of :func:`scales_shape`, contiguous: a row of every output's scale per block of inputs."""
    columns: int
    """Inputs of a block."""
    dtype: torch.dtype = FP8
    codes: Codes | None = None
    """Codes that the elements of an int8 weight are stored as."""


def scales_shape(outputs: int, inputs: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a weight in blocks of ``columns`` inputs, outputs padded."""
    return -(-inputs // columns), -(-outputs // _PANEL) * _PANEL


def scalable(inputs: int, columns: int, dtype: torch.dtype = FP8, codes: Codes | None = None) -> bool:
    """Return True if FP8 (or int8, or four-bit) rows of ``inputs`` elements in such blocks can be packed."""
    if codes is not None:
        return inputs > 0 and inputs % (2 * _WORD) == 0 and columns == CODE_COLUMNS
    return packable(inputs, dtype) and (columns == INT8_COLUMNS if dtype == INT8 else columns % _WORD == 0)


def narrow_row_bytes(inputs: int) -> int:
    """Return the bytes that a product with an int8 weight needs for each row of ``x``."""
    blocks = -(-inputs // CODE_COLUMNS) * 2 * _WORD
    return sum(-(-each // _TILE_BYTES) * _TILE_BYTES for each in (blocks, inputs))


def holds(
    weight: Tensor, scales: Scales | None, count: int, outputs: int, inputs: int, dtype: torch.dtype
) -> bool:
    """Return True if these are ``count`` packed weights [outputs, inputs] for products with ``dtype``."""
    stored = dtype if scales is None else scales.dtype
    codes = None if scales is None else scales.codes
    rows, columns = storage_shape(outputs, inputs, stored, codes)
    fits = (
        min(count, outputs) > 0
        and dtype in native.FLOATS
        and weight.dtype == (stored if codes is None else torch.uint8)
        and weight.shape == (count * rows, columns)
        and is_storage(weight)
        and packable(inputs, stored)
    )
    if scales is None:
        return fits
    blocks, padded = scales_shape(outputs, inputs, scales.columns)
    return (
        fits
        and packable(inputs, dtype)
        and scalable(inputs, scales.columns, stored, codes)
        and scales.lines.shape == (count * blocks, padded)
        and scales.lines.dtype == torch.float32
        and scales.lines.is_contiguous()
    )


def storage_shape(
    outputs: int, inputs: int, dtype: torch.dtype, codes: Codes | None = None
) -> tuple[int, int]:
    """Return the shape of a weight's storage: padded to multiples of 32 outputs and of 64 bytes."""
    tile = _TILE_BYTES // dtype.itemsize
    inputs = inputs if codes is None else -(-inputs // 2)
    return -(-outputs // _PANEL) * _PANEL, -(-inputs // tile) * tile


def whole_panels(start: int, stop: int) -> slice:
    """Return the storage rows of the panels that contain rows ``[start, stop)`` of the weight."""
    return slice(start // _PANEL * _PANEL, -(-stop // _PANEL) * _PANEL)


def packable(inputs: int, dtype: torch.dtype) -> bool:
    """Return True if rows can be packed: float32, even numbers of 16-bit floats, multiples of four bytes."""
    return (
        inputs > 0
        and dtype in (*native.FLOATS, FP8, INT8, torch.uint8)
        and inputs * dtype.itemsize % _WORD == 0
    )


def is_storage(weight: Tensor) -> bool:
    """Return True if ``weight`` is aligned like an allocation: whole lines are streamed into storage."""
    return weight.is_contiguous() and weight.data_ptr() % _TILE_BYTES == 0


class Packed:
    """``count`` packed weights [outputs, inputs] of products; sums are float32, rounded once."""

    _kernels: ClassVar[dict[torch.dtype, Callable[..., None]]]

    def __init__(
        self,
        weight: Tensor,
        outputs: int,
        inputs: int,
        scales: Scales | None = None,
        dtype: torch.dtype | None = None,
        *,
        count: int = 1,
    ) -> None:
        """Hold ``count`` times the rows that outputs are padded to; ``scales`` of FP8 part by part."""
        self._dtype = weight.dtype if dtype is None else dtype
        if not holds(weight, scales, count, outputs, inputs, self._dtype):
            raise native.misfit(f"this does not hold {count} x {outputs} packed rows of {inputs}", weight)
        self._weight, self._count, self._outputs, self._inputs = weight, count, outputs, inputs
        self._scales = scales
        self._compute = self._kernels[self._dtype]

    def _narrow(self, rows: int) -> Tensor | None:
        """Return room for ``rows`` of the input in 8 bits, or None if they are multiplied as they are."""
        if self._scales is None or self._scales.dtype != INT8:
            return None
        return torch.empty(rows * narrow_row_bytes(self._inputs), dtype=torch.uint8)


class Product(Packed):
    """``x @ w.T + bias`` for one packed ``w`` [N, K]."""

    _kernels = _PRODUCTS

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, wide: bool = False
    ) -> Tensor:
        """Return ``x`` [M, K] times the weight, plus ``bias`` [N], in ``out`` [M, N] or fresh memory.

        Columns are contiguous; ``out`` must not overlap the others. ``wide``: it is float32, the sums as they
        are, without a bias. With contiguous ``x`` [..., K] the result is [..., N], in fresh memory.
        """
        outputs, dtype = self._outputs, self._dtype
        rows, stride, out_stride = x.numel() // self._inputs, self._inputs, outputs
        fits = x.shape[-1] == self._inputs and x.dtype == dtype
        if x.dim() == 2:
            stride, column = x.stride()
            fits = fits and column == 1
        else:
            fits = fits and x.is_contiguous() and out is None
        result = torch.float32 if wide else dtype
        fits = fits and not (wide and bias is not None)
        if out is None:
            out = torch.empty((*x.shape[:-1], outputs), dtype=result)
        else:
            fits = fits and out.shape == (rows, outputs) and out.dtype == result and out.stride(1) == 1
            out_stride = out.stride(0)
        if bias is not None:
            fits = fits and bias.shape == (outputs,) and bias.dtype == dtype and bias.is_contiguous()
        if not fits:
            raise native.misfit(f"no product with {outputs} packed rows of {self._inputs}", x, bias, out)
        narrow = self._narrow(rows)
        self._compute(
            x.data_ptr(), stride, self._weight.data_ptr(), *address(self._scales),
            None if bias is None else bias.data_ptr(), out.data_ptr(), out_stride, rows, outputs,
            self._inputs, wide, None if narrow is None else narrow.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


class BatchedProduct(Packed):
    """``x[:, b] @ w[b].T`` for packed ``w`` [B, N, K], in whole panels."""

    _kernels = _BATCHES

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Map [M, B, K] to ``out`` [M, B, N], columns of both contiguous; they must not overlap."""
        count, outputs, inputs = self._count, self._outputs, self._inputs
        rows = x.shape[0]
        if not (
            x.shape == (rows, count, inputs)
            and out.shape == (rows, count, outputs)
            and x.dtype == out.dtype == self._weight.dtype
            and x.stride(2) == out.stride(2) == 1
        ):
            raise native.misfit(f"no products with {count} x {outputs} packed rows of {inputs}", x, out)
        self._compute(
            *(x.data_ptr(), x.stride(0), x.stride(1), self._weight.data_ptr()),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            *(count, rows, outputs, inputs, torch.get_num_threads()),
        )
        return out


def int8_product(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, columns: int = INT8_COLUMNS
) -> Tensor:
    """Return ``x`` [M, K] times an int8 ``weight`` [N, K] in torch's operations; ``scales`` [N, blocks].

    Blocks of a row of ``x`` become whole numbers up to 127 times a scale. Sums over a block of inputs are
    exact, and those over blocks float32.
    """
    sums = x.new_zeros((len(x), len(weight)), dtype=torch.float32)
    for block, values in enumerate(x.float().split(columns, dim=1)):
        largest = values.abs().amax(dim=1, keepdim=True)
        tiny = largest < _TINY
        factors = torch.where(tiny, 0.0, largest.new_tensor(_MOST) / largest)  # not by the reciprocal
        numbers = (values * factors).round()
        steps = torch.where(tiny, 0.0, largest * (1.0 / _MOST)) + (values * 0.0).sum(1, keepdim=True)
        of_weight = weight[:, block * columns :][:, :columns].double()
        sums += (numbers.double() @ of_weight.t()).float() * steps * scales[:, block]
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def address(scales: Scales | None) -> tuple[int | None, int, int | None]:
    """Return the addresses of scales and of the codes' numbers, the columns of a block between them."""
    if scales is None:
        return None, 0, None
    return scales.lines.data_ptr(), scales.columns, numbers_address(scales.codes)


def numbers_address(codes: Codes | None) -> int | None:
    return None if codes is None else codes.numbers.data_ptr()


def pack_rows(weight: Tensor, rows: Tensor, start: int) -> None:
    """Write ``rows`` [n, K] as rows ``[start, start + n)`` of the packed weight."""
    _pack(*_walk(weight, rows, start))


def packing(weight: Tensor, rows: Tensor, start: int) -> Copy:
    """Return what :func:`pack_rows` would do, for :meth:`TensorDigest.add_copied`."""
    _walk(weight, rows, start)
    return Copy(weight, start, *map(native.address, ("caesura_pack_rows", "caesura_equal_rows")))


def update_rows(weight: Tensor, rows: Tensor, start: int) -> bool:
    """Call :func:`pack_rows` unless it would change no byte; return True if it did change one."""
    arguments = _walk(weight, rows, start)
    if _equal(*arguments):
        return False
    _pack(*arguments)
    return True


def unpack_rows(weight: Tensor, start: int, out: Tensor) -> Tensor:
    """Read rows ``[start, start + n)`` of the packed weight into ``out`` [n, K], and return it."""
    _unpack(*_walk(weight, out, start))
    return out


def places(weight: Tensor, start: int, inputs: int, positions: Tensor) -> Tensor:
    """Return where ``positions`` in rows [n, inputs] from ``start`` lie in the packed weight, flat."""
    if weight.numel() > torch.iinfo(positions.dtype).max:
        positions = positions.to(torch.int64)
    each = _WORD // weight.itemsize
    rows = positions // inputs
    columns = positions - rows * inputs
    rows = rows + start
    words = columns >> (each.bit_length() - 1)
    tile = _TILE_BYTES // _WORD
    shift, rest = tile.bit_length() - 1, tile - 1  # as in the picture of cpu/linear.cpp
    places = (rows >> shift + 1) * (_PANEL * weight.shape[1] // each) + (words >> shift) * (_PANEL * tile)
    places += ((rows >> shift) & 1) * (tile * tile) + (words & rest) * tile + (rows & rest)
    return places * each + (columns & (each - 1))


def equal_rows(weight: Tensor, rows: Tensor, start: int) -> bool:
    """Return True if :func:`pack_rows` would change no byte; stops soon after a difference."""
    return bool(_equal(*_walk(weight, rows, start)))


def gather_rows(weight: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Read rows ``ids`` (int64 [n]) of the packed weight into ``out``; IndexError beyond (padded) storage."""
    fits = ids.dtype == torch.int64 and ids.shape == out.shape[:1]
    if not (fits and ids.is_contiguous() and out.is_contiguous()):
        raise native.misfit("ids do not fit", ids, out)
    packed, target, _, _, count, words, threads = _walk(weight, out, 0, indexed=True)
    if not _gather(packed, ids.data_ptr(), target, count, weight.shape[0], words, threads):
        raise IndexError(f"row ids beyond [0, {weight.shape[0]})")
    return out


def _walk(
    weight: Tensor, rows: Tensor, start: int, *, indexed: bool = False
) -> tuple[int, int, int, int, int, int, int]:
    """Return checked arguments of the C functions; with ``indexed`` any number of rows."""
    count, inputs = rows.shape
    fits = (
        rows.dtype == weight.dtype
        and (rows.stride(1) == 1 or inputs == 1)
        and is_storage(weight)
        and storage_shape(1, inputs, weight.dtype)[1] == weight.shape[1]
        and packable(inputs, weight.dtype)
        and (indexed or 0 <= start <= start + count <= weight.shape[0])
    )
    if not fits:
        raise native.misfit(f"rows from {start} do not fit", rows, weight)
    words = inputs * rows.itemsize // 4
    stride = rows.stride(0) * rows.itemsize
    return weight.data_ptr(), rows.data_ptr(), stride, start, count, words, torch.get_num_threads()
