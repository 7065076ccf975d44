"""Sampling in Triton, filtered or not, in two launches; definitions are those of ``execution/sampler.py``.

Invariants:
- Every decision is the device's: a launch depends on the number of rows and on nothing else of a step, so
  that a graph can hold it. There is one variant of each kernel per dtype of the logits.
- A row's result depends on that row alone, bit for bit: the division of its work depends on the vocabulary
  only.
- Probabilities are integers, the weight of a token being exp(scaled logit - best) in units of 2**-44: their
  sums do not depend on an order, so the passes of a search fit together, and a token of weight 0 is never
  returned.
- Filtered rows are drawn in descending order of their logits, the lower index first among equals, and the
  others in the order of the indices, as the other implementations do: one uniform means the same token
  everywhere, except where it falls within rounding of the border between two tokens.

``_measure`` reads the logits once, many programs to a row, and leaves the best and the sum of each block of
256. ``_draw`` has one program per row. Without a filter it searches the blocks' sums and then one block. With
one, the kept tokens are a prefix of the descending order, and so are the tokens up to the drawn one: each is
found by a search over the bits of the logit, of which every pass narrows the range to a quarter. Those passes
run over candidates, the tokens so close to the best that they must include the kept ones; blocks without any
are not read. With more candidates than :data:`_CANDIDATES`, the passes run over the logits.

Imported only where Triton is installed. Tested in Triton's interpreter and compiled for sm_90, not run on a
GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

if TYPE_CHECKING:
    from ..execution.forward import SamplingBatch

_BLOCK = 256
_GROUP = 16
"""Blocks that a program of ``_measure`` reads, and that a pass over the logits reads at a time."""
_TILE = 1024
_CANDIDATES = 8192
_WARPS = 8
LARGEST_VOCABULARY = 1 << 18
"""Largest vocabulary: the sum of as many weights is an int64."""

_UNIT = tl.constexpr(2.0**44)
_FIRST_DISTANCE = tl.constexpr(2.0)
"""First distance below the best for candidates, doubled at each try: a probability of 0.14 of the best's."""
_TRIES = tl.constexpr(5)
"""Tries to come back from a distance with more candidates than there is room for."""
_WEIGHTLESS = tl.constexpr(64.0)
"""Distance below the best at which weights are 0, and every token is a candidate."""


@triton.jit
def _weight(distance):
    """Return the weight of a token that lies ``distance`` (<= 0) above the best."""
    return (tl.exp(distance) * _UNIT).to(tl.int64)


