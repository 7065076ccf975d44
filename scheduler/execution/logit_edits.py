"""Rows whose logits are edited before anything is computed from them, or that want more than a token.

Invariants:
- Edits are made in float32, on copies; *raw* log-probabilities are of the unedited logits.
- A counter holds, per token, twice how often it stands in the sample's output, plus one if it stands in the
  prompt. Steps add what they sample on the forward stream, so the next one knows it before the host does.
- The table of counters grows by doubling, 4 bytes per token of the vocabulary for each request with penalties
  that ran at once, and does not shrink.
- What is computed for a row depends on that row alone, and is the same bits by torch and by the compiled
  sampler, which makes penalties, biases and allowed tokens itself if no row has a grammar or a bad word to
  avoid, and no edited row wants log-probabilities of further tokens or a mask.

Definitions, in SGLang's order: frequency and presence penalties are taken off; the repetition penalty divides
positive logits and multiplies negative ones (Keskar et al., CTRL, 2019); biases are added, -inf for what must
not end a sample yet; what is not allowed, and what would complete a bad word, becomes -inf. Then the
sampler's own. Further log-probabilities are of its log-softmax.

A grammar filters as top-k and top-p do, before these: log-probabilities, further ones included, are those
without it, and the sampling distribution is what all filters leave.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...io_struct.generate import MAX_TOP_LOGPROBS
from ..kernels.native import LogitEdits, Sampling
from ..layers.logits_processor import SharedLogits
from .forward import FurtherLogprobs, InputTokens, SamplingBatch, SpecialRows
from .sampler import Sampler, SamplerOutput

_CHUNK_BYTES_CPU = 5 << 20
_CHUNK_BYTES = 64 << 20
"""Bytes of float32 logits that are edited at a time."""
_BLOCK_BYTES_CPU = 10 << 20
_BLOCK_BYTES = 128 << 20
"""Bytes of float32 logits of prompt tokens that exist at a time."""
_LEAST_ROWS = 64
FETCHED_TOP = MAX_TOP_LOGPROBS + 32
"""Likeliest tokens that torch takes wherever any are wanted: as many however many that is, for torch.topk may
choose others among equal ones for another number."""


class TokenCounters:
    """How often each token stands in the prompt and the output of the requests that have penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def begin(self, rows: SpecialRows) -> None:
        """Start the outdated counters anew."""
        missing = rows.num_counters - len(self.table)
        if missing > 0:
            added = max(missing, len(self.table))
            self.table = torch.cat([self.table, self.table.new_zeros((added, self.table.shape[1]))])
        if len(rows.restarted):
            self.table.index_fill_(0, rows.restarted, 0)
            flat = self.table.view(-1)
            flat.index_fill_(0, rows.prompt_at, 1)
            flat.index_add_(0, rows.output_at, torch.full_like(rows.output_at, 2, dtype=torch.int32))

    def penalise(self, logits: Tensor, rows: SpecialRows, part: slice) -> None:
        """Apply the penalties of the rows ``part`` to their ``logits`` [p, V], in place."""
        counts = self.table.index_select(0, rows.counters[part])
        in_output = counts >> 1
        logits -= rows.frequency[part, None] * in_output
        logits -= rows.presence[part, None] * (in_output > 0)
        factor = torch.where(counts > 0, rows.repetition[part, None], 1.0)
        torch.where(logits > 0, logits / factor, logits * factor, out=logits)

    def add(self, rows: SpecialRows, tokens: Tensor) -> None:
        at = rows.counters * self.table.shape[1] + tokens
        self.table.view(-1).index_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))


