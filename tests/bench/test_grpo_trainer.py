"""The trainer of the tutorial learns from an engine whose weights it changes at each step."""

import re

import grpo_trainer
import pytest

STEPS = 40


@pytest.mark.slow
def test_the_reward_rises(capfd):
    rewards = grpo_trainer.main(STEPS)
    assert len(re.findall(r"^step .* versions up to [1-9]", capfd.readouterr().out, re.MULTILINE)) == STEPS
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2
