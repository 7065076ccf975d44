"""Rows that go to the ranks of their experts alone: the bits of rows that all ranks gather."""

import pytest
import torch
from support import rank_jobs
from support.checkpoints import make_checkpoint
from support.forward_batches import build_attention, forward_batch, load_model
from support.lanes import quick
from support.ranks import Ranks

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.kernels import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        native.why_not() is not None, reason="no products whose bits are those of a row alone"
    ),
]

SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0},
)
EDITED = (
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": {7: 2.0}},
    {"temperature": 0.9, "min_p": 0.05, "min_new_tokens": 3},
)
PAGES = 4
"""Pages of a rank, without scratch."""
MODELS = {
    "one of six": ("deepseek-v3", {"num_experts_per_tok": 1}, 3, 3),
    "three of ten": ("qwen3-moe", {"num_experts_per_tok": 3, "num_experts": 10}, 5, 5),
    "groups of two ranks": ("qwen2-moe", {"num_experts_per_tok": 1, "num_experts": 6}, 4, 2),
}
"""Family, sizes, ranks, and groups of whole experts."""


@pytest.mark.parametrize("gloo", quick([False, True]))
@pytest.mark.parametrize("owners", [[0, 1, 1, 0], [2, 2]], ids=["last idle", "first idle"])
@pytest.mark.parametrize("model", MODELS)
def test_exchanged_rows_have_the_bits_of_gathered_ones(tmp_path, model, owners, gloo):
    family, sizes, size, ep = MODELS[model]
    make_checkpoint(tmp_path, family, **sizes)
    ranks = Ranks(size, gloo=gloo)
    try:
        found = ranks.call(rank_jobs.rows_each_way, str(tmp_path), ep, owners, PAGES)
    finally:
        ranks.close()
    alone = load_model(str(tmp_path), torch.float32)
    _, backend = build_attention(alone, torch.float32, 1 + PAGES * size)
    batch = forward_batch(rank_jobs.prompts_of(owners, PAGES), 0)
    backend.plan(batch)
    with torch.inference_mode():
        expected = alone.logits(alone.forward(batch, backend))
    for exchanges, sent, gathered in found:
        assert exchanges == sum(alone.config.moe.sparse_layers) > 0
        assert torch.equal(sent, gathered)
        assert torch.equal(sent, found[0][1]), "on every rank"
        torch.testing.assert_close(sent, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gloo", quick([False, True]))
@pytest.mark.parametrize("kinds", [SAMPLED, SAMPLED + EDITED], ids=["plain", "edited"])
@pytest.mark.parametrize("count", [1, 8])
def test_shares_have_the_bits_of_whole_logits(tmp_path, count, kinds, gloo):
    make_checkpoint(tmp_path, "qwen3")
    messages = [
        GenerateReqInput(
            input_ids=[5, 9],
            sampling_params=SamplingParams(max_new_tokens=9, seed=number, **kinds[-1 - number % len(kinds)]),
            return_raw_logprob=number % 2 == 0,
            return_sampled_logprob=True,
            top_logprobs_num=number % 3 if kinds != SAMPLED else 0,
        )
        for number in range(count)
    ]
    ranks = Ranks(3, gloo=gloo)
    try:
        found = ranks.call(rank_jobs.sampled_each_way, str(tmp_path), messages)
    finally:
        ranks.close()
    assert [rows for rows, *_ in found] == [len(range(rank, count, 3)) for rank in range(3)]
    for _, shared, whole in found:
        for mine, theirs, first in zip(shared, whole, found[0][1], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert torch.equal(mine, theirs)
                assert torch.equal(mine, first), "on every rank"
