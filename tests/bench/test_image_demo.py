"""The demo of images, quick: the whole loop against a real engine; only the learning is too short to see."""

import json
import math

import pytest
import torch
from bench.test_demo import finish_demo

pytest.importorskip("diffusers")

from demo.images.learner import Batch, Learner
from demo.images.pipeline import LATENT, build
from demo.images.settings import ImageSettings
from demo.images.world import COLOURS, PROMPTS, TRAINED, draw, indices, measure

WINDOW = 5


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish_demo(tmp_path_factory.mktemp("images"), "--policy", "image")


@pytest.mark.slow
def test_recomputed_trajectories_have_the_same_logprobs(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["updates"] == 3
    assert summary["images"] == 3 * 4 * len(TRAINED)
    assert 0 <= summary["max_logprob_gap"] <= 1e-5
    assert 0.0 <= summary["reward_first"] <= 1.0
    assert 0 < summary["pause_ms_p50"] <= summary["pause_ms_max"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_every_other_transport_brings_the_weights_of_each_update(tmp_path, transport):
    out = finish_demo(tmp_path, "--policy", "image", "--updates", "2", "--transport", transport)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == 2
    assert 0 <= summary["max_logprob_gap"] <= 1e-5


def pictures_of(prompts, seed=0):
    colours, shapes = torch.tensor([indices(prompt) for prompt in prompts]).unbind(1)
    return draw(colours, shapes, torch.Generator().manual_seed(seed))


def test_true_pictures_are_worth_most_and_each_mistake_costs():
    prompts = PROMPTS * 20
    right = measure(pictures_of(prompts), prompts)
    assert right.right_colour.mean() == 1.0
    assert right.right_shape.mean() > 0.95
    assert right.reward.mean() > 0.8
    next_colour = [PROMPTS[(place + 1) % len(COLOURS)] for place in range(len(PROMPTS))] * 20
    wrong = measure(pictures_of(prompts), next_colour)
    assert wrong.reward.mean() < 0.5 * right.reward.mean()
    empty = measure(torch.ones(len(PROMPTS), 3, 32, 32), PROMPTS)
    assert empty.reward.max() < 0.05


def batch_of(learner: Learner, settings: ImageSettings, rewards: list[float]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    count = len(rewards)
    batch = Batch(
        latents=torch.randn(count, WINDOW + 1, *LATENT, generator=generator),
        behaviour=torch.zeros(count, WINDOW),
        versions=torch.zeros(count, WINDOW, dtype=torch.int64),
        embeds=torch.randn(count, 6, 64, generator=generator),
        pooled=torch.randn(count, 64, generator=generator),
        rewards=torch.tensor(rewards),
    )
    rows, steps = torch.cartesian_prod(torch.arange(count), torch.arange(WINDOW)).unbind(1)
    with torch.no_grad():
        batch.behaviour[rows, steps] = learner._steps(learner.transformer, batch, rows, steps)[0]
    return batch


def test_the_check_sees_logprobs_that_are_off_or_nan():
    settings = ImageSettings.quick(samples_per_prompt=2, chunk=7)
    learner = Learner(build(0).transformer, settings)
    batch = batch_of(learner, settings, [0.1, 0.9])
    assert learner.verify(batch) <= 1e-6
    batch.behaviour[1, 3] += 0.5
    assert learner.verify(batch) == pytest.approx(0.5, abs=1e-5)
    batch.behaviour[0, 0] = math.nan
    assert math.isnan(learner.verify(batch))


def test_an_update_makes_the_better_trajectory_likelier():
    settings = ImageSettings.quick(samples_per_prompt=2, kl=0.0, clip=0.5)
    learner = Learner(build(0).transformer, settings)
    batch = batch_of(learner, settings, [0.0, 1.0])
    called = []
    learner.update(1, batch, lambda: called.append(True))
    assert called == [True]
    rows, steps = torch.cartesian_prod(torch.arange(2), torch.arange(WINDOW)).unbind(1)
    with torch.no_grad():
        after = learner._steps(learner.transformer, batch, rows, steps)[0].view(2, WINDOW)
    moved = (after - batch.behaviour).mean(1)
    assert moved[1] > moved[0]
