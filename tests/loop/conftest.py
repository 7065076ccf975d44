"""Pipelines that several files of image tests share: written once, read by every engine."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _sd3(tmp_path_factory, "sd3", seed=0)


@pytest.fixture(scope="session")
def other_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _sd3(tmp_path_factory, "other", seed=20)


def _sd3(tmp_path_factory: pytest.TempPathFactory, name: str, *, seed: int) -> Path:
    pytest.importorskip("diffusers")
    from support.pipelines import make_sd3  # imports diffusers, for seconds, which most tests do without

    return make_sd3(tmp_path_factory.mktemp("pipelines") / name, seed=seed)
