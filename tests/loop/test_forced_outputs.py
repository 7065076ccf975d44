"""Replays: the numbers of a given output are those that sampling it gave."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.faults import NO_MEMORY, Fault
from support.lanes import quick
from support.lora import make_adapter
from support.scripted import EngineDriver, prompt_of, tokens_of

from caesura.io_struct import GenerateReqInput, GenerateReqOutput, LoadAdapterReqInput, SamplingParams
from caesura.scheduler.kernels import TORCH, best

needs_kernels = pytest.mark.skipif(
    best("linear", "cpu", torch.float32) == TORCH, reason="no compiled kernels on this machine"
)
NEW = 24
PLAIN = {"return_logprob": True, "return_raw_logprob": True, "return_sampled_logprob": True}
DETAILS = {
    **PLAIN, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 9],
    "return_sampling_mask": True,
}  # fmt: skip
PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0}, PLAIN),
    ({"temperature": 1.3}, PLAIN),
    ({"temperature": 0.7, "top_p": 0.9}, PLAIN),
    ({"top_k": 5, "min_p": 0.02}, DETAILS),
    ({"temperature": 0.0, "logit_bias": {7: 3.0}}, DETAILS),
    ({"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.2}, DETAILS),
    (
        {"min_new_tokens": 9, "bad_words_ids": [[5, 6], [6, 7, 8]], "allowed_token_ids": list(range(3, 50))},
        PLAIN,
    ),
]
PROMPTS = [prompt_of(length, length) for length in (40, 1, 17, 33, 64, 100, 20)]
OF_THE_RUN = ("rid", "cached_tokens", "num_retractions", "queue_time", "e2e_latency", "seed")


def work(**more: Any) -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    found = []
    for number, (prompt, (fields, asked)) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=number, **fields)
        found.append((prompt, params, {**asked, **more}))
    return found


def sampled(driver: EngineDriver, **more: Any) -> list[GenerateReqOutput]:
    rids = [
        driver.generate(prompt, sampling_params=params, **asked) for prompt, params, asked in work(**more)
    ]
    driver.run_until_idle()
    return [driver.result(rid) for rid in rids]


def replay(driver: EngineDriver, outputs: list[GenerateReqOutput], **more: Any) -> list[str]:
    """Start replays of ``outputs``, of other lengths than ``max_new_tokens``, with other noise."""
    return [
        driver.generate(
            prompt,
            sampling_params=msgspec.structs.replace(
                params, forced_output_ids=tokens_of(output), max_new_tokens=10, seed=99
            ),
            **asked,
        )
        for (prompt, params, asked), output in zip(work(**more), outputs, strict=True)
    ]


def numbers(result: GenerateReqOutput) -> dict[str, Any]:
    spans = [msgspec.structs.replace(span, incarnation="") for span in result.weight_versions]
    fields = {**msgspec.structs.asdict(result), "weight_versions": spans}
    return {name: value for name, value in fields.items() if name not in OF_THE_RUN}


def same(found: list[GenerateReqOutput], expected: list[GenerateReqOutput]) -> None:
    for one, other in zip(map(numbers, found), map(numbers, expected), strict=True):
        assert {name: value for name, value in one.items() if value != other[name]} == {}


def close(found: GenerateReqOutput, expected: GenerateReqOutput) -> None:
    assert found.output_ids == expected.output_ids
    for name in ("output_logprobs", "raw_logprobs", "sampled_logprobs"):
        ours, theirs = (np.frombuffer(getattr(each, name), "<f4") for each in (found, expected))
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert found.sampling_mask == expected.sampling_mask
    assert found.finish_reason == expected.finish_reason


FAMILIES = ["qwen3", "qwen3-moe", "gemma3", "gpt-oss", "qwen3.5", "qwen3-next"]


@pytest.fixture(scope="module", params=quick(FAMILIES, 3))
def model(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(path, request.param, seed=3, max_position_embeddings=512)
    return str(path)


@pytest.fixture(scope="module")
def expected(model) -> list[GenerateReqOutput]:
    with EngineDriver(model, scripted=False, deterministic=True) as driver:
        return sampled(driver)


@needs_kernels
@pytest.mark.parametrize("chunk", quick([16, 512]))
@pytest.mark.parametrize("rows", [2, 32])
def test_a_replay_equals_its_sample_bit_for_bit(model, depth, expected, chunk, rows):
    options = {"chunked_prefill_size": chunk, "max_running_requests": rows, "pipeline_depth": depth}
    with EngineDriver(model, scripted=False, deterministic=True, **options) as driver:
        for _ in range(2):  # the second time on cached prefixes
            rids = replay(driver, expected)
            driver.run_until_idle()
            same([driver.result(rid) for rid in rids], expected)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replays_of_narrow_dtypes_equal_their_samples(tiny_model, dtype):
    with EngineDriver(str(tiny_model), scripted=False, deterministic=True, dtype=dtype) as driver:
        wanted = sampled(driver)
        rids = replay(driver, wanted)
        driver.run_until_idle()
        same([driver.result(rid) for rid in rids], wanted)


@needs_kernels
def test_replays_beside_samples_disturb_nobody(model, depth, expected):
    with EngineDriver(model, scripted=False, deterministic=True, pipeline_depth=depth) as driver:
        rids = replay(driver, expected)
        beside = sampled(driver)
        same(beside, expected)
        same([driver.result(rid) for rid in rids], expected)


@needs_kernels
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_replays_go_on_after_pauses_and_lost_steps(model, depth, expected, mode):
    options = {"chunked_prefill_size": 16, "max_running_requests": 8, "pipeline_depth": depth}
    with EngineDriver(model, scripted=False, deterministic=True, **options) as driver:
        rids = replay(driver, expected)
        with Fault(driver.engine.runner, "execute", NO_MEMORY[0], {3, 9}, after=True) as fault:
            for ticks in (1, 2, 3, 5):
                driver.tick(ticks)
                driver.pause(mode)
                driver.go_on(torch_empty_cache=False)
            driver.run_until_idle()
        assert fault.raised == 2
        same([driver.result(rid) for rid in rids], expected)


@needs_kernels
def test_a_replay_that_is_preempted_goes_on(model, depth, expected):
    options = {"kv_pool_tokens": 208, "chunked_prefill_size": 16, "pipeline_depth": depth}
    with EngineDriver(model, scripted=False, deterministic=True, **options) as driver:
        sampling = driver.generate(
            PROMPTS[1], sampling_params=SamplingParams(max_new_tokens=150, ignore_eos=True)
        )
        driver.tick(40)
        rids = replay(driver, expected)
        driver.run_until_idle()
        assert len(tokens_of(driver.result(sampling))) == 150
        assert any(driver.result(rid).num_retractions for rid in rids), "nothing was preempted"
        same([driver.result(rid) for rid in rids], expected)


def test_replays_with_torch_are_close_to_samples(tiny_model, depth, monkeypatch):
    monkeypatch.setenv("CAESURA_KERNELS", "torch")
    with EngineDriver(
        str(tiny_model), scripted=False, pipeline_depth=depth, chunked_prefill_size=32
    ) as driver:
        expected = sampled(driver)
        rids = replay(driver, expected)
        driver.run_until_idle()
        for rid, each in zip(rids, expected, strict=True):
            close(driver.result(rid), each)


def test_spans_say_which_weights_a_replay_met(tiny_model, other_model, depth):
    options = {"chunked_prefill_size": 16, "pipeline_depth": depth}
    forced = prompt_of(60, 9)
    params = SamplingParams(forced_output_ids=forced)

    def logprobs(driver: EngineDriver) -> tuple[GenerateReqOutput, np.ndarray]:
        result = driver.complete(PROMPTS[0], sampling_params=params, return_logprob=True, cache_salt="own")
        return result, np.frombuffer(result.output_logprobs, "<f4")

    with EngineDriver(str(tiny_model), scripted=False, **options) as driver:
        _, before = logprobs(driver)
        rid = driver.generate(PROMPTS[0], sampling_params=params, return_logprob=True, cache_salt="other")
        driver.tick(5)
        driver.pause("retract")
        driver.update(other_model)
        driver.go_on()
        driver.run_until_idle()
        found = driver.result(rid)
        (first, second) = found.weight_versions
        assert (first.epoch, second.epoch, second.end) == (0, 1, 60)
        _, after = logprobs(driver)
    cut = first.end
    expected = np.concatenate([before[:cut], after[cut:]])
    assert 0 < cut < 60 and not np.allclose(before, after, atol=1e-3)
    np.testing.assert_allclose(np.frombuffer(found.output_logprobs, "<f4"), expected, atol=2e-5)


def test_a_replay_ends_as_its_ids_do(tiny_model, depth):
    with EngineDriver(str(tiny_model), scripted=False, pipeline_depth=depth) as driver:

        def ends(ids: list[int], **fields: Any) -> tuple[str, int | None, int | None]:
            params = SamplingParams(forced_output_ids=ids, stop_token_ids=[7], **fields)
            result = driver.complete(PROMPTS[2], sampling_params=params)
            assert tokens_of(result) == ids
            reason = result.finish_reason
            return reason.type, reason.matched, reason.length

        assert ends([5, 9, 7]) == ("stop", 7, None)
        assert ends([5, 7, 9]) == ("length", None, 3)
        assert ends([5, 7, 9], max_new_tokens=1) == ("length", None, 3)
        assert ends([11]) == ("length", None, 1)


def test_a_token_that_filters_drop_has_no_chance(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        asked = {"return_logprob": True, "return_sampled_logprob": True, "return_sampling_mask": True}
        params = SamplingParams(top_k=1, forced_output_ids=prompt_of(9, 3))
        result = driver.complete(PROMPTS[3], sampling_params=params, **asked)
        kept = [result.sampling_mask.at(at) for at in range(9)]
        inside = np.array([token in kept[at] for at, token in enumerate(tokens_of(result))])
        assert not inside.all() and all(len(each) == 1 for each in kept)
        assert np.isfinite(np.frombuffer(result.output_logprobs, "<f4")).all()
        chance = np.frombuffer(result.sampled_logprobs, "<f4")
        assert (chance == np.where(inside, 0.0, -np.inf)).all()


def test_a_streamed_replay_sends_every_token_once(tiny_model, depth):
    with EngineDriver(
        str(tiny_model), scripted=False, pipeline_depth=depth, max_running_requests=4
    ) as driver:
        forced = prompt_of(21, 5)
        params = SamplingParams(forced_output_ids=forced)
        rid = driver.generate(PROMPTS[0], sampling_params=params, stream=True, return_logprob=True)
        driver.run_until_idle()
        deltas = [message.delta for _, message in driver.outputs if message.delta is not None]
        starts = [start for delta in deltas for start in np.frombuffer(delta.starts, "<i4").tolist()]
        tokens = [token for delta in deltas for token in np.frombuffer(delta.tokens, "<i4").tolist()]
        assert starts == list(range(len(starts))) and tokens == forced[: len(tokens)]
        assert len(tokens) >= 16 and tokens_of(driver.result(rid)) == forced


def test_a_replay_takes_few_steps(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False, prefix_cache=False) as driver:
        before = driver.status().step
        params = SamplingParams(forced_output_ids=prompt_of(90))
        driver.complete(PROMPTS[0], sampling_params=params, return_logprob=True)
        assert driver.status().step - before <= 90 // driver.config.sizes.rows + 2


def test_a_retracted_replay_shares_only_what_is_computed(model, depth):
    options = {"chunked_prefill_size": 16, "pipeline_depth": depth}
    with EngineDriver(model, scripted=False, **options) as driver:
        forced = SamplingParams(forced_output_ids=prompt_of(120, 9), frequency_penalty=0.1)
        driver.generate(PROMPTS[4], sampling_params=forced)
        driver.tick(40)
        driver.pause("retract")
        driver.flush()
        driver.go_on()
        driver.tick(2)
        (request,) = driver.engine.batcher._active
        assert len(PROMPTS[4]) > driver.engine.batcher.table.scheduled[request.slot]
        assert request.kv.num_shared == 0
        driver.run_until_idle()


def test_a_replay_shares_its_prompt_before_it_ends(model, depth):
    with EngineDriver(model, scripted=False, pipeline_depth=depth) as driver:
        asked = {"return_logprob": True, "logprob_start_len": 0}
        forced = SamplingParams(forced_output_ids=prompt_of(120, 9), frequency_penalty=0.1)
        replayed = driver.generate(PROMPTS[4], sampling_params=forced, **asked)
        driver.tick(3)
        beside = driver.generate(PROMPTS[4], 3, **asked)
        driver.tick(12)
        driver.collect()
        assert (beside, 0) in driver.results and (replayed, 0) not in driver.results
        found = driver.result(beside)
        assert found.cached_tokens == 48
        driver.run_until_idle()
        assert tokens_of(driver.result(replayed)) == forced.forced_output_ids
        alone = driver.complete(PROMPTS[4], 3, cache_salt="alone", **asked)
    for name in ("input_logprobs", "output_logprobs"):
        ours, theirs = (np.frombuffer(getattr(each, name), "<f4") for each in (found, alone))
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_experts_of_a_replay_are_those_of_its_sample(tmp_path, depth):
    make_checkpoint(tmp_path, "qwen3-moe", seed=3)
    with EngineDriver(str(tmp_path), scripted=False, pipeline_depth=depth, prefix_cache=False) as driver:
        expected = sampled(driver, return_routed_experts=True)
        rids = replay(driver, expected, return_routed_experts=True)
        driver.run_until_idle()
        for rid, each in zip(rids, expected, strict=True):
            assert driver.result(rid).routed_experts == each.routed_experts


MISTAKES = [
    ({"forced_output_ids": []}, "forced_output_ids", "at least one id"),
    ({"forced_output_ids": [1], "n": 2}, "n", "must be 1 with forced_output_ids"),
    ({"forced_output_ids": [97]}, "forced_output_ids", "outside the vocabulary"),
]


def test_impossible_replays_are_refused(driver):
    def refused(**fields: Any) -> Any:
        return driver.call(GenerateReqInput(input_ids=PROMPTS[0], sampling_params=SamplingParams(**fields)))

    for fields, field, text in MISTAKES:
        refusal = refused(**fields)
        assert refusal.detail["field"] == f"sampling_params.{field}"
        assert text in refusal.message
    assert refused(forced_output_ids=[5] * 100_000).code == "prompt_too_long"


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replays_with_adapters_and_on_ranks_are_samples(tiny_model, tmp_path, tp):
    path = make_adapter(tiny_model, tmp_path / "a", ["q_proj", "down_proj"])
    with EngineDriver(str(tiny_model), scripted=False, tp=tp, enable_lora=True) as driver:
        assert driver.call(LoadAdapterReqInput(name="a", path=str(path))).adapter_epoch
        found: dict[str, list[GenerateReqOutput]] = {}
        for adapter in (None, "a"):
            expected = sampled(driver, adapter=adapter)
            for name in (None, "a"):
                rids = replay(driver, expected, adapter=name)
                driver.run_until_idle()
                found[f"{adapter} by {name}"] = [driver.result(rid) for rid in rids]
            for one, other in zip(found[f"{adapter} by {adapter}"], expected, strict=True):
                close(one, other)
                assert {span.adapter for span in one.weight_versions} == {adapter}
    for adapter, other in ((None, "a"), ("a", None)):
        own, theirs = (
            np.concatenate([np.frombuffer(each.output_logprobs, "<f4") for each in found[key]])
            for key in (f"{adapter} by {adapter}", f"{adapter} by {other}")
        )
        assert np.abs(own - theirs).max() > 1e-3
