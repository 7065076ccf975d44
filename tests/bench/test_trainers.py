"""The trainers of the examples learn: every step's weights are in the engine, or on every replica."""

import re

import grpo_trainer
import pytest


@pytest.mark.slow
def test_the_reward_rises(capfd):
    rewards = grpo_trainer.main(40)
    assert len(re.findall(r"^step .* versions up to [1-9]", capfd.readouterr().out, re.MULTILINE)) == 40
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_the_reward_rises_on_two_replicas(capfd):
    ray = pytest.importorskip("ray")
    import ray_trainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        rewards = ray_trainer.main(["--replicas", "2", "--steps", "16"])
    finally:
        ray.shutdown()
    assert len(re.findall(r"^step .* 2 replicas$", capfd.readouterr().out, re.MULTILINE)) == 16
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
