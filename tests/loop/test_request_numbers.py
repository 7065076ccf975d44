"""Numbers out of every range, and at the ends of theirs."""

import pytest
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import BeginWeightUpdateReqInput, GenerateReqInput, SamplingParams


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(tiny_model, request):
    with EngineDriver(str(tiny_model), pipeline_depth=request.param) as driver:
        yield driver


@pytest.mark.parametrize("fields", [
    {"sampling_params": SamplingParams(max_new_tokens=None, min_new_tokens=2**63)},
    {"sampling_params": SamplingParams(max_new_tokens=None, min_new_tokens=2**64 - 1)},
    {"sampling_params": SamplingParams(max_new_tokens=2**64 - 1)},
    {"sampling_params": SamplingParams(top_k=2**64 - 1)},
    {"sampling_params": SamplingParams(max_new_tokens=4, repetition_penalty=1e-40)},
    {"sampling_params": SamplingParams(max_new_tokens=4, repetition_penalty=5e-324)},
    {"logprob_start_len": 2**64 - 1, "return_logprob": True},
    {"logprob_start_len": -(2**63), "return_logprob": True},
    {"top_logprobs_num": 2**64 - 1, "return_logprob": True},
    {"routed_experts_start_len": 2**64 - 1},
    {"min_weights_epoch": 2**64 - 1},
], ids=str)  # fmt: skip
def test_numbers_that_nothing_can_hold_end_their_own_request_only(driver, fields):
    runs = driver.generate([5, 6, 7], 40)
    driver.tick(3)
    message = GenerateReqInput(input_ids=[5, 6], **fields)
    reply = driver.call(message)
    assert reply.code in ("invalid_request", "malformed_message", "prompt_too_long", "epoch_behind")
    driver.run_until_idle()
    assert driver.result(runs).finish_reason.type == "length"


@pytest.mark.parametrize("params", [
    SamplingParams(max_new_tokens=None, min_new_tokens=2**31 - 1, temperature=0.0),
    SamplingParams(max_new_tokens=3, top_p=5e-324),
    SamplingParams(max_new_tokens=3, min_p=5e-324),
    SamplingParams(max_new_tokens=3, temperature=1e-6),
    SamplingParams(max_new_tokens=3, temperature=1e4, repetition_penalty=1e-6),
    SamplingParams(max_new_tokens=3, temperature=1e-6, repetition_penalty=1e-6, frequency_penalty=-2.0),
    SamplingParams(max_new_tokens=3, frequency_penalty=5e-324, presence_penalty=-1e-310),
    SamplingParams(max_new_tokens=3, seed=2**63 - 1, top_k=2**31 - 1, logit_bias={5: 5e-324}),
], ids=str)  # fmt: skip
def test_numbers_at_the_ends_of_their_ranges_are_sampled_with(tiny_model, params):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        result = driver.complete([5, 6, 7, 7, 7], sampling_params=params)
        assert result.finish_reason.type in ("length", "stop"), result.finish_reason
        assert driver.status().step_failures.failed == 0


def test_logits_that_are_not_finite_once_edited_blame_the_edits_too(driver):
    """A request whose logits nothing has edited is told to check the weights, and nothing else."""
    for params, words in (
        (SamplingParams(max_new_tokens=4, repetition_penalty=1e-6), "repetition_penalty = 1e-06"),
        (SamplingParams(max_new_tokens=4), "the model's logits are not finite: check the weights"),
    ):
        driver.runner.non_finite_next = True
        result = driver.complete([5, 6, 7], sampling_params=params)
        assert words in result.finish_reason.message


def test_begin_and_end_of_a_session_have_numbers_in_range(driver):
    begun = driver.call(BeginWeightUpdateReqInput(deadline_s=86400.0))
    driver.end(commit=False, session_id=begun.session_id)
    for endless in (float("inf"), float("nan"), 1e300):
        assert_error(driver.call(BeginWeightUpdateReqInput(deadline_s=endless)), "malformed_message")


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_zero_keeps_all_tokens_as_minus_one_does(driver, top_k):
    """TRL's default is 0, SGLang's is -1; 1 would be greedy."""
    params = SamplingParams(max_new_tokens=20, top_k=top_k, seed=7, ignore_eos=True, temperature=3.0)
    driver.send(GenerateReqInput(rid="r", input_ids=[5, 6, 7], sampling_params=params))
    driver.tick()
    table = driver.engine.batcher.table
    slot = driver.engine.live.samples("r")[0].slot
    assert (table.sampling.top_k[slot], table.sampling.filtered[slot]) == (table.vocab_size, False)
