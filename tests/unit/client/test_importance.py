"""Importance weights per token: the ratio, its limit, and tokens that are too old."""

import math

import pytest

from caesura.client import WeightVersionSpan, importance_weights

SPANS = [
    WeightVersionSpan(version="a", epoch=1, start=0, end=2, stale_kv=False),
    WeightVersionSpan(version="b", epoch=3, start=2, end=3, stale_kv=False),
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


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="epoch"):
        importance_weights(LEARNER, SAMPLER, SPANS, max_staleness=1)
    with pytest.raises(ValueError, match="3 learner logprobs, 2"):
        importance_weights(LEARNER, SAMPLER[:2])
    with pytest.raises(ValueError, match="token 3 of 2"):
        importance_weights(LEARNER[:2], SAMPLER[:2], SPANS, epoch=3, max_staleness=0)
