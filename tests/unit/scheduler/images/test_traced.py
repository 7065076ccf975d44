"""Recordings of a transformer's operations: the module's own bits, for every family, or the module itself."""

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from support.pipelines import load_pipeline, make_flux, make_qwen_image, make_sd3

from caesura.scheduler.images import traced
from caesura.scheduler.images.flux import Flux
from caesura.scheduler.images.qwen_image import QwenImage
from caesura.scheduler.images.sd3 import StableDiffusion3
from caesura.scheduler.images.traced import RECORD_AFTER, Velocity

SIZE, TOKENS = (16, 32), 6
FAMILIES = {
    "sd3": (StableDiffusion3, StableDiffusion3Pipeline, make_sd3),
    "flux": (Flux, FluxPipeline, make_flux),
    "qwen": (QwenImage, QwenImagePipeline, make_qwen_image),
}


@pytest.fixture(autouse=True)
def on_a_busy_machine_too(monkeypatch):
    monkeypatch.setattr(traced, "WORTH_S", float("inf"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    kind, pipeline_class, make = FAMILIES[request.param]
    pipeline = load_pipeline(make(tmp_path_factory.mktemp("pipelines") / request.param), pipeline_class)
    modules = {name: getattr(pipeline, name, None) for name in kind.classes}
    made = {name: module for name, module in modules.items() if module is not None}
    return kind(made, [], dict(pipeline.scheduler.config))


def inputs(family, rows):
    """Other values at every call."""
    config = family.transformer.config
    embeds = {
        "prompt_embeds": torch.randn(rows, TOKENS, config.joint_attention_dim),
        "pooled_prompt_embeds": torch.randn(rows, getattr(config, "pooled_projection_dim", 1)),
        "prompt_embeds_mask": torch.ones(rows, TOKENS, dtype=torch.int64),
    }
    given = {name: embeds[name] for name in family.embed_names}
    x = torch.randn(rows, *family.latent_shape(*SIZE))
    return x, torch.rand(rows), given, torch.rand(rows), SIZE


def recorded(family, rows=2):
    """A velocity whose recording serves ``rows``."""
    velocity = Velocity(family, records=True)
    for _ in range(RECORD_AFTER):
        velocity(*inputs(family, rows))
    return velocity


def counted(family, monkeypatch):
    """Calls of the module from now on."""
    calls = []
    original = family.velocity
    monkeypatch.setattr(family, "velocity", lambda *given: (calls.append(len(given[0])), original(*given))[1])
    return calls


@torch.inference_mode()
def test_every_family_is_recorded_and_makes_the_same_bits(family, monkeypatch):
    velocity = recorded(family)
    expected = family.velocity
    calls = counted(family, monkeypatch)
    for _ in range(3):
        given = inputs(family, 2)
        assert torch.equal(velocity(*given), expected(*given))
    assert calls == [], "the module was called for what is recorded"


@torch.inference_mode()
def test_another_number_of_rows_is_compared_first(family, monkeypatch):
    velocity = recorded(family)
    expected = family.velocity
    calls = counted(family, monkeypatch)
    for rows in (1, 5, 1, 5, 1, 5):
        given = inputs(family, rows)
        assert torch.equal(velocity(*given), expected(*given))
    # Recordings hold for every number of rows that the module's own code leaves open, and for no other.
    assert {1: calls.count(1), 5: calls.count(5)} in ({1: 1, 5: 1}, {1: 3, 5: 3})


@torch.inference_mode()
def test_weights_that_are_written_hold_for_the_next_step(family):
    velocity = recorded(family)
    given = inputs(family, 2)
    before = velocity(*given)
    weight = next(p for n, p in family.transformer.named_parameters() if n.endswith("proj_out.weight"))
    weight.data.mul_(-1)
    try:
        after = velocity(*given)
        assert torch.equal(after, family.velocity(*given))
        assert not torch.equal(after, before)
    finally:
        weight.data.mul_(-1)


@torch.inference_mode()
def test_a_recording_that_makes_other_bits_never_serves(family, monkeypatch):
    run = traced._run
    monkeypatch.setattr(traced, "_run", lambda *given: run(*given) * (1 + 2**-20))
    velocity = recorded(family)
    given = inputs(family, 2)
    assert torch.equal(velocity(*given), family.velocity(*given))


@torch.inference_mode()
def test_what_cannot_be_recorded_is_tried_once(family, monkeypatch):
    attempts = []

    def refuse(*_):
        attempts.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(traced, "_record", refuse)
    velocity = recorded(family)
    for rows in (2, 3):
        given = inputs(family, rows)
        assert torch.equal(velocity(*given), family.velocity(*given))
    assert len(attempts) == 1


@torch.inference_mode()
def test_a_mask_with_padding_goes_through_the_module(tmp_path):
    kind, pipeline_class, make = FAMILIES["qwen"]
    pipeline = load_pipeline(make(tmp_path / "qwen"), pipeline_class)
    qwen = kind({"transformer": pipeline.transformer, "vae": pipeline.vae}, [], {})
    velocity = recorded(qwen)
    x, sigma, embeds, guidance, size = inputs(qwen, 2)
    whole = velocity(x, sigma, embeds, guidance, size)
    embeds["prompt_embeds_mask"][1, 3:] = 0
    padded = velocity(x, sigma, embeds, guidance, size)
    assert torch.equal(padded, qwen.velocity(x, sigma, embeds, guidance, size))
    assert not torch.equal(padded, whole)


@torch.inference_mode()
def test_recordings_of_many_shapes_are_bounded(monkeypatch):
    monkeypatch.setattr(traced, "_MOST_SHAPES", 3)

    class Plain:
        transformer = torch.nn.Identity()

        def follows_values(self, embeds):
            return False

        def velocity(self, x, sigma, embeds, guidance, size):
            return x * 2

    velocity = Velocity(Plain(), records=True)
    for side in range(10):
        x = torch.ones(1, side + 1)
        assert torch.equal(velocity(x, x, {}, x, (1, 1)), x * 2)
    assert len(velocity._shapes) == 3


@torch.inference_mode()
def test_slow_modules_are_not_recorded(family, monkeypatch):
    monkeypatch.setattr(traced, "WORTH_S", 0.0)
    velocity = recorded(family)
    calls = counted(family, monkeypatch)
    velocity(*inputs(family, 2))
    assert calls == [2]
