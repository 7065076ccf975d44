"""Routed experts on CUDA, in Triton: choice, products over the rows that chose an expert, weighted sum.

Invariants:
- Nothing waits for the device, and a token's results depend on that token alone: tiles have one size.
- Whatever the logits are, NaN included, ids are of experts, each at most once: choosing compares integers.
- No row is sorted or copied: a program finds its expert's pairs in the ids, and writes a pair's result to the
  pair's place. Pairs of experts that are not held are never written, and count in no sum.
- Products are rounded before a bias, an activation and a sum, as torch's operations round.
- A step's only arguments are tensors, their number of tokens (which has no variants) and the size of the
  grid.

Imported only with Triton. Compiled for sm_90 and tested in Triton's interpreter; not run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_form import Bend
from .decoder_layers import NO_GROUPS, GroupRouting
from .elementwise import BENDS
from .triton_elementwise import bent, rounded
from .triton_fp8 import BLOCK, quantized
from .triton_launch import Launcher

MAX_TOKENS = 1024
"""Most tokens that :func:`product` is meant for: each program looks at the ids of all."""
_LOOKED_AT = 128
"""Tokens whose ids a program looks at together."""
_ROWS, _QUANTIZED_ROWS = 32, 16
"""Rows of a tile: in FP8 fewer, because each program quantises them itself."""
_ROWS_PER_WARP = 4
_OUTPUTS = 64
_DEPTH_BYTES = 128
"""Bytes of a weight's row that a program multiplies at a time."""
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
    tiny: tl.constexpr, shared: tl.constexpr,
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
    if recorded:
        tl.store(record + token * record_row + rank, chosen.to(record.dtype.element_ty), mask=kept)
    chosen = tl.where(kept, chosen, groups * group_size + rank - top_k)
    place, stored = token * (top_k + shared) + rank, rank < top_k + shared
    tl.store(ids_out + place, chosen, mask=stored)
    tl.store(weights_out + place, tl.where(kept, weights, 1.0), mask=stored)


@triton.jit
def _own_pairs(
    ids, expert, start, tokens, top_k: tl.constexpr, k_width: tl.constexpr, looked_at: tl.constexpr
):
    """Return 1 + the pair by which each of some tokens has chosen ``expert``, or 0."""
    token, rank = (start + tl.arange(0, looked_at))[:, None], tl.arange(0, k_width)[None, :]
    pair = token * top_k + rank
    chosen = tl.load(ids + pair, mask=(token < tokens) & (rank < top_k), other=-1)
    return tl.sum(tl.where(chosen == expert, pair + 1, 0), 1)


@triton.jit
def _count_pairs(ids, expert, tokens, top_k: tl.constexpr, k_width: tl.constexpr, looked_at: tl.constexpr):
    total = 0
    for start in range(0, tokens, looked_at):
        own = _own_pairs(ids, expert, start, tokens, top_k, k_width, looked_at)
        total += tl.sum((own > 0).to(tl.int32), 0)
    return total


