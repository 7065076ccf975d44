"""FP8 activations for products by block on CUDA, in Triton: quantised, and moved to where experts begin.

Invariants:
- Values are those of torch's operations (``layers/fp8_products.py``), bit for bit: divisions are exact. What
  a norm or a gate gives is rounded before it is quantised, as by itself.
- Nothing waits for the device; a step's only arguments are tensors, numbers of rows (which have no variants)
  and the size of the grid.
- Rows behind the last expert's end are moved behind all experts, and of no expert.

Imported only with Triton. Tested in Triton's interpreter; not run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_form import Bend
from .elementwise import BENDS
from .triton_elementwise import ELEMENTS_PER_WARP, bent, normalized, rounded
from .triton_launch import Launcher

BLOCK = 128
"""Columns that share a scale."""
FP8 = torch.float8_e4m3fn
_MOVED = 8
"""Scales of a row that a program computes together."""
_OWNERS = 64
"""Moved rows whose experts a program finds together."""
_MAX: tl.constexpr = tl.constexpr(torch.finfo(FP8).max)
_TINY: tl.constexpr = tl.constexpr(1e-12)


@triton.jit
def quantized(value, like, rows: tl.constexpr, size: tl.constexpr):
    """Return float32 [rows, size] in the dtype that ``like`` points to, and the scale of each row."""
    largest = tl.maximum(tl.max(tl.abs(value), 1), _TINY)
    factor = tl.div_rn(largest, tl.full([rows], _MAX, tl.float32))
    scaled = tl.div_rn(value, tl.broadcast_to(factor[:, None], [rows, size]))
    return scaled.to(like.dtype.element_ty), factor


@triton.jit
def _quantize(x, values, factors, factors_column, first, inside, size: tl.constexpr, tiles: tl.constexpr,
              block: tl.constexpr, bend: tl.constexpr):  # fmt: skip
    """Quantise ``tiles`` times ``block`` elements of one row, from tile ``first`` on; zeros if not inside.

    ``bend`` not negative: they are a gate's, and the factors beside them follow ``size`` elements later.
    """
    tile = first + tl.arange(0, tiles)
    column = tile[:, None] * block + tl.arange(0, block)[None, :]
    value = tl.load(x + column, mask=inside & (column < size), other=0.0).to(tl.float32)
    if bend >= 0:
        beside = tl.load(x + size + column, mask=inside & (column < size), other=0.0).to(tl.float32)
        value = rounded(bent(value, beside, x, bend), x)
    scaled, factor = quantized(value, values, tiles, block)
    tl.store(values + column, scaled, mask=column < size)
    tl.store(factors + tile * factors_column, factor, mask=tile * block < size)


@triton.jit(do_not_specialize=["tokens"])
def _quantize_kernel(
    x, values, factors, x_row, factors_row, factors_column, tokens,
    size: tl.constexpr, tiles: tl.constexpr, block: tl.constexpr, bend: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _quantize(
        x + row * x_row, values + row * size, factors + row * factors_row, factors_column,
        tl.program_id(1) * tiles, row < tokens, size, tiles, block, bend,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _norm_quantize_kernel(
    x, residual, weight, values, factors, x_row, residual_row, factors_row, factors_column, eps, tokens,
    size: tl.constexpr, width: tl.constexpr, added: tl.constexpr, from_one: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = (column < size) & (row < tokens)
    result = normalized(
        x, residual, weight, row, column, inside, x_row, residual_row, eps, size, added, from_one
    )
    tiles: tl.constexpr = width // block
    scaled, factor = quantized(tl.reshape(rounded(result, x), [tiles, block]), values, tiles, block)
    tile = tl.arange(0, tiles)
    place = tile[:, None] * block + tl.arange(0, block)[None, :]
    tl.store(values + row * size + place, scaled, mask=place < size)
    tl.store(factors + row * factors_row + tile * factors_column, factor, mask=tile * block < size)


@triton.jit(do_not_specialize=["pairs", "total"])
def _spread_kernel(
    x, ends, values, factors, places, padded_ends, owners, x_row, factors_row, pairs, total,
    experts: tl.constexpr, width: tl.constexpr, multiple: tl.constexpr, size: tl.constexpr,
    tiles: tl.constexpr, block: tl.constexpr, looked_at: tl.constexpr,
):  # fmt: skip
    """Quantise one row to its place, or, behind the rows, find the experts of some moved rows."""
    item = tl.program_id(0)
    expert = tl.arange(0, width)
    known = expert < experts
    end = tl.load(ends + expert, mask=known, other=0)
    start = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    padding = tl.where(known, (multiple - (end - start) % multiple) % multiple, 0)
    if item < pairs:
        before = known & (end <= item)
        place = (item + tl.sum(tl.where(before, padding, 0), 0)).to(tl.int64)
        tl.store(places + item, place)
        for first in range(0, tl.cdiv(size, block), tiles):
            _quantize(
                x + item.to(tl.int64) * x_row, values + place * size, factors + place * factors_row, 1,
                first, True, size, tiles, block, -1,
            )  # fmt: skip
    else:
        padded_end = end + tl.cumsum(padding, 0)
        tl.store(padded_ends + expert, padded_end, mask=known & (item == pairs))
        row = (item - pairs) * looked_at + tl.arange(0, looked_at)
        owner = tl.sum((known[None, :] & (padded_end[None, :] <= row[:, None])).to(tl.int32), 1)
        tl.store(owners + row, tl.where(owner < experts, owner, -1), mask=row < total)


_launch_quantize = Launcher(_quantize_kernel, tensors=3, numbers=4)
_launch_norm_quantize = Launcher(_norm_quantize_kernel, tensors=5, numbers=6)
_launch_spread = Launcher(_spread_kernel, tensors=7, numbers=4)


def _empty(rows: int, size: int, device: torch.device, *, columns_contiguous: bool) -> tuple[Tensor, Tensor]:
    shape = (size // BLOCK, rows) if columns_contiguous else (rows, size // BLOCK)
    factors = torch.empty(shape, dtype=torch.float32, device=device)
    values = torch.empty((rows, size), dtype=FP8, device=device)
    return values, factors.t() if columns_contiguous else factors


def quantize(
    x: Tensor, rows: int, *, columns_contiguous: bool = False, bend: Bend | None = None
) -> tuple[Tensor, Tensor]:
    """Return FP8 [rows, size], and float32 scales [rows, size / 128], of ``x`` [T, size] and zeros below.

    With ``bend``, ``x`` is [T, 2 size], and what is quantised is ``bend(gate) * up``.
    """
    tokens, size = x.shape
    size = size if bend is None else size // 2
    values, factors = _empty(rows, size, x.device, columns_contiguous=columns_contiguous)
    if rows:
        _launch_quantize(
            (rows, triton.cdiv(size // BLOCK, _MOVED), 1),
            (x, values, factors),
            (x.stride(0), factors.stride(0), factors.stride(1), tokens),
            (size, _MOVED, BLOCK, -1 if bend is None else BENDS[bend]),
            4,
        )
    return values, factors


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    rows: int,
    *,
    residual: Tensor | None = None,
    from_one: bool = False,
    columns_contiguous: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return :func:`quantize` of ``triton_elementwise.rms_norm``, which adds to ``residual`` in place."""
    tokens, size = x.shape
    values, factors = _empty(rows, size, x.device, columns_contiguous=columns_contiguous)
    addend = x if residual is None else residual
    if rows:
        width = max(BLOCK, triton.next_power_of_2(size))
        _launch_norm_quantize(
            (rows, 1, 1),
            (x, addend, weight, values, factors),
            (x.stride(0), addend.stride(0), factors.stride(0), factors.stride(1), eps, tokens),
            (size, width, residual is not None, from_one, BLOCK),
            min(16, max(1, width // ELEMENTS_PER_WARP)),
        )
    return values, factors


def spread(
    x: Tensor, ends: Tensor, multiple: int, rows: int
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Quantise rows [pairs, size] by expert to places where each expert begins at a multiple of ``multiple``.

    ``ends``: int32 [experts]. ``rows``: at least as many as the places reach. Return FP8 and scales, of which
    those between the experts' rows are undefined; each expert's end and each row's expert or -1, int32; each
    pair's place, int64.
    """
    pairs, size = x.shape
    experts, blocks = len(ends), size // BLOCK
    values = torch.empty((rows, size), dtype=FP8, device=x.device)
    factors = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    places = torch.empty(pairs, dtype=torch.int64, device=x.device)
    padded_ends, owners = torch.empty_like(ends), torch.empty(rows, dtype=torch.int32, device=x.device)
    _launch_spread(
        (pairs + max(1, triton.cdiv(rows, _OWNERS)), 1, 1),
        (x, ends, values, factors, places, padded_ends, owners),
        (x.stride(0), factors.stride(0), pairs, rows),
        (experts, triton.next_power_of_2(experts), multiple, size, _MOVED, BLOCK, _OWNERS),
        4,
    )
    return (values, factors), padded_ends, owners, places
