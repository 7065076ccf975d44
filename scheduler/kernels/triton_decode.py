"""Paged attention of decode rows in Triton, for graphs: one program per row, KV head and part of its KV.

Invariants:
- Lengths and pages are read on the device, so one launch serves every length: arguments are tensors.
- A masked position contributes nothing: neither it nor a block before a window is loaded.
- Parts are combined in a fixed order; a part without tokens counts nothing.

The form is flash-decoding (Dao, Haziza, Massa, Sizov, 2023), the products with the query heads of a group as
the rows of a matrix. Imported only with Triton; tested in its interpreter, compiled for sm_90, not measured.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_form import PLAIN, AttentionForm

_BLOCK = 64
_MIN_DOT = 16
_MOST_SUMS = 2048
"""Sums of values (query heads times head size) beside which float32 products of ``_BLOCK`` tokens fit."""
_LOG2_E = 1.4426950408889634


def _store(
    k, v, k_pool, v_pool, table, kv_lens, k_row, k_head, v_row, v_head, table_stride, kv_heads,
    size: tl.constexpr, width: tl.constexpr, page_size: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(kv_lens + row) - 1
    page = tl.load(table + row * table_stride + last // page_size).to(tl.int64)
    column = tl.arange(0, width)
    target = ((page * kv_heads + head) * page_size + last % page_size) * size + column
    key = tl.load(k + row * k_row + head * k_head + column, mask=column < size)
    value = tl.load(v + row * v_row + head * v_head + column, mask=column < size)
    tl.store(k_pool + target, key, mask=column < size)
    tl.store(v_pool + target, value, mask=column < size)


def _attend(
    q, k_pool, v_pool, table, kv_lens, parts, maxima, sums, scale, cap, row_stride, head_stride,
    table_stride, kv_heads,
    group: tl.constexpr, rows: tl.constexpr, size: tl.constexpr, width: tl.constexpr, splits: tl.constexpr,
    block: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr, capped: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Attend to one part of what a row sees, for a KV head's query heads; scores are in units of log 2.

    ``window`` 0 sees all. ``capped``: ``scale`` has been divided by the cap, and ``cap`` has the units.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    begin = tl.maximum(length - window, 0) if window else 0
    seen_from = begin // block * block
    span = tl.cdiv(tl.cdiv(length - seen_from, block), splits) * block
    first = seen_from + split * span
    end = tl.minimum(first + span, length)
    member, column = tl.arange(0, rows), tl.arange(0, width)
    query_head = head * group + member
    inside = (member < group)[:, None] & (column < size)[None, :]
    queries = tl.load(
        q + row * row_stride + query_head[:, None] * head_stride + column[None, :], mask=inside, other=0.0
    )
    maximum = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums_of_values = tl.zeros([rows, width], tl.float32)
    for start in range(first, end, block):
        position = start + tl.arange(0, block)
        known = (position < end) & (position >= begin)
        page = tl.load(table + row * table_stride + position // page_size, mask=known, other=0).to(tl.int64)
        cell = ((page * kv_heads + head) * page_size + position % page_size) * size
        loaded = known[:, None] & (column < size)[None, :]
        keys = tl.load(k_pool + cell[:, None] + column[None, :], mask=loaded, other=0.0)
        values = tl.load(v_pool + cell[:, None] + column[None, :], mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
        if capped:
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(values.dtype), values, input_precision=precision)
        sums_of_values = sums_of_values * shrink[:, None] + product
        maximum = higher
    part = (row * kv_heads * group + query_head) * splits + split
    tl.store(maxima + part, maximum, mask=member < group)
    tl.store(sums + part, total, mask=member < group)
    tl.store(parts + part[:, None] * size + column[None, :], sums_of_values, mask=inside)


def _combine(
    parts, maxima, sums, sinks, out, log2_e,
    heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, splits: tl.constexpr,
    with_sinks: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split, column = tl.arange(0, splits), tl.arange(0, width)
    maximum = tl.load(maxima + head * splits + split)
    largest = tl.max(maximum, 0)
    if with_sinks:
        sink = tl.load(sinks + head % heads).to(tl.float32) * log2_e
        largest = tl.maximum(largest, sink)
    weight = tl.exp2(maximum - largest)
    total = tl.sum(weight * tl.load(sums + head * splits + split), 0)
    if with_sinks:
        total += tl.exp2(sink - largest)
    cells = (head * splits + split)[:, None] * size + column[None, :]
    values = tl.load(parts + cells, mask=(column < size)[None, :], other=0.0)
    result = tl.sum(values * weight[:, None], 0) / total
    tl.store(out + head * size + column, result.to(out.dtype.element_ty), mask=column < size)


_store_kernel, _attend_kernel, _combine_kernel = triton.jit(_store), triton.jit(_attend), triton.jit(_combine)


def num_splits(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the parts of each row's KV, a power of two up to 64: about two programs per multiprocessor."""
    wanted = -(-2 * multiprocessors // (rows * kv_heads))
    return int(min(64, triton.next_power_of_2(wanted)))


class PagedDecode:
    """Store and attention for a fixed number of rows; everything it needs is allocated here."""

    def __init__(
        self,
        table: Tensor,
        window_table: Tensor,
        kv_lens: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        page_size: int,
        scale: float,
        splits: int,
    ) -> None:
        """Tables are int32 [rows, pages], read at each call; ``kv_lens`` int32 [rows] counts this token."""
        self._tables, self._kv_lens = (table, window_table), kv_lens
        self._heads, self._kv_heads, self._size = num_heads, num_kv_heads, head_size
        self._page_size, self._scale, self._splits = page_size, scale, splits
        self._width = max(_MIN_DOT, triton.next_power_of_2(head_size))
        self._group_rows = max(_MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads))
        parts = len(kv_lens) * num_heads * splits
        self._parts = torch.empty((parts, head_size), dtype=torch.float32, device=table.device)
        self._maxima, self._sums = torch.empty((2, parts), dtype=torch.float32, device=table.device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, form: AttentionForm = PLAIN
    ) -> Tensor:
        """Store, then :meth:`attend`; k, v: [rows, kv heads, size], the last dimension contiguous."""
        table = self._tables[form.window is not None]
        _store_kernel[(len(self._kv_lens), self._kv_heads)](
            k, v, k_pool, v_pool, table, self._kv_lens,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0), self._kv_heads,
            page_size=self._page_size, size=self._size, width=self._width,
        )  # fmt: skip
        return self.attend(q, k_pool, v_pool, form)

    def attend(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        """Return [rows, heads * size]; pools hold this step's K and V."""
        rows, capped = len(self._kv_lens), form.softcap is not None
        table = self._tables[form.window is not None]
        scale = self._scale if form.scale is None else form.scale
        scale = scale * _LOG2_E if form.softcap is None else scale / form.softcap
        shared = {"size": self._size, "width": self._width}
        _attend_kernel[(rows, self._kv_heads, self._splits)](
            q, k_pool, v_pool, table, self._kv_lens, self._parts, self._maxima, self._sums,
            scale, (form.softcap or 0.0) * _LOG2_E, q.stride(0), q.stride(1), table.stride(0), self._kv_heads,
            group=self._heads // self._kv_heads, rows=self._group_rows, splits=self._splits,
            block=self._block(q.dtype),
            page_size=self._page_size, window=form.window or 0, capped=capped, precision="ieee", **shared,
        )  # fmt: skip
        out = torch.empty((rows, self._heads * self._size), dtype=q.dtype, device=q.device)
        _combine_kernel[(rows * self._heads,)](
            self._parts, self._maxima, self._sums, self._sums if form.sinks is None else form.sinks, out,
            _LOG2_E,
            heads=self._heads, splits=self._splits, with_sinks=form.sinks is not None, **shared,
        )  # fmt: skip
        return out

    def _block(self, dtype: torch.dtype) -> int:
        """Return tokens per step of a program: fewer in float32, whose products take a thread's registers."""
        fits = dtype.itemsize < 4 or self._group_rows * self._width <= _MOST_SUMS
        return _BLOCK if fits else _MIN_DOT
