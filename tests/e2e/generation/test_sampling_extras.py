"""Penalties, min_new_tokens and log-probabilities of prompts from outside."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import make_checkpoint

from caesura.client import InvalidRequest, SamplingParams, SchedulerClient, TokenLogprobs, launch_scheduler

LONG = [3 + i * 7 % 90 for i in range(75)]
PROMPTS = [[5, 6, 7], LONG, [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 11]]
CLOSE = 1e-4


@dataclass
class Served:
    """An engine process, and the transformers model of the same folder in float32."""

    client: SchedulerClient
    path: Path
    reference: transformers.PreTrainedModel

    def greedy(self, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        found = self.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return found[0, len(prompt) :].tolist()

    def rows(self, tokens: list[int]) -> torch.Tensor:
        """Return the log-softmax [tokens, vocabulary] after each of ``tokens``."""
        with torch.inference_mode():
            return torch.log_softmax(self.reference(torch.tensor([tokens])).logits[0].float(), -1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen3"
    reference = make_checkpoint(path, "qwen3", seed=3)
    reference.generation_config.eos_token_id = None
    first = Served(None, path, reference).greedy(PROMPTS[0], 3)[1]
    reference = make_checkpoint(path, "qwen3", seed=3, eos_token_id=first)
    reference.generation_config.eos_token_id = first
    with launch_scheduler(
        path, dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=4096, chunked_prefill_size=32,
        check_ledger=True, log_level="WARNING",
    ) as client:  # fmt: skip
        yield Served(client, path, reference)


@pytest.mark.parametrize("penalty", [0.6, 1.2, 1.8])
def test_repetition_penalty_equals_transformers(served, penalty):
    params = SamplingParams(max_new_tokens=24, temperature=0.0, repetition_penalty=penalty)
    outputs = served.client.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.output_ids == served.greedy(prompt, 24, repetition_penalty=penalty)


@pytest.mark.parametrize("least", [1, 2, 9])
def test_min_new_tokens_equals_transformers(served, least):
    params = SamplingParams(max_new_tokens=12, temperature=0.0, min_new_tokens=least)
    outputs = served.client.generate(PROMPTS, params)
    expected = [served.greedy(prompt, 12, min_new_tokens=least) for prompt in PROMPTS]
    assert [output.output_ids for output in outputs] == expected
    unbound = served.client.generate(PROMPTS[0], SamplingParams(max_new_tokens=12, temperature=0.0))
    assert len(unbound.output_ids) == 2, "without it, this sample ends at its second token"
    assert len(expected[0]) > least


def test_logit_bias_and_stop_ids(served):
    forced = SamplingParams(
        max_new_tokens=6, temperature=0.0, logit_bias={40: 100.0}, stop_token_ids=[40], min_new_tokens=2
    )
    output = served.client.generate(PROMPTS[3], forced)
    assert 40 not in output.output_ids[:2]
    assert output.output_ids[2:] == [40]
    assert (output.finish_reason.type, output.finish_reason.matched) == ("stop", 40)


def test_min_p_keeps_the_likeliest(served):
    hot = SamplingParams(max_new_tokens=10, temperature=5.0, seed=3, min_p=1.0, ignore_eos=True)
    cold = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
    found, best = (served.client.generate(PROMPTS, params) for params in (hot, cold))
    assert [output.output_ids for output in found] == [output.output_ids for output in best]


def inputs_of(served: Served, prompt: list[int], start: int, **options: Any):
    params = SamplingParams(max_new_tokens=3, temperature=0.5, seed=1, logit_bias={4: 2.0}, ignore_eos=True)
    return served.client.generate(
        prompt, params, return_logprob=True, logprob_start_len=start, top_logprobs_num=3,
        token_ids_logprob=[8, 2, 77], **options,
    )  # fmt: skip


def check_inputs(served: Served, prompt: list[int], start: int, output) -> None:
    rows = served.rows(prompt)[start:-1]
    following = torch.tensor(prompt[start + 1 :])
    assert output.input_logprobs[0] is None
    expected = rows.gather(1, following[:, None])[:, 0].tolist()
    assert output.input_logprobs[1:] == pytest.approx(expected, abs=CLOSE)
    best = rows.topk(3, 1)
    assert output.input_top_logprobs.logprobs == pytest.approx(best.values.flatten().tolist(), abs=CLOSE)
    assert output.input_token_ids_logprobs.ids == [8, 2, 77] * len(rows)
    assert output.input_token_ids_logprobs.logprobs == pytest.approx(
        rows[:, [8, 2, 77]].flatten().tolist(), abs=CLOSE
    )
    assert len(output.input_top_logprobs) == len(output.input_token_ids_logprobs) == len(rows)


@pytest.mark.parametrize("start", [0, 1, 31, 32, 50, 73, 74])
def test_prompt_logprobs_equal_transformers(served, start):
    salt = f"start-{start}"
    check_inputs(served, LONG, start, inputs_of(served, LONG, start, cache_salt=salt))
    again = inputs_of(served, LONG, start, cache_salt=salt)
    check_inputs(served, LONG, start, again)
    assert again.cached_tokens == min(start // 16, 4) * 16, "what lies before the start comes from the cache"


@pytest.mark.parametrize("start", [-1, 75, 400])
def test_no_prompt_logprobs(served, start):
    output = inputs_of(served, LONG, start, cache_salt="warm")
    assert output.input_logprobs is output.input_top_logprobs is output.input_token_ids_logprobs is None
    assert len(output.output_top_logprobs) == 3
    plain = served.client.generate(
        LONG, logprob_start_len=0, top_logprobs_num=2, sampling_params=SamplingParams(max_new_tokens=1)
    )
    assert plain.input_logprobs is plain.output_top_logprobs is None, "they are part of return_logprob"


def test_samples_of_one_prompt_have_the_same_prompt_logprobs(served):
    outputs = served.client.generate(
        LONG, SamplingParams(max_new_tokens=2, n=3), return_logprob=True, logprob_start_len=40
    )
    rows = served.rows(LONG)
    expected = [rows[at, LONG[at + 1]].item() for at in range(40, 74)]
    for output in outputs:
        assert output.input_logprobs[1:] == pytest.approx(expected, abs=CLOSE)


def test_pauses_change_no_number(served):
    params = SamplingParams(max_new_tokens=60, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    wanted = {"return_logprob": True, "logprob_start_len": 10, "top_logprobs_num": 2}
    calm = served.client.generate(LONG, params, cache_salt="calm", **wanted)
    for mode in ("retract", "in_place"):
        handle = served.client.submit(LONG, params, stream=True, cache_salt=mode, **wanted)
        served.client.pause(mode)
        served.client.continue_generation()
        next(iter(handle))
        served.client.pause(mode)
        served.client.continue_generation()
        output = handle.result()
        assert output.output_ids == calm.output_ids
        assert output.output_logprobs == pytest.approx(calm.output_logprobs, abs=CLOSE)
        assert output.output_top_logprobs.ids == calm.output_top_logprobs.ids
        assert output.input_logprobs[1:] == pytest.approx(calm.input_logprobs[1:], abs=CLOSE)
        assert output.num_retractions >= (mode == "retract")


def test_streams_carry_the_fields_of_results(served):
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=5, presence_penalty=0.5, ignore_eos=True)
    handle = served.client.submit(
        PROMPTS[0], params, stream=True, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[1]
    )
    deltas = list(handle)
    output = handle.result()
    assert sum(len(delta.output_top_logprobs) for delta in deltas) == 9
    assert [x for delta in deltas for x in delta.output_top_logprobs.ids] == output.output_top_logprobs.ids
    assert [
        x for delta in deltas for x in delta.output_token_ids_logprobs.logprobs
    ] == output.output_token_ids_logprobs.logprobs
    assert output.output_top_logprobs.at(0)[0][0] >= output.output_logprobs[0] - 1e-6
    first_three: TokenLogprobs = output.output_top_logprobs.cut(0, 3)
    assert len(first_three) == 3 and first_three.at(2) == output.output_top_logprobs.at(2)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 2.1}, "repetition_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"logit_bias": {97: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ],
)
def test_bad_parameters_are_refused_by_name(served, params, field):
    with pytest.raises(InvalidRequest) as refused:
        served.client.generate([5], SamplingParams(**params))
    assert refused.value.detail["field"] == f"sampling_params.{field}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_logprobs_num": 98}, "top_logprobs_num"),
        ({"top_logprobs_num": 129}, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"token_ids_logprob": [5, 97]}, "token_ids_logprob"),
        ({"token_ids_logprob": [1] * 1025}, "token_ids_logprob"),
        ({"token_ids_logprob": [True]}, "token_ids_logprob"),
    ],
)
def test_bad_wishes_are_refused_by_name(served, fields, named):
    with pytest.raises(InvalidRequest, match=named):
        served.client.generate([5], return_logprob=True, **fields)
