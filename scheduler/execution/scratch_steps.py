"""Steps of nobody, on the scratch page: what warms an engine up, what graphs are captured with.

Invariant: rows read and write the scratch page only. No page, slot's last token, seed or statistic changes.
"""

from dataclasses import fields, replace
from typing import Any

import torch

from ..runtime.engine_config import PAGE_SIZE
from .forward import ForwardBatch, SamplingBatch, columns_of

_TOP_K, _TOP_P = 20, 0.9


def dummy_decode(rows: int, vocab_size: int) -> ForwardBatch:
    """Return decode rows of slot 0, all sampled, the first of them filtered: both ways of the sampler."""
    top_k, top_p = torch.full((rows,), vocab_size), torch.ones(rows)
    top_k[:1], top_p[:1] = min(_TOP_K, vocab_size), _TOP_P
    uniforms = torch.full((rows,), 0.5, dtype=torch.float64)
    greedy = torch.zeros(rows, dtype=torch.bool)
    columns = {"greedy": greedy, "top_k": top_k, "top_p": top_p, "uniforms": uniforms}
    # What is None unless a request asks for it stays out, as in a first step; graphs have all columns.
    unused = {each.name: None for each in fields(SamplingBatch) if each.default is None}
    return scratch_decode(rows, 0, **unused, **columns, any_sampled=True, any_filtered=True)


def scratch_decode(rows: int, slot: int, **sampling: Any) -> ForwardBatch:
    """Return decode rows of slot 0, sampled for ``slot``, greedily unless ``sampling`` says otherwise."""
    columns = {
        name: torch.full((rows,), each.padding, dtype=each.dtype)
        for name, each in columns_of(SamplingBatch).items()
    }
    return replace(
        scratch_prefill([1] * rows),
        num_decode=rows,
        sample_tokens=torch.arange(rows),
        sample_slots=torch.full((rows,), slot),
        sampling=replace(SamplingBatch.of_none(), **{**columns, **sampling}),
    )


def scratch_prefill(lengths: list[int]) -> ForwardBatch:
    """Return prefill rows of these lengths, for slot 0, none of them sampled."""
    tokens = sum(lengths)
    pages = -(-max(lengths, default=1) // PAGE_SIZE)
    none = torch.empty(0, dtype=torch.int64)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    return ForwardBatch(
        num_decode=0,
        input_ids=zeros,
        positions=torch.cat([torch.arange(length) for length in lengths]) if lengths else none,
        kv_slots=zeros,
        page_table=torch.zeros((len(lengths), pages), dtype=torch.int32),
        kv_lens=torch.tensor(lengths, dtype=torch.int32),
        q_lens_host=lengths,
        kv_lens_host=lengths,
        slots=torch.zeros(len(lengths), dtype=torch.int64),
        sample_tokens=none,
        sample_slots=none,
        sampling=SamplingBatch.of_none(),
    )
