"""A device that is full: allocations of a large prefill really fail, and the prompt is computed in pieces."""

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.scripted import EngineDriver

from caesura.io_struct import GenerateReqInput, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOM = 96 << 20
"""Bytes left on the device; the feed-forward block takes 118 MB for the whole prompt, 64 KB for a token of
it.
"""
LARGE = [3 + (i * 7 + i * i % 11) % 90 for i in range(1800)]
PROMPTS = [[5, 6, 7], [8, 9], LARGE]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model"
    make_checkpoint(
        path, "qwen3", seed=3, hidden_size=64, intermediate_size=8192, max_position_embeddings=4096
    )
    return str(path)


def outputs(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    rids = []
    for prompt in PROMPTS:
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        rids.append(driver.submit(message))
    found = driver.finish(rids)
    assert {driver.result(rid).finish_reason.type for rid in rids} == {"length"}
    assert driver.status().kv.held == 0
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_a_full_device(model, depth):
    options = {"device": "cuda", "pipeline_depth": depth, "prefix_cache": False, "kv_pool_tokens": 8192}
    with EngineDriver(
        model, scripted=False, chunked_prefill_size=2048, max_running_requests=8, **options
    ) as driver:
        driver.generate([5, 6, 7], 4)  # what a first step allocates is there
        driver.run_until_idle()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free - ROOM, dtype=torch.uint8, device="cuda")
        found = outputs(driver)
        failures = driver.status().step_failures
        assert 0 < failures.splits == failures.failed <= 16
        del filler
        torch.cuda.empty_cache()
        expected = outputs(driver)
        assert driver.status().step_failures.failed == failures.failed
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, rel=0, abs=1e-3)
