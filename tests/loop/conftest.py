"""Fixtures of several files: engines, and pipelines that are written once and read by all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lanes import quick
from support.scripted import EngineDriver

from caesura.scheduler.memory import residency


@pytest.fixture(params=quick([1, 0]), ids=["depth1", "depth0"])
def depth(request: pytest.FixtureRequest) -> int:
    """Return the depth of the pipeline: 0 is that of all engines that are given none."""
    return request.param


@pytest.fixture
def driver(tiny_model: Path) -> Iterator[EngineDriver]:
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


@pytest.fixture(scope="session")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that lacks a layer of the other models."""
    from support.checkpoints import make_checkpoint  # imports transformers, for seconds

    path = tmp_path_factory.mktemp("models") / "broken"
    make_checkpoint(path, "qwen3", tied=True, seed=2, num_hidden_layers=1)
    return path


@pytest.fixture(params=["mapped", "storage"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release memory as a machine does that has the mapping for it, and as one that has not."""
    if request.param == "storage":
        monkeypatch.setattr(residency, "_plain", lambda device: residency.StorageComponent)


@pytest.fixture(scope="session")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _sd3(tmp_path_factory, "sd3", seed=0)


@pytest.fixture(scope="session")
def other_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _sd3(tmp_path_factory, "other", seed=20)


@pytest.fixture
def painter(sd3: Path) -> Iterator[EngineDriver]:
    with EngineDriver(str(sd3), scripted=False, max_running_requests=8) as driver:
        yield driver


@pytest.fixture
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace the calls of a pipeline's modules when they come a second time."""
    from caesura.scheduler.images import traced_module  # imports diffusers, for seconds

    monkeypatch.setattr(traced_module, "TRACE_AFTER", 1)
    monkeypatch.setattr(traced_module, "WORTH_S", float("inf"))


def _sd3(tmp_path_factory: pytest.TempPathFactory, name: str, *, seed: int) -> Path:
    pytest.importorskip("diffusers")
    from support.pipelines import make_sd3  # imports diffusers, for seconds, which most tests do without

    return make_sd3(tmp_path_factory.mktemp("pipelines") / name, seed=seed)
