"""From logits to tokens and log-probabilities, on the step's device.

Invariants:
- A row's result depends on that row alone: not on its neighbours, on S, or on where chunks are cut. On the
  CPU this holds bit for bit; an accelerator's library may choose its reduction by shape.
- A token of probability 0 is never returned, whatever the noise: the target is kept below the total of the
  very cumulative sum that is searched.
- A row that is not finite (NaN, +inf, or nothing but -inf; overflow of a scaled logit counts as +inf) yields
  token -1 and NaN, and disturbs no other row.
- Large temporaries are allocated once, and their size is bounded whatever S is.

Definitions, in the order of the operations:
- logits / temperature (greedy rows unscaled), then log-softmax over the vocabulary in float32: the *logprob*;
- *top-k* keeps the k largest of those logits, of equal ones the ones of lower index;
- *top-p* keeps, of what top-k left and renormalised, the shortest prefix in descending order whose
  probabilities reach top_p: at least one token;
- *min-p* drops, of what is left, tokens less likely than min_p times the likeliest;
- one uniform per row, and the inverse of the cumulative distribution: of filtered rows in descending order,
  of the others in the order of the indices;
- a *given* token takes the place of the one that is drawn, or of the greedy one; the log-probability of one
  that could not have been sampled is -inf under the sampling distribution.

The cumulative sum has two levels, blocks of 256 and the entries of one block: a scan of the vocabulary in
order neither vectorises nor parallelises within a row.

``kernels/sampler.py`` computes this on the CPU, ``kernels/triton_sampler.py`` on CUDA, and torch below where
there is neither.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels import TORCH, TRITON, best
from ..kernels.native import LogitEdits, Sampling
from ..kernels.sampler import RowSampler
from ..layers.logits_processor import SharedLogits
from .forward import FurtherLogprobs, SamplingBatch

if TYPE_CHECKING:
    from ..kernels.triton_sampler import TritonSampler

_BLOCK = 256
_CHUNK_BYTES_CPU = 5 << 20
"""Bytes of a workspace, which should stay in the last-level cache."""
_CHUNK_BYTES = 64 << 20
_SHORTLISTS = (64, 1024)
"""Numbers of best tokens that are looked at before the whole row is sorted."""
_SORTED = 4 << 20
"""Tokens that are put in order at a time on accelerators, of some 64 bytes each."""

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def noise_stream(seed: npt.ArrayLike, sample_index: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return the streams of noise that seeds and sample indices choose, as an array."""
    first = splitmix64(np.atleast_1d(np.asarray(seed, np.uint64)), np.zeros(1, np.int64))
    return splitmix64(first, np.atleast_1d(np.asarray(sample_index, np.int64)))


