"""The demo's split, checker, advantages and ratio statistics, against what they claim."""

import random

import pytest
import torch
from demo import task
from demo.learner import collate, group_advantages
from demo.messages import Group, Sample, Span
from hypothesis import given
from hypothesis import strategies as st


def make_sample(rewards, logprob=-1.0, spans=None):
    spans = spans or [Span(version=0, start=0, end=len(rewards), stale_kv=False)]
    return Sample(
        output_ids=[5] * len(rewards), logprobs=[logprob] * len(rewards), rewards=rewards, spans=spans
    )


def test_training_and_held_out_words_are_disjoint():
    rng = random.Random(0)
    training = {task.training_word(rng) for _ in range(3000)}
    held_out = set(task.held_out_words(256, seed=0))
    assert len(held_out) == 256
    assert not training & held_out
    assert not any(map(task.is_held_out, training))
    assert all(map(task.is_held_out, held_out))


@given(st.randoms(use_true_random=False), st.data())
def test_rewards_sum_to_one_exactly_for_exact_answers(rng, data):
    word = task.random_word(rng)
    answer = task.answer_ids(word)
    assert sum(task.token_rewards(word, answer)) == pytest.approx(1.0)
    place = data.draw(st.integers(0, len(answer) - 1))
    wrong = answer[:place] + [task.PAD] + answer[place + 1 :]
    assert not task.is_exact(word, wrong)
    assert sum(task.token_rewards(word, wrong)) == pytest.approx(place / len(answer))
    cut = answer[:place]
    assert not task.is_exact(word, cut)
    assert sum(task.token_rewards(word, cut)) < 1.0


def test_one_reward_at_the_end_gives_the_usual_group_advantage():
    rewards = [1.0, 0.0, 0.5, 0.0]
    advantages = group_advantages([make_sample([0.0, 0.0, reward]) for reward in rewards])
    totals = torch.tensor(rewards)
    expected = (totals - totals.mean()) / (totals.std() + 1e-4)
    for row, value in zip(advantages, expected.tolist(), strict=True):
        assert row == pytest.approx([value] * 3, abs=1e-5)


def test_collate_aligns_tokens_with_their_predictions():
    spans = [Span(version=3, start=0, end=1, stale_kv=False), Span(version=4, start=1, end=3, stale_kv=True)]
    long = make_sample([0.0, 0.0, 1.0], logprob=-2.0, spans=spans)
    batch = collate([Group(prompt_ids=[7, 8, 2], samples=[long, make_sample([0.0])])])
    assert batch.tokens.tolist() == [[7, 8, 2, 5, 5, 5], [7, 8, 2, 5, task.PAD, task.PAD]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch.behaviour[0].tolist() == [0, 0, -2, -2, -2]
    assert batch.versions.tolist() == [[-1, -1, 3, 4, 4], [-1, -1, 0, -1, -1]]
    assert batch.stale.tolist() == [[False, False, False, True, True], [False] * 5]
