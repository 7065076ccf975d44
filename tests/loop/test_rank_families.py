"""Models of other families than llama on two ranks."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.rank_updates import UPDATES, checksums
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

pytestmark = pytest.mark.slow  # workers take seconds to start

LENGTHS = (100, 30, 200, 210, 180, 170, 205, 90)
"""Of prompts: twice as many tokens as layers with a window have pages for, so pages beyond theirs are in use.
"""


def sampled(path: str, tp: int) -> tuple[list[list[int]], np.ndarray]:
    options = {"chunked_prefill_size": 48, "max_running_requests": 2, "kv_pool_tokens": 16384}
    with EngineDriver(path, scripted=False, tp=tp, **options) as driver:
        messages = [
            GenerateReqInput(
                input_ids=[3 + (7 * token + number) % 90 for token in range(length)],
                sampling_params=SamplingParams(
                    max_new_tokens=40, temperature=1.0, seed=number, ignore_eos=True
                ),
                return_logprob=True,
            )
            for number, length in enumerate(LENGTHS)
        ]
        for message in messages:
            driver.send(message)
        driver.run_until_idle()
        results = [driver.result(message.id) for message in messages]
        driver.engine.cache.check()
    logprobs = np.stack([np.frombuffer(result.output_logprobs, np.float32) for result in results])
    return [tokens_of(result) for result in results], logprobs


@pytest.mark.parametrize("family", quick(["gemma3", "gpt-oss"]))
def test_layers_with_a_window_have_their_own_pages_on_every_rank(family, tmp_path):
    make_checkpoint(tmp_path, family, seed=1)
    tokens, logprobs = sampled(str(tmp_path), 1)
    found, close = sampled(str(tmp_path), 2)
    assert found == tokens
    np.testing.assert_allclose(close, logprobs, atol=1e-4)


@dataclass
class Engine:
    """Of two ranks, and what it is to become."""

    driver: EngineDriver
    first: Path
    second: Path
    cold: dict[str, str]
    """Checksums of an engine that was started with the second."""


@pytest.fixture(scope="module", params=quick(["qwen3.5", "qwen3-next", "deepseek-v3", "gpt-oss", "gemma3"]))
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    paths = [folder / "first", folder / "second"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, request.param, seed=seed)
    with EngineDriver(str(paths[1]), scripted=False, tp=2, kv_pool_tokens=1024) as driver:
        cold = checksums(driver)
    with EngineDriver(str(paths[0]), scripted=False, tp=2, kv_pool_tokens=1024) as driver:
        yield Engine(driver, *paths, cold)


@pytest.mark.parametrize("send", UPDATES)
def test_an_update_is_a_cold_load_on_every_rank(engine, send):
    driver = engine.driver
    driver.call(UpdateWeightFromDiskReqInput(model_path=str(engine.first)), max_ticks=100_000)
    assert checksums(driver) != engine.cold
    reply = send(driver, engine.second)
    assert reply.committed, reply
    assert checksums(driver) == engine.cold
    driver.call(ContinueGenerationReqInput(force=True))
