"""Traces of transformers and VAEs: the module's own bits, for every family, or the module itself."""

from functools import partial

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from support.pipelines import load_pipeline, make_flux, make_qwen_image, make_sd3

from caesura.scheduler.images import traced_module
from caesura.scheduler.images.flux import Flux
from caesura.scheduler.images.qwen_image import QwenImage
from caesura.scheduler.images.sd3 import StableDiffusion3
from caesura.scheduler.images.traced_module import TRACE_AFTER, TracedModule, traced_decode, traced_velocity

SIZE, TOKENS = (16, 32), 6
FAMILIES = {
    "sd3": (StableDiffusion3, StableDiffusion3Pipeline, make_sd3),
    "flux": (Flux, FluxPipeline, make_flux),
    "qwen": (QwenImage, QwenImagePipeline, make_qwen_image),
}


@pytest.fixture(autouse=True)
def on_a_busy_machine_too(monkeypatch):
    monkeypatch.setattr(traced_module, "WORTH_S", float("inf"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    kind, pipeline_class, make = FAMILIES[request.param]
    pipeline = load_pipeline(make(tmp_path_factory.mktemp("pipelines") / request.param), pipeline_class)
    modules = {name: getattr(pipeline, name, None) for name in kind.classes}
    made = {name: module for name, module in modules.items() if module is not None}
    return kind(made, [], dict(pipeline.scheduler.config))


def inputs(family, rows):
    config = family.transformer.config
    embeds = {
        "prompt_embeds": torch.randn(rows, TOKENS, config.joint_attention_dim),
        "pooled_prompt_embeds": torch.randn(rows, getattr(config, "pooled_projection_dim", 1)),
        "prompt_embeds_mask": torch.ones(rows, TOKENS, dtype=torch.int64),
    }
    given = {name: embeds[name] for name in family.embed_names}
    x = torch.randn(rows, *family.latent_shape(*SIZE))
    return x, torch.rand(rows), family.trimmed(given), torch.rand(rows), SIZE


def traced_for(family, rows=2):
    velocity = partial(traced_velocity, family, TracedModule("the transformer", family.transformer))
    for _ in range(TRACE_AFTER + 2):
        velocity(*inputs(family, rows))
    return velocity


def counted(family, monkeypatch):
    calls = []
    original = family.velocity
    monkeypatch.setattr(family, "velocity", lambda *given: (calls.append(len(given[0])), original(*given))[1])
    return calls


@torch.inference_mode()
def test_every_family_is_traced_and_makes_the_same_bits(family, monkeypatch):
    velocity = traced_for(family)
    expected = family.velocity
    calls = counted(family, monkeypatch)
    for _ in range(3):
        given = inputs(family, 2)
        assert torch.equal(velocity(*given), expected(*given))
    assert calls == [], "the module was called for what is traced"


@torch.inference_mode()
def test_another_number_of_rows_is_another_shape(family, monkeypatch):
    velocity = traced_for(family)
    expected = family.velocity
    calls = counted(family, monkeypatch)
    for rows in (1, 5, 1, 5, 1, 5):
        given = inputs(family, rows)
        assert torch.equal(velocity(*given), expected(*given))
    assert calls == [1, 5, 1, 5, 1, 5]


@torch.inference_mode()
def test_weights_that_are_written_hold_for_the_next_step(family):
    velocity = traced_for(family)
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
def test_weights_that_were_equal_when_traced_are_told_apart(monkeypatch):
    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    two.load_state_dict(one.state_dict())
    traced = TracedModule("two", torch.nn.Sequential(one, two))
    x = torch.randn(2, 4)
    for _ in range(3):
        traced(lambda x: one(x) + 2 * two(x), (x,), None)
    two.weight.data.mul_(-1)
    assert torch.equal(traced(lambda x: 1 / 0, (x,), None), one(x) + 2 * two(x))


@torch.inference_mode()
def test_in_place_writes_are_replayed(monkeypatch):
    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    traced = TracedModule("a sum", torch.nn.Identity())

    def call(x):
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        return torch.cat((first.add_(x), second))

    for _ in range(3):
        traced(call, (torch.randn(2, 4),), None)
    x = torch.randn(2, 4)
    assert torch.equal(traced(lambda x: 1 / 0, (x,), None), call(x))


@torch.inference_mode()
def test_decoding_is_traced_and_has_the_same_bits(family, monkeypatch):
    if family.vae_has_state:
        pytest.skip("its calls may not be interleaved")
    decode = partial(traced_decode, family, TracedModule("the VAE", family.vae))
    shape = family.latent_shape(*SIZE)
    for _ in range(TRACE_AFTER + 2):
        decode(torch.randn(2, *shape), SIZE)
    latents = torch.randn(2, *shape)
    expected = family.decode(latents, SIZE)
    monkeypatch.setattr(family, "decode", None)
    assert torch.equal(decode(latents, SIZE), expected)


@torch.inference_mode()
def test_a_trace_that_makes_other_bits_never_serves(family, monkeypatch):
    def other(*given):
        program = compiled(*given)
        return lambda *inputs: program(*inputs) * (1 + 2**-20)

    compiled = traced_module.compiled
    monkeypatch.setattr(traced_module, "compiled", other)
    velocity = traced_for(family)
    given = inputs(family, 2)
    assert torch.equal(velocity(*given), family.velocity(*given))


@torch.inference_mode()
def test_untraceable_modules_are_traced_once(monkeypatch):
    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    traced, calls = TracedModule("a branch", torch.nn.Identity()), []

    def call(x):
        calls.append(1)
        return x * 2 if x.sum() > 0 else x * 3

    x = torch.ones(2, 4)
    for _ in range(4):
        assert torch.equal(traced(call, (x,), None), 2 * x)
    assert len(calls) == 5, "the call that could not be traced is made again"
    assert torch.equal(traced(call, (-x,), None), -3 * x)


@torch.inference_mode()
def test_a_mask_with_padding_goes_through_the_module(tmp_path):
    kind, pipeline_class, make = FAMILIES["qwen"]
    pipeline = load_pipeline(make(tmp_path / "qwen"), pipeline_class)
    qwen = kind({"transformer": pipeline.transformer, "vae": pipeline.vae}, [], {})
    velocity = traced_for(qwen)
    x, sigma, embeds, guidance, size = inputs(qwen, 2)
    whole = velocity(x, sigma, embeds, guidance, size)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 3:] = 0
    embeds = qwen.trimmed({**embeds, "prompt_embeds_mask": mask})
    padded = velocity(x, sigma, embeds, guidance, size)
    assert torch.equal(padded, qwen.velocity(x, sigma, embeds, guidance, size))
    assert not torch.equal(padded, whole)


@torch.inference_mode()
def test_traces_of_many_shapes_are_bounded(monkeypatch):
    monkeypatch.setattr(traced_module, "MAX_SHAPES", 3)
    traced = TracedModule("nothing", torch.nn.Identity())
    for side in range(10):
        x = torch.ones(1, side + 1)
        assert torch.equal(traced(lambda x: x * 2, (x,), None), x * 2)
    assert len(traced.shapes) == 3


@torch.inference_mode()
def test_slow_modules_are_not_traced(family, monkeypatch):
    monkeypatch.setattr(traced_module, "WORTH_S", 0.0)
    velocity = traced_for(family)
    calls = counted(family, monkeypatch)
    velocity(*inputs(family, 2))
    assert calls == [2]
