"""Blocks of image and text: diffusers' own results, by fewer operations."""

from copy import deepcopy

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from caesura.scheduler.images.joint_blocks import use_joint_blocks
from caesura.scheduler.kernels import native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels")

BLOCKS = {
    "sd3": lambda: JointTransformerBlock(32, 2, 16, qk_norm="rms_norm"),
    "without norms": lambda: JointTransformerBlock(32, 2, 16),
    "last": lambda: JointTransformerBlock(32, 2, 16, context_pre_only=True, qk_norm="rms_norm"),
    "flux": lambda: FluxTransformerBlock(32, 2, 16),
}


class Noted(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.add(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("samples", [1, 3])
def test_blocks_have_the_results_of_diffusers(kind, samples):
    torch.manual_seed(0)
    block = BLOCKS[kind]().eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    changed = deepcopy(block)
    use_joint_blocks(changed)
    with torch.inference_mode():
        for each in (block, changed):
            each.ff.net[2].weight.mul_(2)  # as an update does
        image, text, temb = torch.randn(samples, 9, 32), torch.randn(samples, 5, 32), torch.randn(samples, 32)
        with Noted() as noted:
            found = changed(image, text, temb)
        expected = block(image, text, temb)
    assert functional.layer_norm not in noted.called
    assert (found[0] is None) == (kind == "last")
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_in_bfloat16_are_as_exact_as_diffusers(kind):
    torch.manual_seed(0)
    exact = BLOCKS[kind]().eval()
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    exact.bfloat16().float()
    theirs, ours = (deepcopy(exact).bfloat16() for _ in range(2))
    use_joint_blocks(ours)
    given = [torch.randn(*size).bfloat16() for size in ((3, 9, 32), (3, 5, 32), (3, 32))]
    with torch.inference_mode():
        found = [block(*given) for block in (ours, theirs)]
        expected = exact(*(each.float() for each in given))
    for ours, theirs, right in zip(*found, expected, strict=True):
        if right is not None:
            assert ours.dtype == torch.bfloat16
            errors = [(each.float() - right).square().mean() for each in (ours, theirs)]
            assert errors[0] <= 1.2 * errors[1]


def test_blocks_of_another_form_are_left_to_diffusers():
    dual = JointTransformerBlock(32, 2, 16, qk_norm="rms_norm", use_dual_attention=True).eval()
    use_joint_blocks(dual)
    with torch.inference_mode(), Noted() as noted:
        dual(torch.randn(1, 9, 32), torch.randn(1, 5, 32), torch.randn(1, 32))
    assert functional.layer_norm in noted.called
