"""Elementwise, rotation and expert kernels in Triton on a device, against torch there."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from caesura.scheduler.kernels import why_not_triton

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

LAYERS = Path(__file__).parents[1] / "unit" / "scheduler" / "kernels" / "test_triton_layers.py"


def test_triton_serves():
    assert why_not_triton(torch.device("cuda", 0)) is None


def test_the_kernels_round_as_torch_does():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", LAYERS],
        env={**os.environ, "CAESURA_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
