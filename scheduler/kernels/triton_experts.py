"""Operations around the products of routed experts on CUDA, in Triton: choice, order of rows, weighted sum.

Invariants:
- Nothing waits for the device, and a token's results depend on that token alone.
- Whatever the logits are, NaN included, ids are of experts, each at most once: choosing compares integers.
- A token's sum is taken in float32 in the order of its experts and rounded once. Pairs of experts that are
  not held lie behind all ends, and count in no sum.
- A step's only arguments are tensors, their number of pairs (which has no variants) and the size of the grid.

Imported only with Triton. Compiled for sm_90 and tested in Triton's interpreter; not run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decoder_layers import NO_GROUPS, GroupRouting
from .triton_launch import Launcher

MAX_PAIRS = 8192
"""Most pairs that :func:`sort_rows` takes: each finds its place by comparing with all others."""
_SORTED, _LOOKED_AT = 8, 256
"""Pairs that find their places in one program, and pairs that it compares with at a time."""
_COPIED = 512
"""Elements that a program copies together, of each of its rows."""
_SUMMED = 1024
_TINY = 1e-20
_NONE = tl.constexpr(-(2**63))
_IDS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _keys(values, ids):
    """Return int64 keys in the order of float32 ``values``, the lower id higher among equals."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (_IDS - ids.to(tl.int64))


@triton.jit
def _within_groups(
    choice, inside, group, ids, groups: tl.constexpr, top_groups: tl.constexpr, top2: tl.constexpr
):
    """Return ``choice`` [groups, experts of one] with -inf outside the ``top_groups`` best groups."""
    keys = tl.where(inside, _keys(choice, ids), _NONE)
    first = tl.max(keys, 1)[:, None]
    quality = tl.sum(tl.where(keys == first, choice, 0.0), 1)
    if top2:
        keys = tl.where(keys == first, _NONE, keys)
        second = tl.max(keys, 1)[:, None]
        quality += tl.sum(tl.where(keys == second, choice, 0.0), 1)
    ranks = tl.where(group < groups, _keys(quality, group), _NONE)
    chosen = tl.zeros_like(group)
    for _ in range(top_groups):
        best = tl.max(ranks, 0)
        chosen = tl.where(ranks == best, 1, chosen)
        ranks = tl.where(ranks == best, _NONE, ranks)
    return tl.where((chosen == 1)[:, None], choice, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["record"])