def noise(streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return uniforms [S] in [0, 1), a pure function of (seed, sample index, absolute position).

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the n-th output is a mix of seed + n * gamma. Seed and
    sample index choose one of :func:`noise_stream`; the position is the counter in it. The upper 53 bits make
    the double.
    """
    return (splitmix64(streams, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(state: npt.NDArray[np.uint64], counter: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    z: npt.NDArray[np.uint64] = state + (counter.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """One sampled token per row, on the device, [S] each; -1 and NaN where the logits were not finite."""

    token_ids: Tensor
    """int64"""
    logprobs: Tensor
    """float32: log-softmax over the full vocabulary, after temperature."""
    raw_logprobs: Tensor | None
    """float32: log-softmax of the logits as given, or None when not wanted."""
    sampled_logprobs: Tensor | None
    """float32: in the filtered, renormalised distribution; 0 for greedy rows. None when not wanted."""
    last_kept: Tensor | None = None
    """int64: last token in descending order that the filters keep, or None if not known.

    It is the token itself in greedy rows, and -1 where all are kept.
    """
    further: FurtherLogprobs | None = None
    inputs: FurtherLogprobs | None = None
    hidden: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, device: torch.device, batch: SamplingBatch) -> "SamplerOutput":
        values = torch.empty((3, rows), device=device)
        return cls(
            token_ids=torch.empty(rows, dtype=torch.int64, device=device),
            logprobs=values[0],
            raw_logprobs=values[1] if batch.want_raw else None,
            sampled_logprobs=values[2] if batch.want_sampled else None,
            last_kept=torch.empty(rows, dtype=torch.int64, device=device) if batch.want_last_kept else None,
        )


SamplingArguments = Callable[[Tensor, SamplingBatch], tuple[SamplerOutput, Sampling]]
"""Returns memory for the results of logits [S, V], and the compiled sampler's arguments."""


@dataclass(slots=True)
class _Probabilities:
    """A chunk's c rows; the first two are views of the workspaces [c, W], W being the padded vocabulary."""

    scaled: Tensor
    """float32; -inf behind the vocabulary."""
    probs: Tensor
    """float32 softmax of ``scaled``. It sums to 1 only nearly: divide by ``total``."""
    block_max: Tensor
    """float32 [c, W / 256]: the largest of ``scaled`` in each block."""
    cumulative: Tensor
    """float64 [c, W / 256]: running sums of ``probs`` by block."""
    best: Tensor
    """int64 [c]: the lowest index of the largest scaled logit."""
    finite: Tensor
    """bool [c]"""

    @property
    def total(self) -> Tensor:
        """float64 [c]: sums of ``probs``."""
        return self.cumulative[:, -1]

    def logprob(self, tokens: Tensor) -> Tensor:
        """Return float64 [c], relative to the best token, as probabilities may underflow."""
        distance = _at(self.scaled, tokens).double() - _at(self.scaled, self.best).double()
        return distance + torch.log(_at(self.probs, self.best).double() / self.total)


class Sampler:
    """Samples one token per row of logits [.., ``vocab_size``], of ``dtype`` on ``device``.

    ``max_rows``: S of the largest usual step, up to which workspaces are sized; more rows go in chunks.
    ``in_torch``: use torch, whatever kernels there are.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        in_torch: bool = False,
    ) -> None:
        device = torch.device(device)
        self._vocab_size = vocab_size
        self.dtype = dtype
        self._num_blocks = -(-vocab_size // _BLOCK)
        width = self._num_blocks * _BLOCK
        bound = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES
        self._chunk_rows = max(1, min(max_rows, bound // (width * 4)))
        serving = TORCH if in_torch else best("sampler", device, dtype)
        self.compiled = RowSampler(vocab_size) if serving not in (TORCH, TRITON) else None
        self._triton: TritonSampler | None = None
        self._in_torch: Sampler | None = None
        if serving == TRITON:
            kernels = import_module("..kernels.triton_sampler", __package__)
            if vocab_size <= kernels.LARGEST_VOCABULARY:
                self._triton = kernels.TritonSampler(vocab_size, max_rows, device)
        held = self._chunk_rows if self.compiled is None and self._triton is None else 0
        # Filled: the pages are touched now instead of in the first step, and the padding stays -inf.
        self._scaled = torch.full((held, width), -torch.inf, device=device)
        self._probs = torch.zeros((held, width), device=device)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor | SharedLogits, batch: SamplingBatch, edits: LogitEdits | None = None
    ) -> SamplerOutput:
        """Sample every row of ``logits`` [S, V]; the host waits for nothing that a device computes.

        ``edits`` are for the compiled sampler.
        """
        if isinstance(logits, SharedLogits):
            return self._sample_share(logits, batch)
        if logits.shape[1:] != (self._vocab_size,) or logits.dtype != self.dtype:
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}, "
                f"expected {self.dtype} [S, {self._vocab_size}]"
            )
        if self._triton is not None:
            out = self._sample_triton(self._triton, logits, batch)
            return out if batch.given is None else self._with_given(logits, batch, batch.given, out)
        if self.compiled is not None:
            out, arguments = self.arguments(logits, batch, edits)
            self.compiled.sample(arguments, self.dtype)
            return out
        rows = logits.shape[0]
        out = SamplerOutput.empty(rows, logits.device, batch)
        plan = _FilterPlan.of(batch, self._vocab_size) if batch.any_filtered else None
        for start in range(0, rows, self._chunk_rows):
            chunk = slice(start, min(rows, start + self._chunk_rows))
            self._sample_chunk(logits, batch, plan, chunk, out)
        return out

    def _sample_share(self, logits: SharedLogits, batch: SamplingBatch) -> SamplerOutput:
        """Sample this rank's share of the rows; all ranks get the results of all."""
        share, rows = logits.share(), logits.own
        batch = batch.select(torch.arange(rows.start, rows.stop, device=share.device))
        own = self.sample(share, batch) if len(share) else SamplerOutput.empty(0, share.device, batch)
        results = own.token_ids.int(), own.logprobs, own.raw_logprobs, own.sampled_logprobs
        columns = torch.stack([each.view(torch.int32) for each in results if each is not None], 1)
        token_ids, *values = logits.gather(columns).t().contiguous()
        logprobs, *others = (each.view(torch.float32) for each in values)
        return SamplerOutput(
            token_ids=token_ids.long(),
            logprobs=logprobs,
            raw_logprobs=others.pop(0) if batch.want_raw else None,
            sampled_logprobs=others.pop(0) if batch.want_sampled else None,
        )

    def arguments(
        self, logits: Tensor, batch: SamplingBatch, edits: LogitEdits | None = None
    ) -> tuple[SamplerOutput, Sampling]:
        """Return memory for results, and the compiled sampler's arguments; both must outlive its call."""
        assert self.compiled is not None
        out = SamplerOutput.empty(logits.shape[0], logits.device, batch)
        filtered = batch.any_filtered
        return out, self.compiled.arguments(
            logits,
            batch.temperature if batch.any_sampled else None,
            batch.greedy,
            batch.uniforms,
            out.token_ids,
            out.logprobs,
            out.raw_logprobs,
            out.sampled_logprobs,
            top_k=batch.top_k if filtered else None,
            top_p=batch.top_p if filtered else None,
            min_p=batch.min_p if filtered else None,
            last_kept=out.last_kept,
            given=batch.given,
            edits=edits,
        )

    def logprobs_of(self, logits: Tensor, targets: Tensor, known: Tensor | None = None) -> Tensor:
        """Return float32 [S]: the log-softmax of ``logits`` [S, V], ``known`` or not, at ``targets``."""
        if self.compiled is None:
            known = torch.log_softmax(logits.float(), 1) if known is None else known
            return known.gather(1, targets[:, None])[:, 0]
        rows = len(logits)
        found, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        greedy, uniforms = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.float64)
        per_row = None, greedy, uniforms, tokens, found, None
        self.compiled.sample(self.compiled.arguments(logits, *per_row, given=targets), logits.dtype)
        return found

    @property
    def compiles_at_first_use(self) -> bool:
        return self._triton is not None

    def graph_serves(self, batch: SamplingBatch) -> bool:
        """Return True if a graph captured with :meth:`for_graph` gives the results of ``batch``."""
        plain = not (batch.any_filtered or batch.want_raw)
        return batch.special is None and (plain or self._triton is not None)

    def for_graph(self, batch: SamplingBatch) -> SamplingBatch:
        """Return ``batch`` with a graph's options: all that kernels compute anyway."""
        everything = self._triton is not None
        return replace(
            batch,
            any_sampled=True,
            any_filtered=everything,
            want_raw=everything,
            want_sampled=True,
            given=None,
        )

    @staticmethod
    def _sample_triton(sampler: "TritonSampler", logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        rows = logits.shape[0]
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        # Each begins at a multiple of 16 bytes: otherwise there would be other variants of the kernels to
        # compile.
        logprobs, raw, sampled = torch.empty((3, -(-rows // 4) * 4), device=logits.device)[:, :rows]
        sampler.sample(logits, batch, tokens, logprobs, raw, sampled)
        return SamplerOutput(
            token_ids=tokens,
            logprobs=logprobs,
            raw_logprobs=raw if batch.want_raw else None,
            sampled_logprobs=sampled if batch.want_sampled else None,
        )

    def _with_given(
        self, logits: Tensor, batch: SamplingBatch, given: Tensor, out: SamplerOutput
    ) -> SamplerOutput:
        """Take the results of rows with a ``given`` token from torch."""
        if self._in_torch is None:
            rows, device = self._chunk_rows, logits.device
            self._in_torch = Sampler(self._vocab_size, rows, device, self.dtype, in_torch=True)
        found = self._in_torch.sample(logits, batch)
        for name in ("token_ids", "logprobs", "raw_logprobs", "sampled_logprobs"):
            if (mine := getattr(out, name)) is not None:
                setattr(out, name, torch.where(given >= 0, getattr(found, name), mine))
        return out

    def _sample_chunk(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        plan: "_FilterPlan | None",
        chunk: slice,
        out: SamplerOutput,
    ) -> None:
        chunk_logits, greedy = logits[chunk], batch.greedy[chunk]
        rows = self._softmax(chunk_logits, batch.temperature[chunk] if batch.any_sampled else None)
        tokens = rows.best
        if batch.any_sampled:
            tokens = torch.where(greedy, tokens, _draw(rows, batch.uniforms[chunk]))
        kept_mass = rows.total.clone()
        wanted = out.last_kept is not None or batch.given is not None
        last_kept = torch.where(greedy, tokens, -1) if wanted else None
        if plan is not None:
            plan.draw(rows, chunk.start, tokens, kept_mass, last_kept)
        is_kept = None
        if batch.given is not None and last_kept is not None:
            given = batch.given[chunk]
            tokens = torch.where(given >= 0, given, tokens)
            value, border = _at(rows.scaled, tokens), _at(rows.scaled, last_kept.clamp_min(0))
            is_kept = (value > border) | ((value == border) & (tokens <= last_kept)) | (last_kept < 0)

        logprobs = rows.logprob(tokens)
        out.token_ids[chunk] = tokens.where(rows.finite, -1)
        out.logprobs[chunk] = logprobs.where(rows.finite, torch.nan)
        if out.last_kept is not None and last_kept is not None:
            out.last_kept[chunk] = last_kept.where(rows.finite, -1)
        if out.sampled_logprobs is not None:
            sampled = torch.where(greedy, 0.0, logprobs + torch.log(rows.total / kept_mass))
            if is_kept is not None:
                sampled = sampled.where(is_kept, -torch.inf)
            out.sampled_logprobs[chunk] = sampled.where(rows.finite, torch.nan)
        if out.raw_logprobs is not None:
            if batch.any_sampled:  # overwrites the workspaces, hence last
                finite, best = rows.finite, rows.best
                rows = self._softmax(chunk_logits, None)
                rows.finite, rows.best = finite, best
                logprobs = rows.logprob(tokens)
            out.raw_logprobs[chunk] = logprobs.where(rows.finite, torch.nan)

    def _softmax(self, logits: Tensor, temperature: Tensor | None) -> _Probabilities:
        count = logits.shape[0]
        scaled, probs = self._scaled[:count], self._probs[:count]
        vocabulary = scaled[:, : self._vocab_size]
        vocabulary.copy_(logits)
        if temperature is not None:
            vocabulary.div_(temperature[:, None])
        blocks = (count, self._num_blocks, _BLOCK)
        block_max = scaled.view(blocks).amax(-1)  # NaN wins
        best_block = block_max.argmax(-1)
        in_block = _block(scaled, best_block).argmax(-1)
        torch.softmax(scaled, -1, out=probs)
        return _Probabilities(
            scaled=scaled,
            probs=probs,
            block_max=block_max,
            cumulative=probs.view(blocks).sum(-1).cumsum(-1, dtype=torch.float64),
            best=best_block * _BLOCK + in_block,
            finite=block_max.amax(-1).isfinite(),
        )


def _draw(rows: _Probabilities, uniforms: Tensor) -> Tensor:
    """Return int64 [c]: a two-level inverse CDF. Rows that are not finite give any valid index."""
    target = _below(uniforms, rows.total)
    block = _search(rows.cumulative, target)
    below = _at(rows.cumulative, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    inner = _block(rows.probs, block).cumsum(-1, dtype=torch.float64)
    # The block's float32 sum differs from the inner total in its last bits; a fraction of one serves the
    # other.
    fraction = (target - below) / (_at(rows.cumulative, block) - below)
    return block * _BLOCK + _search(inner, _below(fraction, inner[:, -1]))


@dataclass(slots=True)
class _FilterPlan:
    filtered: Tensor
    """bool [S]"""
    shortlists: dict[int, list[int]] | None
    """Rows by the length to begin with, if values may be read; None for all rows at once, of ``length``."""
    length: int
    batch: SamplingBatch
    vocab_size: int

    @classmethod
    def of(cls, batch: SamplingBatch, vocab_size: int) -> "_FilterPlan":
        filtered = _filtered(batch, vocab_size)
        length = _shortlist(batch.largest_top_k or vocab_size, vocab_size)
        if not reading_is_free(filtered.device):
            return cls(filtered, None, length, batch, vocab_size)
        shortlists = defaultdict(list)
        for row, (is_filtered, top_k) in enumerate(zip(filtered.tolist(), batch.top_k.tolist())):
            if is_filtered:
                # Top-p and min-p mostly need few tokens, too; whether they were enough is seen afterwards.
                needed = top_k if top_k < vocab_size else 1
                shortlists[_shortlist(needed, vocab_size)].append(row)
        return cls(filtered, dict(shortlists), length, batch, vocab_size)

    def draw(
        self, rows: _Probabilities, start: int, tokens: Tensor, kept_mass: Tensor, last_kept: Tensor | None
    ) -> None:
        """Redraw the filtered rows of the chunk that begins at row ``start`` of the batch.

        Filtered rows are overwritten: int64 ``tokens``, float64 ``kept_mass`` (in units of ``rows.total``),
        int64 ``last_kept``, in descending order, each [c].
        """
        if self.shortlists is None:
            bound = max(1, _SORTED // self.length)
            for part in torch.arange(len(tokens), device=tokens.device).split(bound):
                self._draw_from(rows, start, part, self.length, tokens, kept_mass, last_kept)
            return
        for first_length, members in self.shortlists.items():
            length = first_length
            local = [row - start for row in members if start <= row < start + len(tokens)]
            index = torch.tensor(local, dtype=torch.int64)
            while index.numel():
                missing = self._draw_from(rows, start, index, length, tokens, kept_mass, last_kept)
                index = index[missing] if length < self.vocab_size else index[:0]
                length = _shortlist(length + 1, self.vocab_size)

    def _draw_from(
        self,
        rows: _Probabilities,
        start: int,
        index: Tensor,
        length: int,
        tokens: Tensor,
        kept_mass: Tensor,
        last_kept: Tensor | None,
    ) -> Tensor:
        """Redraw rows ``index`` [f] from ``length`` best tokens; return those that need more, bool [f]."""
        batch, given = self.batch, index + start
        order = _descending(rows, index, length, self.vocab_size)
        probs = rows.probs[index[:, None], order].double()
        cumulative = probs.cumsum(1)
        top_k, top_p = batch.top_k[given].clamp(min=1), batch.top_p[given].double()
        within_k = _at(cumulative, (top_k - 1).clamp(max=length - 1))
        threshold = top_p * torch.where(top_k < self.vocab_size, within_k, rows.total[index])

        before = torch.cat([torch.zeros_like(probs[:, :1]), cumulative[:, :-1]], 1)
        # top_p <= 1 puts the threshold at or below the sum of the k best, so this enforces top-k, too.
        last = ((before < threshold[:, None]).sum(1) - 1).clamp(min=0)
        missing = cumulative[:, -1] < threshold
        if batch.min_p is not None:
            likely = probs >= batch.min_p[given].double()[:, None] * probs[:, :1]
            last = torch.minimum(last, (likely.sum(1) - 1).clamp(min=0))
            missing &= likely[:, -1]
        mass = _at(cumulative, last)
        # Beyond the kept prefix the sum exceeds its mass, so the search ends within it.
        drawn = torch.minimum(_search(cumulative, _below(batch.uniforms[given], mass)), last)
        filtered = self.filtered[given]
        tokens[index] = torch.where(filtered, _at(order, drawn), tokens[index])
        kept_mass[index] = torch.where(filtered, mass, kept_mass[index])
        if last_kept is not None:
            last_kept[index] = torch.where(filtered, _at(order, last), last_kept[index])
        return missing


def reading_is_free(device: torch.device) -> bool:
    return device.type == "cpu"


def _filtered(batch: SamplingBatch, vocab_size: int) -> Tensor:
    filtered = (batch.top_k < vocab_size) | (batch.top_p < 1.0)
    if batch.min_p is not None:
        filtered |= batch.min_p > 0.0
    return filtered & ~batch.greedy


def _shortlist(needed: int, vocab_size: int) -> int:
    return min(next((n for n in _SHORTLISTS if needed <= n), vocab_size), vocab_size)


def _descending(rows: _Probabilities, index: Tensor, length: int, vocab_size: int) -> Tensor:
    """Return the ``length`` best tokens of rows ``index`` [f], in order; of equal ones the lower first.

    The n best of a row lie in its n blocks with the largest maxima, so a short list needs no whole row.
    """
    if length == vocab_size:
        scaled = rows.scaled[:, :vocab_size].index_select(0, index)
        return scaled.sort(dim=1, descending=True, stable=True).indices
    num_blocks = rows.block_max.shape[1]
    if 2 * length > num_blocks:
        return _best(rows.scaled[:, :vocab_size].index_select(0, index), length)
    block_max = rows.block_max.index_select(0, index)
    blocks = block_max.sort(dim=1, descending=True, stable=True).indices[:, :length].sort(dim=1).values
    candidates = rows.scaled.view(-1, num_blocks, _BLOCK)[index[:, None], blocks].flatten(1)
    best = _best(candidates, length)
    return blocks.gather(1, best // _BLOCK) * _BLOCK + best % _BLOCK


def _best(values: Tensor, length: int) -> Tensor:
    """Return indices of the ``length`` largest of each row, in order; of equal ones the lower index first.

    torch.topk leaves that open, so it gets distinct integers: the value's bits, in its order, then the index.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: a zero has no sign
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    behind = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return (ordered + behind).topk(length, 1).indices


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(1, index[:, None]).squeeze(1)


def _block(values: Tensor, block: Tensor) -> Tensor:
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)
    return values.gather(1, columns)


def _below(fraction: Tensor, total: Tensor) -> Tensor:
    """Return ``fraction * total``, or less where that rounds up to ``total``."""
    return torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))


def _search(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds ``target`` [c]; the last one if none does (NaN)."""
    found = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return found.clamp(max=cumulative.shape[1] - 1)