@triton.jit
def _pairs_from(
    first, ids, expert, tokens, top_k: tl.constexpr, k_width: tl.constexpr, looked_at: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """Return the next ``rows`` pairs of ``expert`` from its pair number ``first`` on, -1 behind the last."""
    wanted = (first + tl.arange(0, rows))[:, None]
    pair = tl.full([rows], -1, tl.int32)
    seen = 0
    for start in range(0, tokens, looked_at):
        own = _own_pairs(ids, expert, start, tokens, top_k, k_width, looked_at)
        is_own = (own > 0).to(tl.int32)
        number = seen + tl.cumsum(is_own, 0) - is_own
        is_wanted = (is_own == 1)[None, :] & (number[None, :] == wanted)
        pair += tl.sum(tl.where(is_wanted, own[None, :], 0), 1)
        seen += tl.sum(is_own, 0)
    return pair


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    x, ids, weight, scales, bias, out, x_row, tokens,
    first_expert: tl.constexpr, top_k: tl.constexpr, k_width: tl.constexpr, shared: tl.constexpr,
    size: tl.constexpr, width: tl.constexpr, bend: tl.constexpr, biased: tl.constexpr, scaled: tl.constexpr,
    rows: tl.constexpr, outputs: tl.constexpr, depth: tl.constexpr, looked_at: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of one expert's pairs by some rows of its weight, tile by tile.

    ``shared``: pairs that read one row of ``x``. ``bend`` not negative: ``width`` rows of a gate lie before
    as many of the factor beside it. ``scaled``: weights have a scale for each block of ``depth`` by
    ``depth``, and so many elements of a row are quantised together.
    """
    own = tl.program_id(1).to(tl.int64)
    expert = own + first_expert
    gated: tl.constexpr = bend >= 0
    height: tl.constexpr = 2 * width if gated else width
    grid_columns: tl.constexpr = size // depth
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    known = output < width
    weights = weight + (own * height + output)[:, None] * size
    block = own * (height // depth) + tl.program_id(0) * outputs // depth
    for first in range(0, _count_pairs(ids, expert, tokens, top_k, k_width, looked_at), rows):
        pair = _pairs_from(first, ids, expert, tokens, top_k, k_width, looked_at, rows)
        is_pair = (pair >= 0)[:, None]
        source = x + (pair // shared).to(tl.int64)[:, None] * x_row
        result = tl.zeros([rows, outputs], tl.float32)
        beside = tl.zeros([rows, outputs], tl.float32)
        for begin in range(0, size, depth):
            column = (begin + tl.arange(0, depth))[None, :]
            factors = tl.load(source + column, mask=is_pair & (column < size), other=0.0)
            scale = tl.full([rows], 1.0, tl.float32)
            if scaled:
                factors, scale = quantized(factors.to(tl.float32), weight, rows, depth)
            loaded = known[:, None] & (column < size)
            part = tl.dot(
                factors, tl.trans(tl.load(weights + column, mask=loaded, other=0.0)), input_precision="ieee"
            )
            if scaled:
                part *= (scale * tl.load(scales + block * grid_columns + begin // depth))[:, None]
            result += part
            if gated:
                others = tl.load(weights + width * size + column, mask=loaded, other=0.0)
                part = tl.dot(factors, tl.trans(others), input_precision="ieee")
                if scaled:
                    of_others = (block + width // depth) * grid_columns + begin // depth
                    part *= (scale * tl.load(scales + of_others))[:, None]
                beside += part
        result, beside = rounded(result, out), rounded(beside, out)
        if biased:
            addend = bias + own * height + output
            result = rounded(result + tl.load(addend, mask=known, other=0.0).to(tl.float32)[None, :], out)
            if gated:
                added = tl.load(addend + width, mask=known, other=0.0).to(tl.float32)[None, :]
                beside = rounded(beside + added, out)
        if gated:
            result = bent(result, beside, out, bend)
        target = out + pair.to(tl.int64)[:, None] * width + output[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_pair & known[None, :])


@triton.jit
def _combine_kernel(
    y, ids, places, weights, addend, out, y_row, addend_row,
    top_k: tl.constexpr, size: tl.constexpr, block: tl.constexpr, added: tl.constexpr, moved: tl.constexpr,
    first_expert: tl.constexpr, experts: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    total = tl.zeros([block], tl.float32)
    for i in range(top_k):
        pair = token * top_k + i
        weight = tl.load(weights + pair).to(tl.float32)
        place = pair
        if moved:
            place = tl.load(places + pair)
        expert = tl.load(ids + pair)
        read = inside & (expert >= first_expert) & (expert < first_expert + experts)
        total += weight * tl.load(y + place * y_row + column, mask=read, other=0.0).to(tl.float32)
    if added:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(addend + token * addend_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


_launch_route = Launcher(_route_kernel, tensors=5, numbers=3)
_launch_product = Launcher(_product_kernel, tensors=6, numbers=2)
_launch_combine = Launcher(_combine_kernel, tensors=6, numbers=2)


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    by: GroupRouting = NO_GROUPS,
    bias: Tensor | None = None,
    record: Tensor | None = None,
    shared: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of the largest scores [T, experts], best first (``layers/moe.py``).

    Return ids int32 and float32 weights [T, top_k + shared], rounded to the logits' dtype; those of
    ``shared`` are the ids behind all, and 1. ``bias``: float32 [experts]; ``record``: integers [T, top_k] for
    a copy of the ids.
    """
    (tokens, experts), columns = logits.shape, top_k + shared
    ids = torch.empty((tokens, columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, columns), dtype=torch.float32, device=logits.device)
    group_size = experts // by.groups
    copy = ids if record is None else record
    if tokens:
        widths = [triton.next_power_of_2(size) for size in (by.groups, group_size, columns)]
        _launch_route(
            (tokens, 1, 1),
            (logits, logits if bias is None else bias, ids, weights, copy),
            (logits.stride(0), copy.stride(0), by.scale),
            (
                *(by.groups, group_size, by.top_groups, by.best_two, top_k, *widths),
                *(by.sigmoid, bias is not None, normalize, record is not None, _TINY, shared),
            ),
            1,
        )
    return ids, weights


def product(
    x: Tensor,
    ids: Tensor,
    held: range,
    weight: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bend: Bend | None = None,
) -> Tensor:
    """Multiply the row of each pair of ``ids`` [T, k] by its expert's weight: [T * k, out].

    ``x``: a row for each token, [T, in], or for each pair. ``weight``: [held, out, in], in FP8 with
    ``scales`` [held, out / 128, in / 128]; ``bias``: [held, out]. With ``bend`` an expert's first outputs are
    a gate's, and the result is ``bend(gate) * others``. Rows of pairs of other experts are undefined.
    """
    (tokens, top_k), (count, outputs, size) = ids.shape, weight.shape
    width = outputs if bend is None else outputs // 2
    out = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    if tokens:
        rows, depth = _ROWS, _DEPTH_BYTES // weight.itemsize
        if scales is not None:
            rows, depth = _QUANTIZED_ROWS, BLOCK
        _launch_product(
            (triton.cdiv(width, _OUTPUTS), count, 1),
            (x, ids, weight, x if scales is None else scales, x if bias is None else bias, out),
            (x.stride(0), tokens),
            (
                *(held.start, top_k, triton.next_power_of_2(top_k), tokens * top_k // len(x), size, width),
                *(-1 if bend is None else BENDS[bend], bias is not None, scales is not None, rows, _OUTPUTS),
                *(depth, _LOOKED_AT),
            ),
            rows // _ROWS_PER_WARP,
        )
    return out


def combine(
    y: Tensor,
    ids: Tensor,
    held: range,
    weights: Tensor,
    addend: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Return sums [T, size] of float32 ``weights`` [T, k] times the rows of ``y`` [pairs, size].

    Pairs of experts that are not ``held`` count in no sum. ``addend``: [T, size], elements of a row
    contiguous, added to the rounded sum; or None. ``places``: int64 [T, k], the row of each pair; None: the
    pair's number.
    """
    (tokens, top_k), size = ids.shape, y.shape[1]
    out = torch.empty((tokens, size), dtype=y.dtype, device=y.device)
    shared = out if addend is None else addend
    if tokens:
        _launch_combine(
            (tokens, triton.cdiv(size, _SUMMED), 1),
            (y, ids, ids if places is None else places, weights, shared, out),
            (y.stride(0), shared.stride(0)),
            (top_k, size, _SUMMED, addend is not None, places is not None, held.start, len(held)),
            4,
        )
    return out
