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
from caesura.scheduler.images.traced_module import (
    MAX_SHAPES,
    TRACE_AFTER,
    TracedModule,
    traced_decode,
    traced_velocity,
)

SIZE, TOKENS = (16, 32), 6
FAMILIES = {
    "sd3": (StableDiffusion3, StableDiffusion3Pipeline, make_sd3),
    "flux": (Flux, FluxPipeline, make_flux),
    "qwen": (QwenImage, QwenImagePipeline, make_qwen_image),
}


@pytest.fixture(autouse=True)
def worth_s(request, monkeypatch):
    """A module is traced on a busy machine too, unless a test says how fast it must be, in seconds."""
    monkeypatch.setattr(traced_module, "WORTH_S", getattr(request, "param", float("inf")))


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


@pytest.fixture
def calls(family):
    """Rows of each call of the transformer or of the VAE's decoder, as modules."""
    rows: list[int] = []

    def note(module, args, kwargs):
        rows.append(len((args or tuple(kwargs.values()))[0]))

    modules = family.transformer, family.vae.decoder
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    yield rows
    for hook in hooks:
        hook.remove()


@torch.inference_mode()
def test_every_family_is_traced_and_makes_the_same_bits(family, calls):
    velocity = traced_for(family)
    expected = family.velocity
    for rows, called in ((2, []), (1, [1]), (5, [5]), (2, []), (1, [1]), (5, [5])):
        given = inputs(family, rows)
        wanted = expected(*given)
        calls.clear()
        assert torch.equal(velocity(*given), wanted)
        assert calls == called, "another number of rows is another shape, and what is traced is not called"


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
def test_weights_that_were_equal_when_traced_are_told_apart():
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    two.load_state_dict(one.state_dict())
    traced = TracedModule("two", torch.nn.Sequential(one, two))
    x = torch.randn(2, 4)
    for _ in range(TRACE_AFTER + 2):
        traced(lambda x: one(x) + 2 * two(x), (x,), None)
    two.weight.data.mul_(-1)
    assert torch.equal(traced(lambda x: 1 / 0, (x,), None), one(x) + 2 * two(x))


@torch.inference_mode()
def test_decoding_is_traced_and_has_the_same_bits(family, calls):
    if family.vae_has_state:
        pytest.skip("its calls may not be interleaved")
    decode = partial(traced_decode, family, TracedModule("the VAE", family.vae))
    shape = family.latent_shape(*SIZE)
    for _ in range(TRACE_AFTER + 2):
        decode(torch.randn(2, *shape), SIZE)
    latents = torch.randn(2, *shape)
    expected = family.decode(latents, SIZE)
    calls.clear()
    assert torch.equal(decode(latents, SIZE), expected)
    assert calls == []


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
def test_untraceable_modules_are_traced_once():
    traced, calls = TracedModule("a branch", torch.nn.Identity()), []

    def call(x):
        calls.append(1)
        return x * 2 if x.sum() > 0 else x * 3

    x = torch.ones(2, 4)
    for _ in range(TRACE_AFTER + 4):
        assert torch.equal(traced(call, (x,), None), 2 * x)
    assert len(calls) == TRACE_AFTER + 5, "the call that could not be traced is made again"
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
def test_traces_of_many_shapes_are_bounded():
    traced = TracedModule("nothing", torch.nn.Identity())
    for side in range(MAX_SHAPES + 7):
        x = torch.ones(1, side + 1)
        assert torch.equal(traced(lambda x: x * 2, (x,), None), x * 2)
    assert len(traced.shapes) == MAX_SHAPES


@pytest.mark.parametrize("worth_s", [0.0], indirect=True)
@torch.inference_mode()
def test_slow_modules_are_not_traced(family, calls):
    velocity = traced_for(family)
    calls.clear()
    velocity(*inputs(family, 2))
    assert calls == [2]
