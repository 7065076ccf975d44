from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from torch import Tensor


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(path, "qwen3", seed=1)
    return path


@pytest.fixture(scope="session")
def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
