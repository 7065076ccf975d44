"""Hidden states of chosen layers, against transformers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.faults import NO_MEMORY, Fault
from support.lanes import quick
from support.scripted import EngineDriver, prompt_of, tokens_of

from caesura.io_struct import GenerateReqInput, GenerateReqOutput, SamplingParams
from caesura.scheduler.scheduling import waiting_queue

PROMPTS = [prompt_of(length, length) for length in (40, 1, 21)]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
ALL = [0, 1, 2, -1]
"""Layers of models with two."""


def states_of(result: GenerateReqOutput) -> torch.Tensor:
    found = result.hidden_states
    return torch.frombuffer(bytearray(found.data), dtype=DTYPES[found.dtype]).view(found.shape).float()


@cache
def reference(path: Path | str) -> Any:
    from transformers import AutoModelForCausalLM  # seconds, which other tests do without

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def expected(path: Path | str, tokens: list[int]) -> torch.Tensor:
    """Return transformers' hidden states [positions, 1 + layers, hidden]."""
    with torch.no_grad():
        found = reference(path)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack(found, 2)[0]


def check(
    path: Path | str, prompt: list[int], result: GenerateReqOutput, layers: list[int], start: int = 0
) -> None:
    tokens = [*prompt, *tokens_of(result)][:-1]
    assert result.hidden_states.start == start
    torch.testing.assert_close(
        states_of(result), expected(path, tokens)[start:, layers], atol=1e-4, rtol=1e-4
    )


FAMILIES = ["qwen3", "gemma3", "qwen3-moe", "gpt-oss", "deepseek-v3", "qwen3.5"]


@pytest.mark.parametrize("family", quick(FAMILIES, 2))
def test_hidden_states_are_those_of_transformers(tmp_path, depth, family):
    make_checkpoint(tmp_path, family, seed=3)
    options = {"pipeline_depth": depth, "chunked_prefill_size": 16}
    with EngineDriver(str(tmp_path), scripted=False, **options) as driver:
        asked = [([-1], 0), ([1, 0, -1], 0), ([-1, -2], 5)]
        rids = []
        for prompt, (layers, start) in zip(PROMPTS, asked, strict=True):
            start = min(start, len(prompt))
            fields = {
                "hidden_states_layers": layers,
                "hidden_states_start_len": start,
                "return_hidden_states": True,
            }
            rids.append(driver.generate(prompt, 9, **fields))
        plain = driver.generate(PROMPTS[2], 9)
        driver.run_until_idle()
        assert driver.result(plain).hidden_states is None
        for rid, prompt, (layers, start) in zip(rids, PROMPTS, asked, strict=True):
            check(tmp_path, prompt, driver.result(rid), layers, min(start, len(prompt)))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(path, "qwen3", seed=3, num_hidden_layers=2, max_position_embeddings=512)
    return path


