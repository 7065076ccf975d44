"""Products of diffusers' modules: the modules' own results, by oneDNN where it is faster."""

from copy import deepcopy

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers.models.activations import GELU
from support.pipelines import make_flux, make_sd3
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from caesura.scheduler.images.components import build_component
from caesura.scheduler.images.onednn import use_onednn

CPU = torch.device("cpu")
CLASSES = {"sd3": (make_sd3, "SD3Transformer2DModel"), "flux": (make_flux, "FluxTransformer2DModel")}


class Noted(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.add(function)
        return function(*args, **(kwargs or {}))


def layers_of(tmp_path, family, dtype):
    make, name = CLASSES[family]
    folder = make(tmp_path / family) / "transformer"
    component, _ = build_component("transformer", folder, f"diffusers.{name}", dtype, CPU)
    return [each.ff.net for each in component.module.transformer_blocks]


@pytest.mark.parametrize("family", CLASSES)
def test_products_in_float32_are_done_by_the_fastest(family, tmp_path):
    for dtype in (torch.float32, torch.float16):
        first, _, second = layers_of(tmp_path, family, dtype)[0]
        as_it_was = dtype == torch.float16
        for layer in (first, second):
            assert ("forward" not in vars(layer)) == as_it_was


@pytest.mark.parametrize("least", [None, 0, 15 * 33 * 70])
def test_onednn_computes_products_from_a_size_on(least):
    module = torch.nn.Sequential(GELU(33, 70, approximate="none"), torch.nn.Linear(70, 17))
    use_onednn(module, least)
    for rows, by_onednn in ((15, least is not None), (5, least == 0)):
        with Noted() as noted, torch.inference_mode():
            module[0](torch.randn(rows, 33))
        assert (functional.linear not in noted.called) == by_onednn


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("least", [None, 0])
def test_results_are_those_of_the_modules(form, least):
    module = torch.nn.Sequential(GELU(33, 70, approximate=form), torch.nn.Linear(70, 17, bias=False))
    changed = deepcopy(module)
    use_onednn(changed, least)
    with torch.inference_mode():
        module[1].weight.mul_(2)
        changed[1].weight.mul_(2)  # as an update does
        for rows in ((3,), (2, 5), (0,), ()):
            x = torch.randn(*rows, 33)
            torch.testing.assert_close(changed(x), module(x), rtol=1e-5, atol=1e-5)
