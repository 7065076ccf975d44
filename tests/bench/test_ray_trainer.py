"""The trainer on a fleet learns: every step's weights are on every replica."""

import re

import pytest

ray = pytest.importorskip("ray")
import ray_trainer  # noqa: E402  (needs ray)

STEPS = 16


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_the_reward_rises_on_two_replicas(capfd):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        rewards = ray_trainer.main(["--replicas", "2", "--steps", str(STEPS)])
    finally:
        ray.shutdown()
    assert len(re.findall(r"^step .* 2 replicas$", capfd.readouterr().out, re.MULTILINE)) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
