"""Sampling masks through the real loop."""

from collections import Counter

import numpy as np
import pytest
from support.edited_logits import log_softmax, logits_of, with_logits
from support.faults import Fault
from support.kept_tokens import kept_tokens
from support.lanes import quick
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import GenerateReqOutput, SamplingMask, SamplingParams
from caesura.scheduler.scheduling import outputs

VOCAB, KINDS, NEW = 97, 3, 14
PARAMS = [
    SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=1, top_p=0.8),
    SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=2, top_k=9, temperature=1.4),
    SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=3, min_p=0.1, top_p=0.95, n=2),
    SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=4, temperature=0.0),
]
PROMPTS = [
    [3 + (seed * 31 + i * 7) % 90 for i in range(length)] for seed, length in enumerate((40, 3, 20, 70))
]


def check(result: GenerateReqOutput, params: SamplingParams) -> None:
    mask, tokens = result.sampling_mask, tokens_of(result)
    assert mask is not None and len(mask) == len(tokens)
    sampled, plain = (
        np.frombuffer(values, "<f4") for values in (result.sampled_logprobs, result.output_logprobs)
    )
    rows = [logits_of(kind, vocab_size=VOCAB) for kind in range(KINDS)]
    whole = [log_softmax(row.astype(np.float64).tolist(), params.temperature or 1.0) for row in rows]
    seen: Counter[int] = Counter()
    for at, token in enumerate(tokens):
        kind = int(np.argmin([abs(values[token] - plain[at]) for values in whole]))
        assert whole[kind][token] == pytest.approx(plain[at], abs=1e-4)
        kept = mask.at(at)
        assert kept == sorted(kept_tokens(rows[kind], params)), f"output token {at}"
        mass = np.logaddexp.reduce([whole[kind][each] for each in kept])
        assert sampled[at] == pytest.approx(
            0.0 if params.temperature == 0 else whole[kind][token] - mass, abs=1e-4
        )
        seen[kind] += 1
    assert len(tokens) < NEW or len(seen) > 1, "masks of one row alone would tell nothing about their order"


def start(driver: EngineDriver, new: int = NEW, **fields) -> list[tuple[str, SamplingParams]]:
    with_logits(driver.runner)
    driver.generate(PROMPTS[1], sampling_params=PARAMS[0], rid="plain")
    asked = dict(return_logprob=True, return_sampled_logprob=True, return_sampling_mask=True, **fields)
    return [
        (driver.generate(prompt, sampling_params=_longer(params, new), **asked), params)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def _longer(params: SamplingParams, new: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "max_new_tokens": new})


def check_all(
    driver: EngineDriver, requests: list[tuple[str, SamplingParams]], length: int | None = NEW
) -> None:
    for rid, params in requests:
        for index in range(params.n):
            result = driver.result(rid, index)
            check(result, params)
            assert length is None or len(tokens_of(result)) == length
    assert driver.result("plain").sampling_mask is None


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("ticks", quick([5, 2, 9]))
def test_a_pause_and_an_update_leave_each_token_its_mask(tiny_model, depth, mode, ticks):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        requests = start(driver)
        driver.tick(ticks)
        driver.pause(mode)
        reply = driver.update(tiny_model, flush_cache=mode != "in_place")
        assert reply.weights_epoch == 1
        driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        check_all(driver, requests, None if mode == "abort" else NEW)
        if mode == "in_place":
            spans = [driver.result(rid).weight_versions for rid, _ in requests]
            assert max(map(len, spans)) > 1, "nobody was sampled on both sides of the update"


def test_preempted_and_aborted_requests_keep_their_masks(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, kv_pool_tokens=304) as driver:
        requests = start(driver, 100)
        while not driver.engine.batcher.table.by_slot[0]:
            driver.tick()
        driver.tick(30)
        driver.abort(requests[0][0])
        driver.run_until_idle()
        check_all(driver, requests, None)
        results = [driver.result(rid, i) for rid, params in requests for i in range(params.n)]
        assert sum(result.num_retractions for result in results) > 0, "the pool was meant to run out"
        assert results[0].finish_reason.type == "abort"


@pytest.mark.parametrize("lost", [2, 6])
def test_a_lost_step_leaves_no_mask(tiny_model, depth, lost):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        requests = start(driver)
        with Fault(driver.runner, "on_fetch", MemoryError(), {lost}):
            driver.run_until_idle()
        check_all(driver, requests)
        assert driver.status().step_failures.failed == 1


def test_a_stream_with_details_has_the_masks_of_its_tokens(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth) as driver:
        requests = start(driver, stream=True, stream_details=True)
        driver.complete(PROMPTS[1], sampling_params=PARAMS[0], stream=True, stream_details=True, rid="other")
        check_all(driver, requests)
        found: dict[tuple[str, int], dict[int, list[int]]] = {}
        for _, message in driver.outputs:
            delta = message.delta
            if delta is None:
                continue
            masks = delta.details.sampling_mask
            counts, starts, indices = (
                np.frombuffer(column, "<i4").tolist()
                for column in (delta.counts, delta.starts, delta.indices)
            )
            at = 0
            for rid, index, first, count in zip(delta.rids, indices, starts, counts, strict=True):
                for position in range(count):
                    ids = [] if masks is None else masks.at(at)
                    found.setdefault((rid, index), {})[first + position] = ids
                    at += 1
        assert not any(found["other", 0].values())
        for rid, params in requests:
            for index in range(params.n):
                mask = driver.result(rid, index).sampling_mask
                # The last token comes with the result alone.
                assert found[rid, index] == {at: mask.at(at) for at in range(NEW - 1)}


def test_masks_too_large_for_a_message_end_their_sample(tiny_model, depth, monkeypatch):
    with EngineDriver(str(tiny_model), pipeline_depth=depth) as driver:
        requests = start(driver)
        monkeypatch.setattr(outputs, "MAX_MASK_BYTES", 4 * 9 * 5)
        driver.run_until_idle()
        result = driver.result(requests[1][0])
        assert (result.finish_reason.type, result.finish_reason.code) == ("error", "invalid_request")
        assert "top_k" in result.finish_reason.message
        assert len(tokens_of(result)) == len(result.sampling_mask) == 6
        check(result, PARAMS[1])
        check(driver.result(requests[3][0]), PARAMS[3])
        assert len(tokens_of(driver.result("plain"))) == NEW


def test_a_sample_without_tokens_has_no_masks(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        with_logits(driver.runner)
        driver.pause("in_place")
        rid = driver.generate(PROMPTS[0], sampling_params=PARAMS[0], return_sampling_mask=True)
        driver.abort(rid)
        driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        assert driver.result(rid).sampling_mask == SamplingMask(ids=b"", offsets=b"\0\0\0\0")
