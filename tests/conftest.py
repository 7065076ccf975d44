"""Fixtures shared by all tests."""

import signal
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint

torch.set_num_threads(1)  # tests, engines and trainers share two cores
# Started in the background of a shell, this process would ignore Ctrl-C, and with it every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 checkpoint in float32: vocabulary 97, context 256."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(path, "qwen3", tied=True, seed=1)
    return path


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights: what an update brings."""
    path = tmp_path_factory.mktemp("models") / "other"
    make_checkpoint(path, "qwen3", tied=True, seed=2)
    return path