def asked_for_all(driver: EngineDriver, **fields: Any) -> list[str]:
    fields = dict(return_hidden_states=True, hidden_states_layers=ALL, **fields)
    return [driver.generate(prompt, 12, **fields) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_hidden_states_outlive_pauses_and_lost_steps(path, depth, mode):
    options = {"pipeline_depth": depth, "chunked_prefill_size": 16}
    with EngineDriver(str(path), scripted=False, **options) as driver:
        rids = asked_for_all(driver)
        with Fault(driver.engine.runner, "execute", NO_MEMORY[0], {4}, after=True) as fault:
            for ticks in (1, 2, 3, 4):
                driver.tick(ticks)
                driver.pause(mode)
                driver.go_on(torch_empty_cache=False)
            driver.run_until_idle()
        assert fault.raised == 1
        for rid, prompt in zip(rids, PROMPTS, strict=True):
            check(path, prompt, driver.result(rid), ALL)


def test_hidden_states_of_cached_prompts(path, depth):
    with EngineDriver(str(path), scripted=False, pipeline_depth=depth) as driver:
        for _ in range(2):
            rids = asked_for_all(driver)
            driver.run_until_idle()
            for rid, prompt in zip(rids, PROMPTS, strict=True):
                check(path, prompt, driver.result(rid), ALL)
        fields = {"return_hidden_states": True, "hidden_states_start_len": 40}
        behind = driver.complete(PROMPTS[0], 4, **fields)
        assert (behind.cached_tokens, behind.hidden_states.shape[0]) == (32, 3)
        assert driver.complete(PROMPTS[0], 1, **fields).hidden_states is None


def test_hidden_states_of_preempted_requests(path, depth):
    with EngineDriver(str(path), scripted=False, pipeline_depth=depth, kv_pool_tokens=128) as driver:
        rids = [driver.generate(prompt, 60, return_hidden_states=True) for prompt in PROMPTS]
        driver.run_until_idle()
        results = [driver.result(rid) for rid in rids]
        assert any(result.num_retractions for result in results), "nothing was preempted"
        for prompt, result in zip(PROMPTS, results, strict=True):
            check(path, prompt, result, [-1])


def test_hidden_states_of_a_replay(path):
    with EngineDriver(str(path), scripted=False) as driver:
        params = SamplingParams(forced_output_ids=prompt_of(30, 7))
        result = driver.complete(
            PROMPTS[0], sampling_params=params, return_hidden_states=True, hidden_states_layers=[1]
        )
        check(path, PROMPTS[0], result, [1])


def test_rows_of_both_sides_of_an_update(tiny_model, other_model, depth):
    fields = {"return_hidden_states": True, "hidden_states_layers": [-1], "return_logprob": True}

    def replayed(driver: EngineDriver, ids: list[int]) -> torch.Tensor:
        params = SamplingParams(forced_output_ids=ids)
        return states_of(driver.complete(PROMPTS[0], sampling_params=params, cache_salt="own", **fields))

    options = {"scripted": False, "pipeline_depth": depth, "chunked_prefill_size": 16}
    with EngineDriver(str(tiny_model), **options) as driver:
        early = driver.generate(PROMPTS[0], 12, **fields)
        driver.tick(5)
        late = driver.generate(PROMPTS[0], 12, cache_salt="late", **fields)
        driver.tick(1)
        driver.pause("retract")
        driver.update(other_model)
        driver.go_on()
        driver.run_until_idle()
        early, late = driver.result(early), driver.result(late)
        assert [span.epoch for span in early.weight_versions] == [0, 1]
        assert [span.epoch for span in late.weight_versions] == [1]
        after = [replayed(driver, tokens_of(result)) for result in (early, late)]
        driver.update(tiny_model)
        before = replayed(driver, tokens_of(early))
    torch.testing.assert_close(states_of(late), after[1], atol=1e-4, rtol=1e-4)
    cut = 40 + early.weight_versions[0].end - 1  # the position that gave the last token of the first span
    torch.testing.assert_close(states_of(early)[:cut], before[:cut], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states_of(early)[cut:], after[0][cut:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, after[0], atol=1e-2)


def test_steps_are_the_same_if_nobody_asks(path):
    with EngineDriver(str(path), scripted=False) as driver:
        batches = []
        execute = driver.engine.runner.execute
        driver.engine.runner.execute = lambda batch: batches.append(batch) or execute(batch)
        driver.generate(PROMPTS[0], 4)
        driver.run_until_idle()
        assert [batch.hidden for batch in batches] == [None] * 4
        batches.clear()
        driver.complete(PROMPTS[1], 4, return_hidden_states=True)
        assert [batch.hidden.inner for batch in batches] == [[]] * 4, "the last layer's need no other path"


def test_an_aborted_prefill_has_no_hidden_states(path):
    with EngineDriver(str(path), scripted=False, chunked_prefill_size=16) as driver:
        rid = driver.generate(PROMPTS[0], 4, return_hidden_states=True)
        driver.tick(2)
        driver.abort(rid)
        assert driver.result(rid).hidden_states is None


def test_bfloat16_comes_as_it_is(path):
    with EngineDriver(str(path), scripted=False, dtype="bfloat16") as driver:
        result = driver.complete(PROMPTS[0], 4, return_hidden_states=True)
        assert (result.hidden_states.dtype, result.hidden_states.shape[0]) == ("BF16", 43)
        close = expected(path, [*PROMPTS[0], *tokens_of(result)][:-1])[:, [-1]]
        assert (states_of(result) - close).abs().mean() < 0.05


MISTAKES = [
    ({"hidden_states_layers": [3]}, "hidden_states_layers", "must be in [-3, 2]"),
    ({"hidden_states_layers": [-4]}, "hidden_states_layers", "must be in [-3, 2]"),
    ({"hidden_states_layers": []}, "hidden_states_layers", "must be 1 or more"),
    ({"hidden_states_start_len": 41}, "hidden_states_start_len", "beyond the prompt of 40"),
]


def test_impossible_hidden_states_are_refused(path):
    with EngineDriver(str(path), scripted=False) as driver:
        for fields, field, text in MISTAKES:
            message = GenerateReqInput(input_ids=PROMPTS[0], return_hidden_states=True, **fields)
            refusal = driver.call(message)
            assert (refusal.code, refusal.detail["field"]) == ("invalid_request", field)
            assert text in refusal.message


def test_too_many_bytes_are_refused_with_their_number(path, monkeypatch):
    with EngineDriver(str(path), scripted=False) as driver:
        result = driver.complete(PROMPTS[0], 4, return_hidden_states=True)
        nbytes = len(result.hidden_states.data)
        monkeypatch.setattr(waiting_queue, "MAX_HIDDEN_BYTES", nbytes)
        driver.complete(PROMPTS[0], 4, return_hidden_states=True)
        monkeypatch.setattr(waiting_queue, "MAX_HIDDEN_BYTES", nbytes - 1)
        params = SamplingParams(max_new_tokens=4)
        message = GenerateReqInput(input_ids=PROMPTS[0], sampling_params=params, return_hidden_states=True)
        refusal = driver.call(message)
        assert refusal.code == "invalid_request" and str(nbytes) in refusal.message


def test_ranks_return_the_hidden_states_of_one(path):
    with EngineDriver(str(path), scripted=False, tp=2) as driver:
        rids = asked_for_all(driver)
        driver.run_until_idle()
        for rid, prompt in zip(rids, PROMPTS, strict=True):
            check(path, prompt, driver.result(rid), ALL)
