"""Warm-up: what is chosen, compiled or touched for the first time is so before the engine is ready.

Invariants:
- The decoder runs as many decode rows as there will ever be, output head and sampler a bounded number
  (:class:`WarmUp`): no temporary has rows times vocabulary, and the peak is not above a step's.
- Rows read and write the scratch page only. No page, slot's last token, seed or statistic changes.
- Running out of memory here is a warning: the engine starts cold.
- Nothing is measured to choose among kernels: their choice follows from shapes (docs/explanation/kernels.md).
"""

from dataclasses import dataclass, replace

import torch

from .forward import ForwardBatch, SamplingBatch
from .graphs import scratch_prefill

_TOP_K, _TOP_P = 20, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Work that runs before the first request."""

    rows: int
    """Rows of the decode step."""
    lm_head_rows: int
    """Rows of the output head and the sampler, at most ``rows``; 0 leaves both cold."""


def dummy_decode(rows: int, vocab_size: int) -> ForwardBatch:
    """Return a decode step on the scratch page, of slot 0 in every row, each row sampled; on the host."""
    return replace(
        scratch_prefill([1] * rows),
        num_decode=rows,
        sample_tokens=torch.arange(rows),
        sample_slots=torch.zeros(rows, dtype=torch.int64),
        sampling=_dummy_sampling(rows, vocab_size),
    )


def _dummy_sampling(rows: int, vocab_size: int) -> SamplingBatch:
    """Return sampled rows, the first of them filtered, so that both ways of the sampler are taken."""
    top_k, top_p = torch.full((rows,), vocab_size), torch.ones(rows)
    top_k[:1], top_p[:1] = min(_TOP_K, vocab_size), _TOP_P
    return replace(
        scratch_prefill([]).sampling,
        temperature=torch.ones(rows),
        greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=top_k,
        top_p=top_p,
        uniforms=torch.full((rows,), 0.5, dtype=torch.float64),
        any_sampled=True,
        any_filtered=True,
    )
