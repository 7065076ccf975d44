"""After a failure inside of a real model's step: what is computed again gives what would have been computed.

Batches differ then (halves, other rows), which moves the last bits: tokens are compared, logprobs to 1e-4.
"""

from collections.abc import Callable

import pytest
from support.checkpoints import make_checkpoint
from support.faults import BUG, NO_MEMORY, Fault
from support.lanes import every
from support.recorded_graphs import record_graphs
from support.scripted import EngineDriver, tokens_of

from caesura.client.connection.results import read_floats
from caesura.scheduler.execution import model_runner, staging

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(45)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("failing") / "model"
    make_checkpoint(path, "qwen3", seed=3)
    return str(path)


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("failing") / "moe"
    make_checkpoint(path, "qwen3-moe", seed=4)
    return str(path)


def submit(driver: EngineDriver, routed: bool) -> list[str]:
    fields = {"return_logprob": True, "return_routed_experts": routed}
    seeds = (5, 6, None, 8)
    rids = [driver.generate(each, 14, seed=seed, **fields) for each, seed in zip(PROMPTS, seeds, strict=True)]
    driver.hear()
    return rids


def play(driver: EngineDriver, *, routed: bool = False) -> list[tuple[list[int], list[float], bytes]]:
    driver.flush(torch_empty_cache=False)
    rids = submit(driver, routed)
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    for result in results:
        assert result.finish_reason.type == "length", result.finish_reason
    driver.engine.cache.check()
    assert driver.status().kv.held == 0
    return [
        (tokens_of(r), read_floats(r.output_logprobs), r.routed_experts.data if routed else b"")
        for r in results
    ]


def assert_same(found, expected) -> None:
    for (ids, logprobs, experts), (expected_ids, expected_logprobs, expected_experts) in zip(
        found, expected, strict=True
    ):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, rel=0, abs=1e-4)
        assert experts == expected_experts


def runner_of(driver: EngineDriver) -> model_runner.ModelRunner:
    return driver.engine.runner


def apart(driver: EngineDriver) -> model_runner.ModelRunner:
    """Let layers, head and sampler be calls of their own, as they are where a row needs more."""
    runner = runner_of(driver)
    runner.model.sample = lambda *of: None
    return runner


HOST_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "plan": lambda driver: (runner_of(driver).backend, "plan"),
    "all at once": lambda driver: (runner_of(driver).model, "sample"),
    "forward": lambda driver: (apart(driver).model, "forward"),
    "logits": lambda driver: (apart(driver).model, "logits"),
    "sample": lambda driver: (apart(driver).sampler, "sample"),
    "output": lambda driver: (model_runner, "_host_output"),
}


def fail_at(driver: EngineDriver, stage: tuple[object, str], numbers: tuple[int, ...]) -> None:
    """Run out of memory in these calls of a stage, one at a time, before and after what they do."""
    expected = play(driver)
    for number in numbers:
        for after in (False, True):
            with Fault(*stage, NO_MEMORY[0], {number}, after=after) as fault:
                assert_same(play(driver), expected)
            assert fault.raised
    assert driver.status().step_failures.failed == 2 * len(numbers)
    assert_same(play(driver), expected)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stage", every(HOST_STAGES, 2))
def test_a_stage_without_memory(model, stage, depth):
    with EngineDriver(model, scripted=False, pipeline_depth=depth, chunked_prefill_size=32) as driver:
        fail_at(driver, HOST_STAGES[stage](driver), (0, 2, 9))


@pytest.mark.parametrize("stage", HOST_STAGES)
def test_a_stage_with_a_defect(model, stage):
    with EngineDriver(model, scripted=False, chunked_prefill_size=32) as driver:
        expected = play(driver)
        driver.flush(torch_empty_cache=False)
        with Fault(*HOST_STAGES[stage](driver), BUG, {4}):
            rids = submit(driver, False)
            driver.run_until_idle()
        for rid, (ids, _, _) in zip(rids, expected, strict=True):
            result = driver.result(rid)
            assert (result.finish_reason.type, result.finish_reason.code) == ("error", "internal")
            assert tokens_of(result) == ids[: len(tokens_of(result))], "what was sampled before is kept"
        assert any(tokens_of(driver.result(rid)) for rid in rids)
        assert_same(play(driver), expected)


@pytest.mark.parametrize("depth", [0, 1])
def test_experts_are_recorded_once(moe_model, depth):
    with EngineDriver(moe_model, scripted=False, pipeline_depth=depth, chunked_prefill_size=32) as driver:
        expected = play(driver, routed=True)
        for number in (0, 1, 2, 9):
            with Fault(runner_of(driver).model, "sample", NO_MEMORY[0], {number}, after=True):
                assert_same(play(driver, routed=True), expected)


DEVICE_STAGES: dict[str, Callable[[EngineDriver], tuple[object, str]]] = {
    "staging": lambda driver: (runner_of(driver)._inputs, "_write"),
    "copied": lambda driver: (staging.InputStaging, "_sampling"),
    "replay": lambda driver: (runner_of(driver).graphs, "replay"),
    "logits": lambda driver: (runner_of(driver).model, "logits"),
    "results": lambda driver: (runner_of(driver)._outputs, "send"),
    "fetch": lambda driver: (staging.PendingOutput, "fetch"),
}


@pytest.mark.parametrize("stage", every(DEVICE_STAGES, 6))
def test_a_stage_of_an_accelerator_without_memory(model, monkeypatch, stage):
    record_graphs(monkeypatch)
    options = {"max_running_requests": 10, "chunked_prefill_size": 32, "pipeline_depth": 1}
    with EngineDriver(model, scripted=False, **options) as driver:
        fail_at(driver, DEVICE_STAGES[stage](driver), (0, 5))
        blocks = len(runner_of(driver)._outputs._free)
        assert blocks <= 6, "results that are never fetched keep their room"
