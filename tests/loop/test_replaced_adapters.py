"""Adapters tick by tick, on a real model: what waits or runs while one is replaced."""

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.lora import ALL_LINEAR, make_adapter
from support.scripted import EngineDriver

from caesura.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqOutput,
    LoadAdapterReqInput,
    PauseGenerationReqInput,
)

PROMPT = [3 + 7 * i % 90 for i in range(33)]
"""Its last token alone is the second chunk."""
SCORED = {"adapter": "a", "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "base"
    make_checkpoint(path, "qwen3")
    return path


def load(driver: EngineDriver, path: Path, on_running: str = "finish_old") -> None:
    driver.call(LoadAdapterReqInput(name="a", path=str(path), on_running=on_running))


def scores(result: GenerateReqOutput) -> np.ndarray:
    return np.frombuffer(result.input_logprobs, "<f4")[1:]


@pytest.mark.parametrize("on_running", ["retract", "keep"])
@pytest.mark.parametrize("ticks", [1, 2, 4])
def test_prompts_are_scored_by_the_version_that_samples(base, tmp_path, ticks, on_running):
    first, second = (make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2))
    options = {"enable_lora": True, "chunked_prefill_size": 32, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        load(driver, first)
        old = driver.complete(PROMPT, 1, **SCORED)
        rid = driver.generate(PROMPT, 8, **SCORED)
        driver.hear()
        driver.tick(ticks)
        driver.call(PauseGenerationReqInput(mode="retract" if on_running == "retract" else "in_place"))
        load(driver, second, on_running)
        driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        found = driver.result(rid)
        new = driver.complete(PROMPT, 1, **SCORED)
    epochs = [span.adapter_epoch for span in found.weight_versions]
    assert epochs in ([1, 2], [2])
    assert not np.allclose(scores(old), scores(new), atol=1e-3)
    np.testing.assert_allclose(scores(found), scores(old if epochs[0] == 1 else new), atol=1e-5)
