"""Linear layers with packed weights: the modules' own results, with the weights of the moment."""

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import AutoencoderKL
from diffusers.models.activations import GELU
from support.kernels import instruction_sets, normal
from support.moving_components import PLACES, exhaust
from support.pipelines import make_flux, make_sd3

from caesura.io_struct import CaesuraError
from caesura.scheduler.images.components import Component, build_component
from caesura.scheduler.images.joint_blocks import use_joint_blocks
from caesura.scheduler.images.traced_module import TRACE_AFTER, TracedModule
from caesura.scheduler.kernels import native
from caesura.scheduler.memory.offload import ComponentOffloadStrategy

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels")

CPU = torch.device("cpu")
CLASSES = {"sd3": (make_sd3, "SD3Transformer2DModel"), "flux": (make_flux, "FluxTransformer2DModel")}
CLOSE = {
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)


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


def filled(form, dtype=torch.bfloat16, *, packs=True):
    """Return a component of :class:`Tied`; its module without slots that pack if not ``packs``."""
    torch.manual_seed(1)
    module = Tied(form).requires_grad_(False)
    values = {name: value.to(dtype) for name, value in module.state_dict().items()}
    if not packs:
        return module.to(dtype)
    use_joint_blocks(module)
    component = Component("it", None, module, dtype, CPU)
    for name, slot in component.slots.items():
        slot.update(values[name.removeprefix("it.")], 0)
    return component


def replaced(module):
    return {name for name, each in module.named_modules() if "forward" in vars(each)}


@DTYPES
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_results_are_those_of_the_modules(form, dtype):
    theirs, bent = filled(form, dtype, packs=False), {"bent"} if form == "tanh" else set()
    for isa in instruction_sets():
        component = filled(form, dtype)
        packed = {"bent.proj", "last"}
        if dtype == torch.float32:
            packed = {*packed, "odd"} if isa in ("avx512", "avx512bf16", "amx") else set()
        assert replaced(component.module) == bent | packed
        assert torch.equal(component.slots["it.last.weight"].read(), theirs.last.weight)
        with torch.inference_mode():
            for rows in ((3,), (2, 5), (0,), ()):
                x = normal(7, dtype, *rows, 8)
                torch.testing.assert_close(component.module(x), theirs(x), **CLOSE[dtype])


def test_columns_may_lie_apart():
    """A VAE gives the pixels of one image so; columns of wider rows are others."""
    component, theirs = filled("tanh"), filled("tanh", packs=False)
    for x in (normal(7, torch.bfloat16, 1, 12, 5).transpose(1, 2), normal(7, torch.bfloat16, 5, 24)[:, ::2]):
        torch.testing.assert_close(component.module.last(x), theirs.last(x), **CLOSE[torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("make", PLACES)
def test_moving_weights_are_packed_as_those_that_stay(make, dtype):
    """Rows cross the borders of panels, and are written wherever the weight is."""

    def component(movable=None):
        layers = torch.nn.Sequential(torch.nn.Linear(10, 70), torch.nn.LayerNorm(70)).requires_grad_(False)
        return Component("it", None, layers, dtype, CPU, movable=movable)

    manager, stays = make(), component()
    movable = manager.register("it", ComponentOffloadStrategy())
    with manager.component("it"):
        moves = component(movable)
    movable.divide([])
    slots = [each.slots["it.0.weight"] for each in (moves, stays)]
    x = normal(7, dtype, 3, 10)
    for number, away in enumerate((False, True, True, False, True)):
        exhaust(manager.leave(["it"]) if away else manager.bring(["it"]))
        rows = normal(number, torch.float32, 37, 10)
        assert [slot.update(rows, 20) for slot in slots] == [True, True]
        assert [slot.update(rows, 20) for slot in slots] == [False, False]
        assert torch.equal(*(slot.read(15, 60) for slot in slots))
        for (name, found), (_, wanted) in zip(moves.storage(), stays.storage(), strict=True):
            assert torch.equal(found, wanted), name
        exhaust(manager.bring(["it"]))
        manager.use("it")
        assert torch.equal(moves.module(x), stays.module(x))
    with pytest.raises(CaesuraError, match="one by one"):
        next(slots[0].places(torch.tensor([3])))


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
def test_transformers_are_packed_and_fused(family, tmp_path):
    make, name = CLASSES[family]
    folder = make(tmp_path / family) / "transformer"
    for isa in instruction_sets():
        wide = isa in ("avx512", "avx512bf16", "amx")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            component, _ = build_component("transformer", folder, f"diffusers.{name}", dtype, CPU)
            layers = [each for each in component.module.modules() if type(each) is torch.nn.Linear]
            blocks = [*component.module.transformer_blocks]
            blocks += [each.ff.net[0] for each in blocks]
            packs = dtype == torch.bfloat16 or (dtype == torch.float32 and wide)
            assert all(("forward" in vars(each)) == packs for each in layers)
            assert all(("forward" in vars(each)) == (dtype != torch.float16) for each in blocks)
