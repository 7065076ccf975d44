"""Generation from outside: a launched process, its clients, and transformers as the reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import FAMILIES, make_checkpoint
from support.lanes import quick

from caesura.client import InvalidRequest, SamplingParams, SchedulerClient, TokenLogprobs, launch_scheduler

CONTEXT = 256
PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(75)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 11]]
LONG = PROMPTS[1]
CLOSE = 1e-4
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)


@dataclass
class Served:
    """An engine process on a checkpoint, and the transformers model of the same folder in float32."""

    client: SchedulerClient
    path: Path
    reference: transformers.PreTrainedModel

    @property
    def eos(self) -> int:
        return self.reference.config.eos_token_id

    def greedy(self, prompt: list[int], new_tokens: int, *, stops: bool = False, **options: Any) -> list[int]:
        self.reference.generation_config.eos_token_id = self.eos if stops else None
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

    def rows(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-softmax [tokens, vocabulary] after each of ``tokens``."""
        with torch.inference_mode():
            return torch.log_softmax(
                self.reference(torch.tensor([tokens])).logits[0].float() / temperature, dim=-1
            )

    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        rows = self.rows(prompt + output, temperature)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def serve(path: Path, dtype: str, **options: object):
    return launch_scheduler(
        path, dtype=dtype, device="cpu", num_threads=1, kv_pool_tokens=4096, chunked_prefill_size=32,
        check_ledger=True, log_level="WARNING", **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen3"
    reference = make_checkpoint(path, "qwen3", seed=3)
    unstopped = Served(None, path, reference).greedy(PROMPTS[0], 20)
    eos = next(token for i, token in enumerate(unstopped) if i >= 4 and token not in unstopped[:i])
    reference = make_checkpoint(path, "qwen3", seed=3, eos_token_id=eos)
    with serve(path, "float32") as client:
        yield Served(client, path, reference)


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "bf16"
    reference = make_checkpoint(path, "qwen3", seed=3, dtype=torch.bfloat16).float()
    with serve(path, "bfloat16") as client:
        yield Served(client, path, reference)


def assert_close(found: list[float], expected: list[float], tolerance: float) -> None:
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected)) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("family", quick(FAMILIES, 2))
def test_greedy_output_is_that_of_transformers(tmp_path, family):
    served = Served(None, tmp_path, make_checkpoint(tmp_path, family, seed=5, tied=family == "llama"))
    with serve(tmp_path, "float32") as client:
        outputs = client.generate(PROMPTS, GREEDY, return_logprob=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.output_ids == served.greedy(prompt, 20)
        assert output.prompt_tokens == len(prompt)
        assert output.finish_reason.type == "length"
        assert_close(output.output_logprobs, served.logprobs(prompt, output.output_ids), 1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_sampled_tokens(float32, temperature):
    params = SamplingParams(max_new_tokens=24, temperature=temperature, top_k=7, seed=3, ignore_eos=True)
    outputs = float32.client.generate(
        PROMPTS, params, return_logprob=True, return_raw_logprob=True, return_sampled_logprob=True
    )
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = output.output_ids
        assert_close(output.output_logprobs, float32.logprobs(prompt, ids, temperature), 1e-4)
        assert_close(output.raw_logprobs, float32.logprobs(prompt, ids), 1e-4)
        shares = [s - f for s, f in zip(output.sampled_logprobs, output.output_logprobs)]
        assert all(share >= -1e-5 for share in shares), "renormalising over fewer tokens only adds"
        assert max(shares) > 0.01


def test_bfloat16_is_close_to_float32_on_the_same_values(bfloat16):
    params = SamplingParams(max_new_tokens=24, seed=3, ignore_eos=True)
    outputs = bfloat16.client.generate(PROMPTS, params, return_logprob=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_close(output.output_logprobs, bfloat16.logprobs(prompt, output.output_ids), 0.15)
    assert bfloat16.client.status().dtype == "bfloat16"


def test_a_seed_reproduces_its_tokens(float32):
    def sample(seed: int | None):
        params = SamplingParams(max_new_tokens=24, seed=seed, ignore_eos=True)
        return float32.client.generate(PROMPTS[1], params, return_logprob=True)

    first, again, other, drawn = sample(11), sample(11), sample(12), sample(None)
    assert (first.output_ids, first.seed) == (again.output_ids, 11)
    assert_close(first.output_logprobs, again.output_logprobs, 1e-4)
    assert first.output_ids != other.output_ids
    assert sample(drawn.seed).output_ids == drawn.output_ids
    assert sample(None).seed != drawn.seed


def test_sample_i_depends_on_the_seed_and_i_only(float32):
    client = float32.client

    def samples(n: int):
        params = SamplingParams(max_new_tokens=16, seed=21, n=n, ignore_eos=True)
        found = client.submit(PROMPTS[3], params).results()
        assert [output.index for output in found] == list(range(n))
        return [output.output_ids for output in found]

    five = samples(5)
    assert len({tuple(ids) for ids in five}) == 5
    load = [client.submit(prompt, SamplingParams(max_new_tokens=150, ignore_eos=True)) for prompt in PROMPTS]
    assert samples(3) == five[:3]
    assert samples(1) == five[:1]
    assert not all(handle.done() for handle in load), "the load was meant to last"
    client.abort(abort_all=True)
    assert {handle.result().finish_reason.type for handle in load} == {"abort"}


def test_end_of_sequence_and_stop_ids(float32):
    prompt, client, eos = PROMPTS[0], float32.client, float32.eos
    unstopped = client.generate(prompt, GREEDY).output_ids
    until_eos = unstopped[: unstopped.index(eos) + 1]
    assert 4 < len(until_eos) < 20

    def generate(**fields: object):
        params = SamplingParams(max_new_tokens=20, temperature=0.0, **fields)
        output = client.generate(prompt, params)
        return output.output_ids, output.finish_reason.type, output.finish_reason.matched

    assert generate() == (until_eos, "stop", eos)
    assert generate(ignore_eos=True) == (unstopped, "length", None)
    stop = next(token for i, token in enumerate(until_eos) if i >= 2 and token not in until_eos[:i])
    until_stop = until_eos[: until_eos.index(stop) + 1]
    assert generate(stop_token_ids=[stop, eos]) == (until_stop, "stop", stop)
    assert generate(stop_token_ids=[stop], ignore_eos=True) == (until_stop, "stop", stop)
    unused = next(token for token in range(97) if token not in unstopped)
    assert generate(stop_token_ids=[unused], ignore_eos=True) == (unstopped, "length", None)


def test_without_a_limit_it_runs_to_the_end_of_the_context(float32):
    params = SamplingParams(max_new_tokens=None, ignore_eos=True, seed=1)
    output = float32.client.generate(PROMPTS[1], params)
    assert len(output.output_ids) == CONTEXT - len(PROMPTS[1])
    assert output.finish_reason.type == "length"


def test_batched_requests_equal_single_ones(float32):
    client = float32.client
    client.flush_cache(timeout_s=30)
    prompts = [[3 + (i * i + j * 5) % 90 for j in range(1 + 9 * i)] for i in range(16)]
    prompts += [prompts[-1][:100], prompts[-1], prompts[-1] + [5]]
    outputs = client.generate(prompts, GREEDY, return_logprob=True)
    assert sum(output.cached_tokens for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.output_ids == float32.greedy(prompt, 20)
        assert_close(output.output_logprobs, float32.logprobs(prompt, output.output_ids), 1e-4)


@pytest.mark.parametrize("penalty", quick([1.8, 0.6, 1.2], 2))
def test_repetition_penalty_equals_transformers(float32, penalty):
    params = SamplingParams(max_new_tokens=24, temperature=0.0, repetition_penalty=penalty)
    outputs = float32.client.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.output_ids == float32.greedy(prompt, 24, stops=True, repetition_penalty=penalty)


@pytest.mark.parametrize("least", quick([9, 1, 16]))
def test_min_new_tokens_equals_transformers(float32, least):
    params = SamplingParams(max_new_tokens=20, temperature=0.0, min_new_tokens=least)
    outputs = float32.client.generate(PROMPTS, params)
    expected = [float32.greedy(prompt, 20, stops=True, min_new_tokens=least) for prompt in PROMPTS]
    assert [output.output_ids for output in outputs] == expected
    unbound = float32.greedy(PROMPTS[0], 20, stops=True)
    assert len(expected[0]) > max(least, len(unbound) - 1)


def inputs_of(float32: Served, prompt: list[int], start: int, **options: Any):
    params = SamplingParams(max_new_tokens=3, temperature=0.5, seed=1, logit_bias={4: 2.0}, ignore_eos=True)
    return float32.client.generate(
        prompt, params, return_logprob=True, logprob_start_len=start, top_logprobs_num=3,
        token_ids_logprob=[8, 2, 77], **options,
    )  # fmt: skip


def check_inputs(float32: Served, prompt: list[int], start: int, output) -> None:
    rows = float32.rows(prompt)[start:-1]
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


@pytest.mark.parametrize("start", quick([0, 32, 74, 1, 31, 50, 73], 3))
def test_prompt_logprobs_equal_transformers(float32, start):
    salt = f"start-{start}"
    check_inputs(float32, LONG, start, inputs_of(float32, LONG, start, cache_salt=salt))
    again = inputs_of(float32, LONG, start, cache_salt=salt)
    check_inputs(float32, LONG, start, again)
    assert again.cached_tokens == 64, "an equal prompt is scored once"


def test_no_prompt_logprobs(float32):
    for start in (-1, 75, 400):
        output = inputs_of(float32, LONG, start, cache_salt="warm")
        assert output.input_logprobs is output.input_top_logprobs is output.input_token_ids_logprobs is None
        assert len(output.output_top_logprobs) == 3
    plain = float32.client.generate(
        LONG, logprob_start_len=0, top_logprobs_num=2, sampling_params=SamplingParams(max_new_tokens=1)
    )
    assert plain.input_logprobs is plain.output_top_logprobs is None, "they are part of return_logprob"


def test_streams_carry_the_fields_of_results(float32):
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=5, presence_penalty=0.5, ignore_eos=True)
    handle = float32.client.submit(
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


MISTAKES = [
    ({"top_logprobs_num": 98}, "top_logprobs_num"),
    ({"top_logprobs_num": 129}, "top_logprobs_num"),
    ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ({"logprob_start_len": -2}, "logprob_start_len"),
    ({"token_ids_logprob": [5, 97]}, "token_ids_logprob"),
    ({"token_ids_logprob": [1] * 1025}, "token_ids_logprob"),
    ({"token_ids_logprob": [True]}, "token_ids_logprob"),
]


def test_bad_wishes_are_refused_by_name(float32):
    for fields, named in MISTAKES:
        with pytest.raises(InvalidRequest, match=named):
            float32.client.generate([5], return_logprob=True, **fields)
