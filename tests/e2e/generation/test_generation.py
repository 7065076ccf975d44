"""Generation from outside: a launched process, its clients, and transformers as the reference."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from support.checkpoints import FAMILIES, make_checkpoint
from support.lanes import quick

from caesura.client import (
    InvalidRequest,
    PromptTooLong,
    SamplingParams,
    SchedulerClient,
    launch_scheduler,
)

CONTEXT = 256
PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(75)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 2]]
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

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        self.reference.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        found = self.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return found[0, len(prompt) :].tolist()

    def logprobs(self, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        with torch.inference_mode():
            logits = self.reference(torch.tensor([prompt + output])).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
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
def test_greedy_output_and_logprobs_are_those_of_transformers(tmp_path, family):
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


def test_unsupported_requests_are_refused_by_name(float32):
    with pytest.raises(PromptTooLong) as too_long:
        float32.client.generate(PROMPTS[1], SamplingParams(max_new_tokens=CONTEXT))
    assert too_long.value.detail["limit"] == CONTEXT
    with pytest.raises(InvalidRequest) as outside:
        float32.client.generate([3, 97])
    assert (outside.value.detail["field"], outside.value.detail["position"]) == ("input_ids", 1)


def test_a_stream_is_the_result_in_pieces(float32):
    params = SamplingParams(max_new_tokens=24, seed=5, n=3, ignore_eos=True)
    handle = float32.client.submit(PROMPTS[1], params, stream=True, return_logprob=True)
    ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
    logprobs: dict[int, list[float]] = {0: [], 1: [], 2: []}
    deltas = list(handle.deltas())
    for delta in deltas:
        assert delta.start == len(ids[delta.index])
        ids[delta.index] += delta.output_ids
        logprobs[delta.index] += delta.output_logprobs
    for output in handle.results():
        assert ids[output.index] == output.output_ids
        assert logprobs[output.index] == output.output_logprobs
    assert len(deltas) > 24, "tokens were meant to come one by one"


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


def test_status_and_spans_of_a_fresh_engine(float32):
    output = float32.client.generate(PROMPTS[0], GREEDY)
    (span,) = output.weight_versions
    assert (span.version, span.epoch, span.start, span.end, span.stale_kv) == ("default", 0, 0, 20, False)
    assert output.output_logprobs is None
    status = float32.client.status()
    assert (status.generation, status.weights, status.dtype, status.context_len) == (
        "running", "valid", "float32", CONTEXT,
    )  # fmt: skip
    assert status.kv.free + status.kv.cached + status.kv.held == status.kv.total == 4096
    assert status.kv.held == 0


@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path):
    """The example runs as a user would type it, but for the two paths."""
    old, new = tmp_path / "model", tmp_path / "new"
    make_checkpoint(old, "qwen3", seed=1)
    make_checkpoint(new, "qwen3", seed=2)

    with launch_scheduler(model=old, dtype="float32") as client:
        out = client.generate(
            input_ids=[[1, 2, 3], [4, 5]],
            return_logprob=True,
            sampling_params=SamplingParams(max_new_tokens=8, temperature=1.0, seed=7),
        )
        out[0].output_ids, out[0].output_logprobs, out[0].finish_reason.type, out[0].weight_versions
        handle = client.submit(input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=64))
        client.pause("in_place")
        client.update_weights_from_disk(new, weight_version="1", flush_cache=False)
        report = client.continue_generation()
        result = handle.result()
        status = client.status()

    assert len(out) == 2
    for output in out:
        assert 0 < len(output.output_ids) == len(output.output_logprobs) <= 8
        assert all(math.isfinite(value) and value <= 0 for value in output.output_logprobs)
        assert output.finish_reason.type in ("length", "stop")
        assert output.weight_versions[-1].end == len(output.output_ids)
    assert report.freed == max(0, report.reserved_before - report.reserved_after)
    epochs = [span.epoch for span in result.weight_versions]
    assert epochs in ([0], [0, 1], [1])
    assert all(before.end == after.start for before, after in pairwise(result.weight_versions))
    assert (status.generation, status.weights, status.memory) == ("running", "valid", "resident")
    assert (status.weight_version, status.weights_epoch) == ("1", 1)
    assert status.kv.free + status.kv.cached + status.kv.held == status.kv.total
    assert status.device_memory.reserved > 0
