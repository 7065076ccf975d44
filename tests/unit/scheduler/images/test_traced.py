"""Recordings of a transformer's operations: the module's own bits, for every family, or the module itself."""

import gc
import threading

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from support.pipelines import load_pipeline, make_flux, make_qwen_image, make_sd3

from caesura.scheduler.images import traced
from caesura.scheduler.images.flux import Flux
from caesura.scheduler.images.qwen_image import QwenImage
from caesura.scheduler.images.sd3 import StableDiffusion3
from caesura.scheduler.images.traced import RECORD_AFTER, Images, Velocity

SIZE, TOKENS = (16, 32), 6
FAMILIES = {
    "sd3": (StableDiffusion3, StableDiffusion3Pipeline, make_sd3),
    "flux": (Flux, FluxPipeline, make_flux),
    "qwen": (QwenImage, QwenImagePipeline, make_qwen_image),
}


@pytest.fixture(autouse=True)
def on_a_busy_machine_too(monkeypatch):
    monkeypatch.setattr(traced, "WORTH_S", float("inf"))
    monkeypatch.setattr(traced, "SLICE", float("inf"))


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
    for _ in range(RECORD_AFTER + 1):
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
def test_weights_that_were_equal_when_recorded_are_told_apart(monkeypatch):
    """torch's passes take equal constants for one."""
    monkeypatch.setattr(traced, "RECORD_AFTER", 1)
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    two.load_state_dict(one.state_dict())
    recorded = traced.Recorded("two", torch.nn.Sequential(one, two))
    x = torch.randn(2, 4)
    for _ in range(3):
        recorded(lambda x: one(x) + 2 * two(x), (x,), None)
    two.weight.data.mul_(-1)
    ran = counted_runs(monkeypatch)
    assert torch.equal(recorded(lambda x: 1 / 0, (x,), None), one(x) + 2 * two(x))
    assert ran == [1]


def counted_runs(monkeypatch):
    ran, run = [], traced._run
    monkeypatch.setattr(traced, "_run", lambda *given: (ran.append(1), run(*given))[1])
    return ran


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
@torch.inference_mode()
def test_recording_goes_on_beside_the_steps(family, monkeypatch):
    """A call waits for one piece of it, another shape's as well, and weights may be written in between."""
    velocity = Velocity(family, records=True)
    for _ in range(RECORD_AFTER):
        velocity(*inputs(family, 2))
    monkeypatch.setattr(traced, "SLICE", 0.0)
    assert velocity._recorded._under_way is not None
    _, sigma, embeds, guidance, _ = inputs(family, 1)
    other = (torch.randn(1, *family.latent_shape(16, 16)), sigma, embeds, guidance, (16, 16))
    weight = next(p for n, p in family.transformer.named_parameters() if n.endswith("proj_out.weight"))
    pieces = 0
    while velocity._recorded._under_way is not None:
        pieces += 1
        given = other if pieces % 2 else inputs(family, 2)
        weight.data.mul_(-1)
        assert torch.equal(velocity(*given), family.velocity(*given))
    if pieces % 2:
        weight.data.mul_(-1)
    assert pieces > 10, "a pause would have waited for all of it"
    ran = counted_runs(monkeypatch)
    for _ in range(2):
        given = inputs(family, 2)
        assert torch.equal(velocity(*given), family.velocity(*given))
    assert len(ran) == 2
    assert not any(each._forward_pre_hooks for each in family.transformer.modules())


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
@torch.inference_mode()
def test_an_engine_that_ends_leaves_no_recording_under_way(family, monkeypatch):
    velocity = Velocity(family, records=True)
    monkeypatch.setattr(traced, "SLICE", 0.0)
    for _ in range(RECORD_AFTER + 3):
        velocity(*inputs(family, 2))
    assert [each for each in threading.enumerate() if each.name == "caesura-sliced"]
    del velocity
    gc.collect()
    assert not [each for each in threading.enumerate() if each.name == "caesura-sliced"]
    assert not any(each._forward_pre_hooks for each in family.transformer.modules())


@pytest.mark.parametrize("family", ["sd3"], indirect=True)
@torch.inference_mode()
def test_a_recording_that_is_dropped_is_gone(family):
    functions = torch.jit._state._python_cu.get_functions
    before = len(functions())
    recorded(family)
    assert len(functions()) == before, "torch keeps it for ever"


@torch.inference_mode()
def test_images_are_recorded_and_have_the_same_bits(family, monkeypatch):
    if family.vae_has_state:
        pytest.skip("its calls may not be interleaved")
    images, shape = Images(family, records=True), family.latent_shape(*SIZE)
    for _ in range(RECORD_AFTER + 1):
        images(torch.randn(2, *shape), SIZE)
    ran = counted_runs(monkeypatch)
    latents = torch.randn(2, *shape)
    assert torch.equal(images(latents, SIZE), family.decode(latents, SIZE))
    assert ran == [1]


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
    assert len(velocity._recorded._shapes) == 3


@torch.inference_mode()
def test_slow_modules_are_not_recorded(family, monkeypatch):
    monkeypatch.setattr(traced, "WORTH_S", 0.0)
    velocity = recorded(family)
    calls = counted(family, monkeypatch)
    velocity(*inputs(family, 2))
    assert calls == [2]