@triton.jit
def _key(value):
    """Return an integer in the order of the float, equal for both zeros."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(
    values, listed, at, count, vocab_size, temperature,
    of_logits: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Load values ``at`` places of a source, ``count`` candidates or the logits of ``listed`` blocks."""
    inside = at < count
    index = at
    if of_logits:
        index = tl.load(listed + at // width, mask=inside, other=0) * width + at % width
        inside = inside & (index < vocab_size)
    found = tl.load(values + index, mask=inside, other=float("-inf")).to(tl.float32)
    if of_logits:
        found = tl.div_rn(found, temperature)
    return found, index, inside


@triton.jit
def _above(
    values, listed, count, vocab_size, temperature, best, low,
    of_logits: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Return the number of values that are ``low`` or more, and their weights' sum."""
    number = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    for start in range(0, count, tile):
        at = start + tl.arange(0, tile)
        value, _, inside = _load(values, listed, at, count, vocab_size, temperature, of_logits, width)
        inside = inside & (value >= low)
        number += tl.sum(inside.to(tl.int64), 0)
        mass += tl.sum(tl.where(inside, _weight(value - best), 0), 0)
    return number, mass


@triton.jit
def _search(
    values, listed, count, vocab_size, temperature, best, lowest, target,
    weighted: tl.constexpr, of_logits: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Find the last key of the shortest descending prefix that reaches ``target``, and the sum.

    Equal values go together. ``lowest``: a value whose prefix reaches it; ``target``: of weights or tokens.
    """
    low, high = _key(lowest), _key(best)
    above = tl.zeros([], tl.int64)
    while low < high:
        quarter = low + (high - low + 3) // 4
        half = low + (high - low + 1) // 2
        most = low + (3 * (high - low) + 3) // 4
        of_quarter = tl.zeros([], tl.int64)
        of_half = tl.zeros([], tl.int64)
        of_most = tl.zeros([], tl.int64)
        for start in range(0, count, tile):
            at = start + tl.arange(0, tile)
            value, _, inside = _load(values, listed, at, count, vocab_size, temperature, of_logits, width)
            key = _key(value)
            if weighted:
                part = _weight(value - best)
            else:
                part = inside.to(tl.int64)
            of_quarter += tl.sum(tl.where(key >= quarter, part, 0), 0)
            of_half += tl.sum(tl.where(key >= half, part, 0), 0)
            of_most += tl.sum(tl.where(key >= most, part, 0), 0)
        if of_most >= target:
            low = most
        elif of_half >= target:
            low, high, above = half, most - 1, of_most
        elif of_quarter >= target:
            low, high, above = quarter, half - 1, of_half
        else:
            high, above = quarter - 1, of_quarter
    return low, above


@triton.jit
def _equal_number(
    values, indices, listed, count, vocab_size, temperature, wanted, rank,
    of_logits: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Return the index of value number ``rank`` (from 0) among those equal to ``wanted``."""
    found = tl.full([], -1, tl.int32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, count, tile):
        if found < 0:
            at = start + tl.arange(0, tile)
            value, index, inside = _load(values, listed, at, count, vocab_size, temperature, of_logits, width)
            equal = (inside & (value == wanted)).to(tl.int32)
            number = seen + tl.cumsum(equal, 0) - 1
            if not of_logits:
                index = tl.load(indices + at, mask=inside, other=-1)
            found = tl.max(tl.where((equal == 1) & (number == rank), index, -1), 0)
            seen += tl.sum(equal, 0)
    return found


@triton.jit
def _list(listed, block, block_best, blocks, low):
    """Name the blocks that have a value of ``low`` or more, in their order; return their number."""
    has = (block < blocks) & (block_best >= low)
    to = tl.cumsum(has.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads have read the list before, and will read this one
    tl.store(listed + to, block, mask=has)
    tl.debug_barrier()
    return tl.sum(has.to(tl.int32), 0)


@triton.jit
def _gather(
    logits, listed, count, vocab_size, temperature, low, values, indices,
    width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Write the scaled logits of ``low`` or more, and their indices, in the order of these."""
    written = tl.zeros([], tl.int32)
    for start in range(0, count, tile):
        at = start + tl.arange(0, tile)
        value, index, inside = _load(logits, listed, at, count, vocab_size, temperature, True, width)
        inside = inside & (value >= low)
        to = written + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(values + to, value, mask=inside)
        tl.store(indices + to, index, mask=inside)
        written += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()  # other threads read what these have written
    return written


@triton.jit
def _solve(
    values, indices, listed, count, temperature, best, lowest, total, vocab_size, top_k, top_p, min_p,
    uniform,
    of_logits: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Draw a token among a source's values from ``lowest``; return its index, and the kept weight."""
    number, mass = _above(
        values, listed, count, vocab_size, temperature, best, lowest, of_logits, width, tile
    )  # fmt: skip
    kept = mass
    basis = total
    if top_k < vocab_size:
        wanted = tl.minimum(tl.maximum(top_k, 1), number)
        key, above = _search(
            values, listed, count, vocab_size, temperature, best, lowest, wanted, False, of_logits, width,
            tile
        )  # fmt: skip
        last = _value(key)
        found, kept = _above(
            values, listed, count, vocab_size, temperature, best, last, of_logits, width, tile
        )  # fmt: skip
        kept -= (found - wanted) * _weight(last - best)  # equal values that are too many
        basis = kept
    if top_p < 1:
        exact = top_p.to(tl.float64) * basis.to(tl.float64)
        threshold = exact.to(tl.int64)
        threshold += (threshold.to(tl.float64) < exact).to(tl.int64)
        threshold = tl.minimum(tl.maximum(threshold, 1), mass)
        key, above = _search(
            values, listed, count, vocab_size, temperature, best, lowest, threshold, True, of_logits, width,
            tile
        )  # fmt: skip
        each = tl.maximum(_weight(_value(key) - best), 1)
        kept = tl.minimum(kept, above + (threshold - above + each - 1) // each * each)
    if min_p > 0:
        likely = tl.zeros([], tl.int64)
        for start in range(0, count, tile):
            at = start + tl.arange(0, tile)
            value, _, inside = _load(values, listed, at, count, vocab_size, temperature, of_logits, width)
            enough = inside & (tl.exp(value - best) >= min_p)
            likely += tl.sum(tl.where(enough, _weight(value - best), 0), 0)
        kept = tl.minimum(kept, tl.maximum(likely, 1))
    target = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key, above = _search(
        values, listed, count, vocab_size, temperature, best, lowest, target + 1, True, of_logits, width, tile
    )  # fmt: skip
    drawn = _value(key)
    rank = (target - above) // tl.maximum(_weight(drawn - best), 1)
    token = _equal_number(
        values, indices, listed, count, vocab_size, temperature, drawn, rank, of_logits, width, tile
    )  # fmt: skip
    return token, kept


@triton.jit
def _draw_filtered(
    logits, temperature, block, block_best, block_weights, blocks, best, total, vocab_size,
    top_k, top_p, min_p, uniform, listed, values, indices,
    capacity: tl.constexpr, group: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    needed = top_p.to(tl.float64) * total.to(tl.float64)
    too_near = tl.zeros([], tl.float32)
    distance = _FIRST_DISTANCE + too_near
    enough = tl.zeros([], tl.int32)
    number = tl.zeros([], tl.int64)
    lowest = best - distance
    count = tl.zeros([], tl.int32)
    while enough == 0:
        lowest = tl.where(distance < _WEIGHTLESS, best - distance, float("-inf"))
        # The blocks that have such tokens have no fewer of them than this, and no more weight: often that is
        # not enough.
        has = (block < blocks) & (block_best >= lowest)
        number = tl.sum(tl.where(has, width, 0).to(tl.int64), 0)
        mass = tl.sum(tl.where(has, block_weights, 0), 0)
        enough = _is_enough(number, mass, distance, needed, vocab_size, top_k, top_p, min_p)
        if enough == 1:
            count = _list(listed, block, block_best, blocks, lowest) * width
            number, mass = _above(
                logits, listed, count, vocab_size, temperature, best, lowest, True, width, group * width
            )  # fmt: skip
            enough = _is_enough(number, mass, distance, needed, vocab_size, top_k, top_p, min_p)
        if enough == 0:
            too_near = distance
            distance *= 2
    # Twice as far may be too far, and a pass here costs less than all the later ones over the logits.
    tries = tl.zeros([], tl.int32)
    while (number > capacity) & (tries < _TRIES):
        middle = (too_near + distance) / 2
        fewer, mass = _above(
            logits, listed, count, vocab_size, temperature, best, best - middle, True, width, group * width
        )  # fmt: skip
        if _is_enough(fewer, mass, middle, needed, vocab_size, top_k, top_p, min_p) == 1:
            number, distance, lowest = fewer, middle, best - middle
        else:
            too_near = middle
        tries += 1
    if number <= capacity:
        gathered = _gather(
            logits, listed, count, vocab_size, temperature, lowest, values, indices, width, group * width
        )  # fmt: skip
        token, kept = _solve(
            values, indices, listed, gathered, temperature, best, lowest, total,
            vocab_size, top_k, top_p, min_p, uniform, False, width, tile,
        )  # fmt: skip
    else:
        token, kept = _solve(
            logits, indices, listed, count, temperature, best, lowest, total,
            vocab_size, top_k, top_p, min_p, uniform, True, width, group * width,
        )  # fmt: skip
    return token, kept


@triton.jit
def _is_enough(number, mass, distance, needed, vocab_size, top_k, top_p, min_p):
    by_min_p = tl.exp(-distance) < min_p
    by_rank = tl.where(top_k < vocab_size, number >= top_k, (top_p < 1) & (mass.to(tl.float64) >= needed))
    # Top-p's share is that of what top-k left, which must be known whole.
    everything = distance >= _WEIGHTLESS
    return (everything | by_rank | (by_min_p & (top_p >= 1))).to(tl.int32)


@triton.jit
def _measure(
    logits, temperature, greedy, maxima, sums, raw_maxima, raw_sums, row_stride, vocab_size, blocks,
    group: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the largest of each block, +inf if it holds a NaN, and its sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * group + tl.arange(0, group)
    at = block[:, None] * width + tl.arange(0, width)[None, :]
    raw = tl.load(logits + row * row_stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    divisor = tl.where(tl.load(greedy + row) != 0, 1.0, tl.load(temperature + row))
    best, total = _of_blocks(raw)
    tl.store(raw_maxima + row * blocks + block, best, mask=block < blocks)
    tl.store(raw_sums + row * blocks + block, total, mask=block < blocks)
    if divisor != 1:  # else both are the same
        best, total = _of_blocks(tl.div_rn(raw, divisor))
    tl.store(maxima + row * blocks + block, best, mask=block < blocks)
    tl.store(sums + row * blocks + block, total, mask=block < blocks)


@triton.jit
def _of_blocks(values):
    best = tl.max(tl.where(values != values, float("inf"), values), 1)
    base = tl.where(best == float("-inf"), 0.0, best)
    return best, tl.sum(tl.exp(values - base[:, None]), 1)


@triton.jit
def _draw_unfiltered(
    logits, divisor, is_greedy, block, block_best, weights, best, total, vocab_size, uniform,
    num_blocks: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Draw a token of one row, or take the best: its block by the blocks' weights, then the token in it."""
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    drawn = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    chosen = tl.where(is_greedy, tl.min(tl.where(block_best == best, block, num_blocks), 0), drawn)
    before = tl.sum(tl.where(block < chosen, weights, 0), 0)
    inside = tl.maximum(tl.sum(tl.where(block == chosen, weights, 0), 0), 1)
    column = tl.arange(0, width)
    at = chosen * width + column
    value = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    value = tl.div_rn(value, divisor)
    # Relative to the block's own best: however small its share is, some token of it has a weight.
    weight = _weight(value - tl.max(value, 0))
    of_block = tl.sum(weight, 0)
    # The sum of the block was rounded elsewhere; a fraction of one serves the other.
    fraction = (target - before).to(tl.float64) / inside.to(tl.float64)
    target = tl.minimum((fraction * of_block.to(tl.float64)).to(tl.int64), of_block - 1)
    drawn = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    lowest = tl.min(tl.where(value == best, column, width), 0)
    return chosen * width + tl.where(is_greedy, lowest, drawn)


@triton.jit
def _draw(
    logits, temperature, greedy, uniforms, top_k, top_p, min_p,
    maxima, sums, raw_maxima, raw_sums, listed, candidates, candidate_indices,
    token_ids, logprobs, raw_logprobs, sampled_logprobs, row_stride, vocab_size, blocks,
    num_blocks: tl.constexpr, capacity: tl.constexpr, group: tl.constexpr, width: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Sample one row from the results of :func:`_measure`; ``num_blocks`` is ``blocks``, padded."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    maxima += row * blocks
    block = tl.arange(0, num_blocks)
    is_greedy = tl.load(greedy + row) != 0
    divisor = tl.where(is_greedy, 1.0, tl.load(temperature + row))
    block_best = tl.load(maxima + block, mask=block < blocks, other=float("-inf"))
    block_sum = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    best = tl.max(block_best, 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    weights = tl.where(finite, block_sum * tl.exp(block_best - best) * _UNIT, 0.0).to(tl.int64)
    total = tl.sum(weights, 0)
    kept = total

    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    uniform = tl.load(uniforms + row)
    if finite & (is_greedy == 0) & ((k < vocab_size) | (p < 1) | (m > 0)):
        token, kept = _draw_filtered(
            logits, divisor, block, block_best, weights, blocks, best, total, vocab_size, k, p, m, uniform,
            listed + row * num_blocks, candidates + row * capacity, candidate_indices + row * capacity,
            capacity, group, width, tile,
        )  # fmt: skip
    else:
        token = _draw_unfiltered(
            logits, divisor, is_greedy, block, block_best, weights, best, total, vocab_size, uniform,
            num_blocks, width
        )  # fmt: skip

    token = tl.where(finite, token, 0)
    raw = tl.load(logits + token).to(tl.float32)
    value = tl.div_rn(raw, divisor)
    logprob = (value - best).to(tl.float64) - tl.log(total.to(tl.float64) / _UNIT)
    sampled = logprob + tl.log(total.to(tl.float64) / kept.to(tl.float64))
    raw_best = tl.load(raw_maxima + row * blocks + block, mask=block < blocks, other=float("-inf"))
    raw_sum = tl.load(raw_sums + row * blocks + block, mask=block < blocks, other=0.0)
    most = tl.max(raw_best, 0)
    raw_total = tl.sum((raw_sum * tl.exp(raw_best - most)).to(tl.float64), 0)
    raw_logprob = (raw - most).to(tl.float64) - tl.log(raw_total)
    nothing = float("nan")
    tl.store(token_ids + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(logprobs + row, tl.where(finite, logprob, nothing).to(tl.float32))
    tl.store(raw_logprobs + row, tl.where(finite, raw_logprob, nothing).to(tl.float32))
    tl.store(
        sampled_logprobs + row, tl.where(finite, tl.where(is_greedy, 0.0, sampled), nothing).to(tl.float32)
    )


class TritonSampler:
    """Sampler with a workspace of its own, which never moves."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        """``max_rows``: rows at a time; more go one part after the other."""
        if vocab_size > LARGEST_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocab_size} is more than {LARGEST_VOCABULARY}")
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self._blocks = -(-vocab_size // _BLOCK)
        self._capacity = min(_CANDIDATES, int(triton.next_power_of_2(vocab_size)))
        self._measured = torch.empty((4, max_rows, self._blocks), device=device)
        self._candidates = torch.empty((max_rows, self._capacity), device=device)
        padded = int(triton.next_power_of_2(self._blocks))
        self._listed = torch.empty((max_rows, padded), dtype=torch.int32, device=device)
        self._indices = torch.empty((max_rows, self._capacity), dtype=torch.int32, device=device)
        self._no_min_p = torch.zeros(max_rows, device=device)

    def sample(
        self,
        logits: Tensor,
        batch: "SamplingBatch",
        token_ids: Tensor,
        logprobs: Tensor,
        raw_logprobs: Tensor,
        sampled_logprobs: Tensor,
    ) -> None:
        """Sample every row of ``logits`` [S, V], columns contiguous, into the last four."""
        sizes = (logits.stride(0), self._vocab_size, self._blocks)
        constants = {"group": _GROUP, "width": _BLOCK}
        for start in range(0, logits.shape[0], self._max_rows):
            part = slice(start, min(start + self._max_rows, logits.shape[0]))
            rows = part.stop - start
            scaling = logits[part], batch.temperature[part], batch.greedy[part]
            min_p = self._no_min_p[:rows] if batch.min_p is None else batch.min_p[part]
            _measure[(rows, -(-self._blocks // _GROUP))](*scaling, *self._measured, *sizes, **constants)
            _draw[(rows,)](
                *scaling, batch.uniforms[part], batch.top_k[part], batch.top_p[part], min_p,
                *self._measured, self._listed, self._candidates, self._indices,
                token_ids[part], logprobs[part], raw_logprobs[part], sampled_logprobs[part], *sizes,
                num_blocks=self._listed.shape[1], capacity=self._capacity, tile=_TILE,
                **constants, num_warps=_WARPS,
            )  # fmt: skip