def _route_kernel(
    logits, bias, ids_out, weights_out, record, logits_row, record_row, scale,
    groups: tl.constexpr, group_size: tl.constexpr, top_groups: tl.constexpr, top2: tl.constexpr,
    top_k: tl.constexpr, group_width: tl.constexpr, size_width: tl.constexpr, k_width: tl.constexpr,
    sigmoid: tl.constexpr, biased: tl.constexpr, normalize: tl.constexpr, recorded: tl.constexpr,
    tiny: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts; its logits are [groups, experts of one]."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, group_width), tl.arange(0, size_width)
    ids = group[:, None] * group_size + member[None, :]
    inside = (group < groups)[:, None] & (member < group_size)[None, :]
    logit = tl.load(logits + token * logits_row + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if sigmoid:
        scores = 1 / (1 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if biased:
        choice = scores + tl.load(bias + ids, mask=inside, other=0.0)
    if top_groups < groups:
        choice = _within_groups(choice, inside, group, ids, groups, top_groups, top2)
    keys = tl.where(inside, _keys(choice, ids), _NONE)
    rank = tl.arange(0, k_width)
    chosen = tl.zeros([k_width], tl.int64)
    weights = tl.zeros([k_width], tl.float32)
    for i in range(top_k):
        best = tl.max(tl.max(keys, 1), 0)
        weight = tl.sum(tl.sum(tl.where(keys == best, scores, 0.0), 1), 0)
        chosen = tl.where(rank == i, _IDS - (best & _IDS), chosen)
        weights = tl.where(rank == i, weight, weights)
        keys = tl.where(keys == best, _NONE, keys)
    if normalize:
        weights = weights / (tl.sum(weights, 0) + tiny)
    weights = (weights * scale).to(logits.dtype.element_ty).to(tl.float32)
    kept = rank < top_k
    tl.store(ids_out + token * top_k + rank, chosen, mask=kept)
    tl.store(weights_out + token * top_k + rank, weights, mask=kept)
    if recorded:
        tl.store(record + token * record_row + rank, chosen.to(record.dtype.element_ty), mask=kept)


@triton.jit
def _number(ids, first: tl.constexpr, experts: tl.constexpr):
    """Count experts from the first one held; all others have the number behind the last one."""
    return tl.where((ids >= first) & (ids < first + experts), ids - first, experts)


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    x, ids, rows, places, ends, x_row, pairs,
    first: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    looked_at: tl.constexpr, copied: tl.constexpr,
):  # fmt: skip
    """Copy some pairs' rows to their places, or, behind the pairs, write the ends of some experts' rows."""
    item = tl.program_id(0) * block + tl.arange(0, block)
    is_pair = item < pairs
    number = _number(tl.load(ids + item, mask=is_pair, other=0), first, experts)
    limit = tl.where(is_pair, number, item - pairs)[:, None]
    before = tl.zeros([block, looked_at], tl.int32)
    for start in range(0, pairs, looked_at):
        other = (start + tl.arange(0, looked_at))[None, :]
        its = tl.load(ids + other, mask=other < pairs, other=0x7FFFFFFF)
        its = tl.where(other < pairs, _number(its, first, experts), its)
        # Equal ids stay in their order; an expert's end, whose item is behind all pairs, is behind all of its
        # own.
        before += ((its < limit) | ((its == limit) & (other < item[:, None]))).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(ends + item - pairs, place, mask=(item >= pairs) & (item < pairs + experts))
    tl.store(places + item, place.to(tl.int64), mask=is_pair)
    source = x + (item // top_k).to(tl.int64)[:, None] * x_row
    target = rows + place.to(tl.int64)[:, None] * size
    for start in range(0, size, copied):
        column = (start + tl.arange(0, copied))[None, :]
        inside = is_pair[:, None] & (column < size)
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def _combine_kernel(
    y, places, weights, addend, ends, out, y_row, addend_row,
    top_k: tl.constexpr, size: tl.constexpr, block: tl.constexpr, added: tl.constexpr, experts: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    total = tl.zeros([block], tl.float32)
    for i in range(top_k):
        place = tl.load(places + token * top_k + i)
        weight = tl.load(weights + token * top_k + i).to(tl.float32)
        read = inside
        if experts:
            read = inside & (place < tl.load(ends + experts - 1))
        total += weight * tl.load(y + place * y_row + column, mask=read, other=0.0).to(tl.float32)
    if added:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(addend + token * addend_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _bias_kernel(
    y, ends, bias, y_row, experts: tl.constexpr, width: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """Add the bias of one row's expert, unless the row is behind the rows of all."""
    row = tl.program_id(0)
    expert = tl.arange(0, width)
    before = tl.load(ends + expert, mask=expert < experts, other=0x7FFFFFFF) <= row
    own = tl.sum(before.to(tl.int32), 0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = (column < size) & (own < experts)
    target = y + row.to(tl.int64) * y_row + column
    addend = tl.load(bias + own.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32) + addend
    tl.store(target, total.to(y.dtype.element_ty), mask=inside)


_launch_bias = Launcher(_bias_kernel, tensors=3, numbers=1)
_launch_route = Launcher(_route_kernel, tensors=5, numbers=3)
_launch_sort = Launcher(_sort_kernel, tensors=5, numbers=2)
_launch_combine = Launcher(_combine_kernel, tensors=6, numbers=2)


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    by: GroupRouting = NO_GROUPS,
    bias: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of the largest scores [T, experts], best first (``layers/moe.py``).

    Return ids int64 and float32 weights [T, top_k], rounded to the logits' dtype. ``bias``: float32
    [experts]; ``record``: integers [T, top_k] for a copy of the ids.
    """
    tokens, experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    group_size = experts // by.groups
    copy = ids if record is None else record
    if tokens:
        widths = [triton.next_power_of_2(size) for size in (by.groups, group_size, top_k)]
        _launch_route(
            (tokens, 1, 1),
            (logits, logits if bias is None else bias, ids, weights, copy),
            (logits.stride(0), copy.stride(0), by.scale),
            (
                *(by.groups, group_size, by.top_groups, by.best_two, top_k, *widths),
                *(by.sigmoid, bias is not None, normalize, record is not None, _TINY),
            ),
            1,
        )
    return ids, weights


def sort_rows(x: Tensor, expert_ids: Tensor, held: range) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the rows of ``x`` [T, size] once for each of their experts, sorted by expert, in order within one.

    ``expert_ids``: int64 [T, k], 1 to :data:`MAX_PAIRS`; those not ``held`` come last. Return rows
    [T * k, size]; each pair's place, int64 [T, k]; the end of each expert held, int32.
    """
    (tokens, top_k), size = expert_ids.shape, x.shape[1]
    pairs = tokens * top_k
    rows = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    places = torch.empty((tokens, top_k), dtype=torch.int64, device=x.device)
    ends = torch.empty(len(held), dtype=torch.int32, device=x.device)
    _launch_sort(
        (triton.cdiv(pairs + len(held), _SORTED), 1, 1),
        (x, expert_ids, rows, places, ends),
        (x.stride(0), pairs),
        (held.start, len(held), top_k, size, _SORTED, _LOOKED_AT, _COPIED),
        4,
    )
    return rows, places, ends


def combine(
    y: Tensor, places: Tensor, weights: Tensor, addend: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Return sums [T, size] of float32 ``weights`` [T, k] times rows ``places`` of ``y`` [pairs, size].

    ``addend``: [T, size], elements of a row contiguous, added to the rounded sum; or None. ``ends``: int32,
    the last one ends the rows that are read; None: all are.
    """
    (tokens, top_k), size = places.shape, y.shape[1]
    out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
    shared = out if addend is None else addend
    if tokens:
        grid = tokens, triton.cdiv(size, _SUMMED), 1
        tensors = y, places, weights, shared, places if ends is None else ends, out
        strides = y.stride(0), shared.stride(0)
        experts = 0 if ends is None else len(ends)
        _launch_combine(grid, tensors, strides, (top_k, size, _SUMMED, addend is not None, experts), 4)
    return out


def add_biases(y: Tensor, ends: Tensor, bias: Tensor) -> Tensor:
    """Add to each row of ``y`` [pairs, size], in place, its expert's row of ``bias`` [experts, size].

    ``ends``: int32 [experts], each expert's end among the rows; those behind the last stay as they are.
    """
    rows, size = y.shape
    if rows:
        experts = len(ends)
        constants = experts, triton.next_power_of_2(experts), size, _SUMMED
        _launch_bias((rows, triton.cdiv(size, _SUMMED), 1), (y, ends, bias), (y.stride(0),), constants, 4)
    return y