class SpecialSampler:
    """Samples steps with special rows; the other rows go through the ordinary ``sampler``."""

    def __init__(self, sampler: Sampler, vocab_size: int, device: torch.device) -> None:
        self._ordinary = sampler
        self._vocab_size = vocab_size
        self._device = device
        bound = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES
        self.chunk_rows = max(1, bound // (4 * vocab_size))
        self._counters = TokenCounters(vocab_size, device)
        self.exact: Sampler | None = sampler if sampler.dtype == torch.float32 else None
        self._in_torch: Sampler | None = None

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor | SharedLogits,
        batch: SamplingBatch,
        rows: SpecialRows,
        before: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample from ``logits`` [S, V]; ``before``, int64 [S], are the tokens before, for ``word_ends``."""
        if self.in_one_call(batch) and isinstance(logits, Tensor):
            out = self._ordinary.sample(logits, _asking(batch), self._edits(rows, len(logits)))
            out.further = self.wanted(logits, batch, out)
            return out
        self._counters.begin(rows)
        if len(rows.rows) < len(logits):
            out = self._ordinary.sample(logits, batch)
        else:
            out = SamplerOutput.empty(len(logits), logits.device, batch)
        further: list[FurtherLogprobs] = []
        for start in range(0, len(rows.rows), self.chunk_rows):
            part = slice(start, min(start + self.chunk_rows, len(rows.rows)))
            further += self._sample_part(logits, batch, rows, part, out, before)
        if len(rows.counters):
            tokens = out.token_ids[rows.rows[: len(rows.counters)]]
            self._counters.add(rows, tokens.clamp_min(0))  # -1: the request ends, whatever is counted
        if further:
            out.further = joined(further)
        return out

    def in_one_call(self, batch: SamplingBatch) -> bool:
        """Return True if the compiled sampler makes all edits of ``batch``."""
        serves = batch.special is None or batch.special.in_one_call
        return serves and self._ordinary.compiled is not None

    def arguments(self, logits: Tensor, batch: SamplingBatch) -> tuple[SamplerOutput, Sampling]:
        """Return what :meth:`Sampler.arguments` does, with the edits of a ``batch`` :meth:`in_one_call`."""
        edits = None if batch.special is None else self._edits(batch.special, len(logits))
        return self._ordinary.arguments(logits, _asking(batch), edits)

    def wanted(self, logits: Tensor, batch: SamplingBatch, out: SamplerOutput) -> FurtherLogprobs | None:
        """Return what rows of a ``batch`` :meth:`in_one_call` want beside their tokens, those of ``out``."""
        rows = batch.special
        if rows is None or not len(rows.wants_host):
            return None
        index = rows.rows[rows.wants]
        last_kept = None if out.last_kept is None else out.last_kept[index]
        return self._further(logits, index, batch.temperature[index], rows.top, rows.token_ids, last_kept)

    def _further(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        top: int,
        token_ids: Tensor,
        last_kept: Tensor | None = None,
    ) -> FurtherLogprobs:
        """Return what the compiled sampler finds of ``rows`` of ``logits``."""
        assert self._ordinary.compiled is not None
        top = min(top, self._vocab_size)
        top_ids, best, of_ids, kept = self._ordinary.compiled.further(
            logits, rows, temperature, top, token_ids, last_kept
        )
        return FurtherLogprobs(
            logprobs=torch.empty(0), top_ids=top_ids, top=best, token_ids_logprobs=of_ids, kept=kept
        )

    def _edits(self, rows: SpecialRows, count: int) -> LogitEdits | None:
        """Return the edits of a step of ``count`` rows, if any; its sampling adds to the counters."""
        assert self._ordinary.compiled is not None
        if not rows.edited.any():
            return None
        self._counters.begin(rows)
        places, edited = torch.full((count,), -1), len(rows.rows)
        places[rows.rows] = torch.from_numpy(np.where(rows.edited, np.arange(edited), -1))
        if rows.allowed_ids is not None and rows.restricted is not None:
            allowed = rows.allowed_ids, rows.restricted
        else:
            allowed = rows.rows.new_empty((edited, 0)), torch.zeros(edited, dtype=torch.bool)
        return self._ordinary.compiled.edits(
            places,
            (rows.repetition, rows.frequency, rows.presence),
            rows.counters,
            self._counters.table,
            (rows.bias_ids, rows.bias),
            allowed,
        )

    def warm_up(self, batch: SamplingBatch) -> None:
        """Compile what the first special row would wait for; ``batch`` has one row."""
        if self.exact is None and self._ordinary.compiles_at_first_use:
            passing = Sampler(self._vocab_size, 1, self._device, torch.float32)
            passing.sample(torch.zeros((1, self._vocab_size), device=self._device), batch)

    def _sample_part(
        self,
        logits: Tensor | SharedLogits,
        batch: SamplingBatch,
        rows: SpecialRows,
        part: slice,
        out: SamplerOutput,
        before: Tensor | None,
    ) -> list[FurtherLogprobs]:
        index = rows.rows[part]
        unedited = logits.index_select(0, index)
        edited = unedited.to(torch.float32, copy=out.raw_logprobs is not None)
        self._shift(edited, rows, part)
        if rows.allowed_ids is not None and rows.restricted is not None:
            ids = rows.allowed_ids[part]
            alone = torch.full_like(edited, -torch.inf).scatter_(1, ids, edited.gather(1, ids))
            torch.where(rows.restricted[part, None], alone, edited, out=edited)
        if rows.word_ends is not None and before is not None:
            first, last = rows.word_ends[part].unbind(2)
            completed = first == before[index, None]
            edited.scatter_add_(1, last.clamp_min(0), torch.where(completed, -torch.inf, 0.0))
        selected = batch.select(index)
        selected.want_raw = False
        unfiltered = edited
        if rows.grammar is not None:
            edited = edited.masked_fill(~_unpacked(rows.grammar[part], self._vocab_size), -torch.inf)
        wanting = rows.wants_host.searchsorted([part.start, part.stop])
        chosen = slice(int(wanting[0]), int(wanting[1]))
        local = rows.wants[chosen] - part.start
        selected.want_last_kept = rows.num_masked > 0 and chosen.start < chosen.stop
        sampled = self._sampler().sample(edited, selected)
        if selected.want_last_kept and sampled.last_kept is None:
            self._sample_again(edited, selected, local, rows.masked[chosen], sampled)
        if rows.constrained is not None:
            self._unfilter(unfiltered, selected, rows.constrained[part], sampled)
        out.token_ids[index] = sampled.token_ids
        out.logprobs[index] = sampled.logprobs
        if out.sampled_logprobs is not None and sampled.sampled_logprobs is not None:
            out.sampled_logprobs[index] = sampled.sampled_logprobs
        if out.raw_logprobs is not None:
            raw = self._ordinary.logprobs_of(unedited, sampled.token_ids.clamp_min(0))
            out.raw_logprobs[index] = raw.where(sampled.token_ids >= 0, torch.nan)
        if chosen.start == chosen.stop:
            return []
        temperature, token_ids, scaled = selected.temperature[local], rows.token_ids[chosen], None
        if self._ordinary.compiled is not None:
            further = self._further(unfiltered, local, temperature, rows.top, token_ids)
        else:
            scaled = unfiltered.index_select(0, local) / temperature[:, None]
            any_logprobs = rows.top > 0 or token_ids.shape[1] > 0
            logprobs = torch.log_softmax(scaled, 1) if any_logprobs else scaled
            further = further_of(logprobs, rows.top, token_ids)
        if sampled.last_kept is not None:
            if scaled is None or rows.grammar is not None:
                scaled = edited.index_select(0, local) / temperature[:, None]
            further.kept = _kept(scaled, sampled.last_kept[local])
        return [further]

    def _sample_again(
        self, edited: Tensor, batch: SamplingBatch, rows: Tensor, masked: Tensor, sampled: SamplerOutput
    ) -> None:
        """Sample ``rows`` (int64) with torch, which says what it kept; take its results where ``masked``."""
        if self._in_torch is None:
            self._in_torch = Sampler(
                self._vocab_size, self.chunk_rows, self._device, torch.float32, in_torch=True
            )
        part = batch.select(rows)
        part.want_last_kept = True
        found = self._in_torch.sample(edited.index_select(0, rows), part)
        assert found.last_kept is not None, "torch's sampler says it"
        for mine, theirs in (
            (sampled.token_ids, found.token_ids),
            (sampled.logprobs, found.logprobs),
            (sampled.sampled_logprobs, found.sampled_logprobs),
        ):
            if mine is not None and theirs is not None:
                mine[rows] = torch.where(masked, theirs, mine[rows])
        sampled.last_kept = torch.full_like(sampled.token_ids, -1).index_copy_(0, rows, found.last_kept)

    def _shift(self, edited: Tensor, rows: SpecialRows, part: slice) -> None:
        """Apply penalties and biases to the float32 logits ``edited`` [p, V] of the rows ``part``."""
        penalised = slice(part.start, min(part.stop, len(rows.counters)))
        if penalised.start < penalised.stop:
            self._counters.penalise(edited[: penalised.stop - penalised.start], rows, penalised)
        if rows.bias.shape[1]:
            edited.scatter_add_(1, rows.bias_ids[part], rows.bias[part])

    def _unfilter(
        self, logits: Tensor, batch: SamplingBatch, constrained: Tensor, sampled: SamplerOutput
    ) -> None:
        """Give rows with a grammar the log-probabilities that their tokens have in ``logits`` [c, V]."""
        given = replace(batch, given=sampled.token_ids, want_sampled=False, want_last_kept=False)
        found = self._sampler().sample(logits, given).logprobs
        known = constrained & (sampled.token_ids >= 0)
        sampled.logprobs = torch.where(known, found, sampled.logprobs)

    def _sampler(self) -> Sampler:
        if self.exact is None:
            self.exact = Sampler(self._vocab_size, self.chunk_rows, self._device, torch.float32)
        return self.exact


def _asking(batch: SamplingBatch) -> SamplingBatch:
    """Return ``batch`` with what its special rows want of the sampler."""
    if batch.special is None or not batch.special.num_masked:
        return batch
    return replace(batch, want_last_kept=True)


def further_of(logprobs: Tensor, top: int, token_ids: Tensor) -> FurtherLogprobs:
    """Return what is wanted of ``logprobs`` [N, V]: of ``token_ids`` [N, M], and at least ``top`` tokens."""
    best = logprobs.topk(min(FETCHED_TOP, logprobs.shape[1]) if top else 0, 1)
    return FurtherLogprobs(
        logprobs=logprobs[:0, 0],
        top_ids=best.indices.int(),
        top=best.values,
        token_ids_logprobs=logprobs.gather(1, token_ids),
    )


def joined(parts: list[FurtherLogprobs]) -> FurtherLogprobs:
    kept = [part.kept for part in parts if part.kept is not None]
    columns = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("logprobs", "top_ids", "top", "token_ids_logprobs")
    }
    return FurtherLogprobs(**columns, kept=torch.cat(kept) if kept else None)


def _kept(scaled: Tensor, last: Tensor) -> Tensor:
    """Return bool [N, V]: tokens from the best to ``last`` [N], the lower index first; -1 keeps all."""
    border, index = (
        scaled.gather(1, last.clamp_min(0)[:, None]),
        torch.arange(scaled.shape[1], device=scaled.device),
    )
    kept = (scaled > border) | ((scaled == border) & (index <= last[:, None])) | (last < 0)[:, None]
    return kept & (scaled > -torch.inf)


def _unpacked(words: Tensor, count: int) -> Tensor:
    """Return bool [n, count] of the bits of ``words``, int32 [n, W], the lowest first."""
    if words.device.type == "cpu":
        packed = words.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(packed, 1, count, bitorder="little")).view(torch.bool)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(1)[:, :count].bool()


def input_logprobs(
    hidden: Tensor,
    inputs: InputTokens,
    head: Callable[[Tensor, Tensor], Tensor | None],
    sampler: Sampler,
    vocab_size: int,
) -> FurtherLogprobs:
    """Return prompt tokens' log-probabilities, unedited and without temperature, as in SGLang.

    ``hidden``: [I, hidden] of ``inputs``; ``head`` returns logits of some such rows and their query tokens, a
    bounded number at a time.
    """
    bound = _BLOCK_BYTES_CPU if hidden.device.type == "cpu" else _BLOCK_BYTES
    rows = max(_LEAST_ROWS, bound // (4 * vocab_size))
    parts = []
    for start in range(0, len(hidden), rows):
        block = slice(start, start + rows)
        logits = head(hidden[block], inputs.tokens[block])
        assert logits is not None, "a dummy run has no prompts"
        token_ids = inputs.token_ids[block]
        any_others = inputs.top > 0 or token_ids.shape[1] > 0
        known = torch.log_softmax(logits.float(), 1) if any_others else None
        part = further_of(logits[:, :1].float() if known is None else known, inputs.top, token_ids)
        part.logprobs = sampler.logprobs_of(logits, inputs.targets[block], known)
        parts.append(part)
    return joined(parts)
