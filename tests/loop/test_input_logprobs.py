"""Log-probabilities of prompts, across commits of weights."""

import numpy as np
import pytest
from support.scripted import EngineDriver

from caesura.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    GenerateReqOutput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)

PROMPT = [3 + i * 7 % 90 for i in range(33)]
EVERY_LOGPROB = {
    "return_logprob": True,
    "return_raw_logprob": True,
    "return_sampled_logprob": True,
    "logprob_start_len": 1,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
}


def engine(tiny_model, chunk: int = 32) -> EngineDriver:
    return EngineDriver(str(tiny_model), scripted=False, chunked_prefill_size=chunk)


def input_logprobs(driver: EngineDriver) -> np.ndarray:
    driver.run_until_idle()
    rid = driver.generate(PROMPT, 2, return_logprob=True, logprob_start_len=1, cache_salt="alone")
    driver.run_until_idle()
    return np.frombuffer(driver.result(rid).input_logprobs, "<f4")


def commit(driver: EngineDriver, path: object) -> None:
    driver.call(UpdateWeightFromDiskReqInput(model_path=str(path), flush_cache=False))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_logprobs_of_a_prompt_are_of_the_weights_that_sample(tiny_model, other_model, mode, parts):
    with engine(tiny_model, 32 // parts) as driver:
        rid = driver.generate(PROMPT, 4, return_logprob=True, logprob_start_len=1, top_logprobs_num=1)
        driver.tick(1)
        request = driver.engine.live.samples(rid)[0]
        assert driver.engine.batcher.table.scheduled[request.slot] == 32 // parts
        driver.call(PauseGenerationReqInput(mode=mode))
        commit(driver, other_model)
        driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        result = driver.result(rid)
        assert [(span.epoch, span.stale_kv) for span in result.weight_versions] == [(1, False)]
        np.testing.assert_allclose(
            np.frombuffer(result.input_logprobs, "<f4"), input_logprobs(driver), atol=1e-5
        )


def test_logprobs_of_a_prompt_stay_with_the_tokens_sampled_after_it(tiny_model, other_model):
    with engine(tiny_model) as driver:
        expected = input_logprobs(driver)
        rid = driver.generate(PROMPT, 8, return_logprob=True, logprob_start_len=1)
        driver.tick(4)
        driver.call(PauseGenerationReqInput(mode="retract"))
        commit(driver, other_model)
        driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        result = driver.result(rid)
        assert [span.epoch for span in result.weight_versions] == [0, 1]
        np.testing.assert_allclose(np.frombuffer(result.input_logprobs, "<f4"), expected, atol=1e-5)


def aborted_after_a_retract(driver: EngineDriver, ticks: int) -> GenerateReqOutput:
    rid = driver.generate(PROMPT, 50, **EVERY_LOGPROB)
    driver.tick(ticks)
    driver.call(PauseGenerationReqInput(mode="retract"))
    driver.call(AbortReq(abort_all=True))
    return driver.result(rid)


@pytest.mark.parametrize("ticks", [1, 2])
def test_an_abort_after_a_retract_gives_no_logprobs_of_a_prompt_that_was_not_computed_to_its_end(
    tiny_model, ticks
):
    with engine(tiny_model, 8) as driver:
        result = aborted_after_a_retract(driver, ticks)
    assert (result.num_retractions, result.output_ids, result.output_logprobs) == (1, b"", b"")
    prompt = (result.input_logprobs, result.input_top_logprobs, result.input_token_ids_logprobs)
    assert prompt == (None, None, None)
    assert result.weight_versions == []


def test_an_abort_after_a_retract_gives_the_logprobs_of_the_tokens_sampled_and_no_others(tiny_model):
    with engine(tiny_model) as driver:
        whole = driver.generate(PROMPT, 50, **EVERY_LOGPROB)
        driver.run_until_idle()
        whole = driver.result(whole)
        part = aborted_after_a_retract(driver, 6)
    count = len(part.output_ids) // 4
    assert (part.num_retractions, 0 < count < 50) == (1, True)
    assert sum(span.end - span.start for span in part.weight_versions) == count
    for name in ("output_ids", "output_logprobs", "raw_logprobs", "sampled_logprobs"):
        assert len(getattr(part, name)) == 4 * count, name
        assert getattr(part, name) == getattr(whole, name)[: 4 * count], name
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        found, expected = getattr(part, name), getattr(whole, name)
        assert found.logprobs == expected.logprobs[: 4 * found.k * count], name
    assert part.input_logprobs[4:] == whole.input_logprobs[4:]  # the first is no number
