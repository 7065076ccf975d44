"""Importance weights per token: the ratio, its limit, and tokens that are too old."""

import math

import pytest
import torch
from support.fake_scheduler import finished, floats

from caesura.client import WeightVersionSpan, importance_weights
from caesura.client import trainer as tensors
from caesura.client.connection.results import decode_output

SPANS = [
    WeightVersionSpan(version="a", epoch=1, start=0, end=2, stale_kv=False),
    WeightVersionSpan(version="b", epoch=3, start=2, end=3, stale_kv=True),
]
LEARNER, SAMPLER = [-1.0, -1.0, -3.0], [-1.0, -2.0, -1.0]


def test_each_token_has_the_ratio_of_its_probabilities_up_to_a_limit():
    assert importance_weights(LEARNER, SAMPLER) == pytest.approx([1.0, 2.0, math.exp(-2.0)])
    assert importance_weights(LEARNER, SAMPLER, clip_max=5.0)[1] == pytest.approx(math.e)
    assert importance_weights([0.0], [-1e9], clip_max=3.0) == [3.0]
    assert importance_weights([-math.inf], [-1.0]) == [0.0]
    assert importance_weights([], []) == []


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 0, 1]), (1, [0, 0, 1]), (2, [1, 1, 1]), (None, [1, 1, 1])]
)
def test_tokens_of_older_weights_than_allowed_count_nothing(max_staleness, expected):
    assert importance_weights(LEARNER, LEARNER, SPANS, epoch=3, max_staleness=max_staleness) == expected


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="epoch"):
        importance_weights(LEARNER, SAMPLER, SPANS, max_staleness=1)
    with pytest.raises(ValueError, match="3 learner logprobs, 2"):
        importance_weights(LEARNER, SAMPLER[:2])
    with pytest.raises(ValueError, match="token 3 of 2"):
        importance_weights(LEARNER[:2], SAMPLER[:2], SPANS, epoch=3, max_staleness=0)


def test_tokens_with_kv_of_older_weights_can_be_masked():
    assert importance_weights(LEARNER, LEARNER, SPANS, mask_stale_kv=True) == [1, 1, 0]


def output(logprobs, spans):
    tokens = [7] * (3 if logprobs is None else len(logprobs))
    wire = finished("r", tokens, output_logprobs=logprobs and floats(logprobs), weight_versions=spans)
    return decode_output(wire)


SHORT = WeightVersionSpan(version="b", epoch=3, start=0, end=2, stale_kv=False)
BATCH = [output(SAMPLER, SPANS), output(SAMPLER[:2], [SHORT])]
PADDED = torch.tensor([[*LEARNER, math.nan], [*LEARNER[:2], math.inf, 5.0]], requires_grad=True)


@pytest.mark.parametrize(
    "options", [{}, {"epoch": 3, "max_staleness": 1}, {"mask_stale_kv": True}, {"clip_max": 5.0}], ids=str
)
def test_a_padded_batch_has_the_weights_of_its_samples_and_zeros(options):
    found = tensors.importance_weights(PADDED, BATCH, **options)
    rows = [
        importance_weights(
            LEARNER[: len(each.output_ids)], each.output_logprobs, each.weight_versions, **options
        )
        for each in BATCH
    ]
    expected = torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in rows])
    torch.testing.assert_close(found, expected)
    assert (found.dtype, found.requires_grad) == (torch.float32, False)


def test_a_mask_gives_further_tokens_no_weight():
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]])
    found = tensors.importance_weights(PADDED, BATCH, mask=mask)
    torch.testing.assert_close(found, tensors.importance_weights(PADDED, BATCH) * mask)
    assert tensors.importance_weights(PADDED.bfloat16(), BATCH).dtype == torch.bfloat16
    assert tensors.importance_weights(torch.zeros(0, 4), []).shape == (0, 4)


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"shape \[2, 2\]; it must be \[2, 3 or more\]"):
        tensors.importance_weights(PADDED[:, :2], BATCH)
    with pytest.raises(ValueError, match=r"must be \[1, 3 or more\]"):
        tensors.importance_weights(PADDED, BATCH[:1])
    with pytest.raises(ValueError, match="mask has the shape"):
        tensors.importance_weights(PADDED, BATCH, mask=torch.ones(4))
    with pytest.raises(ValueError, match="sample 0 has no logprobs: generate with return_logprob=True"):
        tensors.importance_weights(PADDED[:1], [output(None, SPANS)])
    with pytest.raises(ValueError, match="epoch"):
        tensors.importance_weights(PADDED, BATCH, max_staleness=1)
