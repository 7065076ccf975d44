"""The choice of attention on a real device: an installed backend serves, or its refusal gives a reason."""

from importlib.util import find_spec

import pytest
import torch

from caesura.scheduler.attention.backends import Choice, choose, failure_of
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.runtime.engine_config import EngineConfig

DEVICE = torch.device("cuda", 0)
HEADS = Shape(
    device=DEVICE, dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5
)
LATENTS = Shape(
    device=DEVICE,
    dtype=torch.bfloat16,
    num_heads=16,
    num_kv_heads=1,
    head_dim=576,
    scale=192**-0.5,
    latent=512,
)


@pytest.mark.parametrize("shape", [HEADS, LATENTS], ids=["heads", "latents"])
def test_the_best_installed_backend_serves(shape):
    found = choose(EngineConfig(model_path="m", device="cuda:0"), shape)
    if find_spec("flashinfer") is not None:
        assert (found.by, found.reason) == ("flashinfer", None)
    else:
        expected = "triton" if shape is HEADS and find_spec("triton") else "torch"
        assert found.by == expected
        assert "flashinfer: it is not installed" in (found.reason or "")


def test_the_trial_of_torch_itself_is_exact():
    assert failure_of(Choice("torch"), HEADS) is None
    assert failure_of(Choice("torch"), LATENTS) is None
