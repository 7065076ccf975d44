"""Linear layers with packed weights: the modules' own results, with the weights of the moment."""

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import AutoencoderKL
from diffusers.models.activations import GELU
from support.kernels import normal
from support.pipelines import make_flux, make_sd3

from caesura.scheduler.images.components import Component, build_component
from caesura.scheduler.images.traced_module import TRACE_AFTER, TracedModule
from caesura.scheduler.kernels import native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels")

CPU = torch.device("cpu")
CLASSES = {"sd3": (make_sd3, "SD3Transformer2DModel"), "flux": (make_flux, "FluxTransformer2DModel")}
CLOSE = {"rtol": 2**-7, "atol": 2**-7}


class Tied(torch.nn.Module):
    """A layer whose weight another one has, one of an odd width, and a GELU of each form with one more."""

    def __init__(self, form):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.odd = torch.nn.Linear(9, 4)
        self.bent = GELU(8, 12, approximate=form)
        self.last = torch.nn.Linear(12, 5, bias=False)

    def forward(self, x):
        return self.last(self.bent(self.second(self.first(x))))


def filled(form, *, packs=True):
    """Return a component of :class:`Tied`; its module without slots that pack if not ``packs``."""
    torch.manual_seed(1)
    module = Tied(form).requires_grad_(False)
    values = {name: value.bfloat16() for name, value in module.state_dict().items()}
    if not packs:
        return module.bfloat16()
    component = Component("it", None, module, torch.bfloat16, CPU)
    for name, slot in component.slots.items():
        slot.update(values[name.removeprefix("it.")], 0)
    return component


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_results_are_those_of_the_modules(form):
    component, theirs = filled(form), filled(form, packs=False)
    packed = {name for name, each in component.module.named_modules() if "forward" in vars(each)}
    assert packed == {"bent", "bent.proj", "last"}
    assert torch.equal(component.slots["it.last.weight"].read(), theirs.last.weight)
    with torch.inference_mode():
        for rows in ((3,), (2, 5), (0,), ()):
            x = normal(7, torch.bfloat16, *rows, 8)
            torch.testing.assert_close(component.module(x), theirs(x), **CLOSE)


def test_columns_may_lie_apart():
    """A VAE gives the pixels of one image so; columns of wider rows are others."""
    component, theirs = filled("tanh"), filled("tanh", packs=False)
    for x in (normal(7, torch.bfloat16, 1, 12, 5).transpose(1, 2), normal(7, torch.bfloat16, 5, 24)[:, ::2]):
        torch.testing.assert_close(component.module.last(x), theirs.last(x), **CLOSE)


@pytest.mark.parametrize("images", [1, 2])
def test_a_vae_with_attention_decodes(images, tmp_path):
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).to(torch.bfloat16).requires_grad_(False)
    vae.save_pretrained(tmp_path)
    component, _ = build_component("vae", tmp_path, "diffusers.AutoencoderKL", torch.bfloat16, CPU)
    for name, value in vae.state_dict().items():
        component.slots[f"vae.{name}"].update(value, 0)
    assert "forward" in vars(component.module.decoder.mid_block.attentions[0].to_q)
    latents = normal(7, torch.bfloat16, images, 4, 3, 5)
    with torch.inference_mode():
        found, expected = (each.decode(latents).sample for each in (component.module, vae))
    assert (found - expected).norm() < 2**-5 * expected.norm()


def test_traces_compute_with_the_weights_of_the_moment():
    component = filled("tanh")
    traced = TracedModule("it", component.module)
    x = normal(7, torch.bfloat16, 3, 8)

    def call(x):
        return component.module(x) + component.module.last(torch.ones(3, 12, dtype=torch.bfloat16))

    with torch.inference_mode():
        for _ in range(TRACE_AFTER + 3):
            before = traced(call, (x,), None)
        (shape,) = traced.shapes.values()
        assert shape.agrees
        slot = component.slots["it.last.weight"]
        slot.update(2 * slot.read(), 0)
        assert torch.equal(traced(call, (x,), None), 2 * before)


@pytest.mark.parametrize("family", CLASSES)
def test_transformers_in_bfloat16_are_packed_and_fused(family, tmp_path):
    make, name = CLASSES[family]
    folder = make(tmp_path / family) / "transformer"
    for dtype in (torch.bfloat16, torch.float16):
        component, _ = build_component("transformer", folder, f"diffusers.{name}", dtype, CPU)
        layers = [each for each in component.module.modules() if type(each) is torch.nn.Linear]
        layers += component.module.transformer_blocks
        assert all(("forward" in vars(each)) == (dtype == torch.bfloat16) for each in layers)
