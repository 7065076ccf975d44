"""Routed experts through the real loop over a scripted model: recorded once, never lost, never mixed up.

The scripted router's choice names token, position and the weights of the moment, so a row that was taken from
another request, from a recomputation or from another epoch is another row.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.properties import examples
from support.scripted import (
    EngineDriver,
    assert_error,
    expected_experts,
    open_checkpoints_at_once,
    prompt_of,
    tokens_of,
)

from caesura.io_struct import GenerateReqInput, GenerateReqOutput

LAYERS, TOP_K = 2, 3
POOL_TOKENS = 160


@pytest.fixture(scope="module")
def moe_models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("moe") / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        make_checkpoint(
            path, "qwen3-moe", seed=seed, num_hidden_layers=LAYERS, num_experts=5, num_experts_per_tok=TOP_K
        )
    return [str(path) for path in paths]


def engine(model: str, depth: int, **options: object) -> EngineDriver:
    return EngineDriver(model, pipeline_depth=depth, chunked_prefill_size=32, **options)


@pytest.fixture
def driver(moe_models, depth):
    with engine(moe_models[0], depth) as driver:
        yield driver


def rows_of(result: GenerateReqOutput) -> np.ndarray:
    return np.asarray(result.routed_experts)


def check(driver: EngineDriver, rid: str, prompt: list[int], index: int = 0) -> GenerateReqOutput:
    result = driver.result(rid, index)
    rows, count = rows_of(result), len(tokens_of(result))
    expected = len(prompt) + count - 1 - result.routed_experts.start if count else 0
    assert rows.shape == (expected, LAYERS, TOP_K)
    np.testing.assert_array_equal(rows, expected_experts(prompt, result, LAYERS, TOP_K))
    return result


def ask(driver: EngineDriver, prompt: list[int], new_tokens: int, **fields: object) -> str:
    return driver.generate(prompt, new_tokens, return_routed_experts=True, **fields)


def update(driver: EngineDriver, model: str, mode: str | None) -> None:
    if mode is not None:
        driver.pause(mode)
    driver.update(model, flush_cache=False)
    driver.go_on()


def test_a_row_for_each_position_but_the_last(driver):
    for length, new_tokens in product((1, 16, 17, 100), (1, 2, 20)):
        rid = ask(driver, prompt_of(length, new_tokens), new_tokens)
        driver.run_until_idle()
        result = check(driver, rid, prompt_of(length, new_tokens))
        assert (result.routed_experts.dtype, result.routed_experts.start) == ("U8", 0)


def test_rows_from_a_position_on(driver):
    for start in (0, 1, 15, 16, 33, 39, 40):
        rid = ask(driver, prompt_of(40, start), 5, routed_experts_start_len=start)
        driver.run_until_idle()
        assert check(driver, rid, prompt_of(40, start)).routed_experts.start == start


def test_a_start_beyond_the_prompt_is_refused(driver):
    message = GenerateReqInput(input_ids=prompt_of(5), return_routed_experts=True, routed_experts_start_len=6)
    error = assert_error(driver.call(message), "invalid_request")
    assert error.detail["field"] == "routed_experts_start_len"


def test_a_model_without_experts_says_so(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        message = GenerateReqInput(input_ids=prompt_of(5), return_routed_experts=True)
        assert assert_error(driver.call(message), "unsupported").detail["field"] == "return_routed_experts"


def test_a_prefix_hit_brings_its_rows(driver):
    prompt = prompt_of(50)
    samples = ask(driver, prompt, 20, n=3)
    driver.run_until_idle()
    assert [check(driver, samples, prompt, i).cached_tokens for i in range(3)] == [0, 48, 48]
    longer = prompt + tokens_of(driver.result(samples)) + [5, 6, 7]
    later = ask(driver, longer, 5)
    driver.run_until_idle()
    assert check(driver, later, longer).cached_tokens == 64


@pytest.mark.parametrize("mode", ["in_place", "retract", None])
def test_rows_are_unchanged_across_an_update(driver, moe_models, mode, monkeypatch):
    open_checkpoints_at_once(monkeypatch)
    prompt = prompt_of(50)
    rid = ask(driver, prompt, 30)
    driver.tick(8)
    update(driver, moe_models[1], mode)
    driver.tick(4)
    update(driver, moe_models[0], mode)
    driver.run_until_idle()
    result = check(driver, rid, prompt)
    assert len({span.epoch for span in result.weight_versions}) == 3
    assert result.num_retractions == (2 if mode == "retract" else 0)


def test_recomputed_pages_are_those_that_others_find(driver, moe_models):
    prompt = prompt_of(50)
    first = ask(driver, prompt, 20)
    driver.tick(6)
    update(driver, moe_models[1], "retract")
    driver.tick(4)
    second = ask(driver, prompt, 4)
    driver.run_until_idle()
    check(driver, first, prompt)
    assert check(driver, second, prompt).cached_tokens == 48
    assert (rows_of(driver.result(first))[:49] != rows_of(driver.result(second))[:49]).any(axis=(1, 2)).all()


def test_aborted_wherever_it_stands(driver):
    prompt = prompt_of(70)
    running, retracted = (ask(driver, prompt_of(20, seed), 60) for seed in (1, 2))
    driver.tick(6)
    driver.abort(running)
    driver.pause("retract")
    driver.abort(retracted)
    queued = ask(driver, prompt, 5)
    driver.abort(queued)
    driver.go_on()
    prefilling = ask(driver, prompt, 5)
    driver.tick(2)
    driver.abort(prefilling)
    driver.run_until_idle()
    for rid, text in ((running, prompt_of(20, 1)), (retracted, prompt_of(20, 2))):
        assert len(rows_of(check(driver, rid, text))) > 20
    for rid in (queued, prefilling):
        assert check(driver, rid, prompt).routed_experts.shape == [0, LAYERS, TOP_K]


def test_an_error_returns_none(driver):
    rid = ask(driver, prompt_of(20), 30)
    driver.tick(6)
    driver.runner.fail_on_fetch = True
    driver.run_until_idle()
    result = driver.result(rid)
    assert result.finish_reason.type == "error"
    assert len(tokens_of(result)) > 0
    assert result.routed_experts is None


def test_rows_after_the_memory_came_back(driver):
    ask(driver, prompt_of(40), 5)
    driver.run_until_idle()
    driver.pause("retract")
    driver.release("kv_cache")
    driver.resume("kv_cache")
    driver.go_on()
    rid = ask(driver, prompt_of(40), 5)
    driver.run_until_idle()
    assert check(driver, rid, prompt_of(40)).cached_tokens == 0


def test_rows_come_back_with_their_pages(moe_models, depth):
    with engine(moe_models[0], depth, kv_tier_bytes=1 << 20) as driver:
        rid = ask(driver, prompt_of(40), 30)
        driver.tick(10)
        driver.pause("retract")
        driver.release("kv_cache")
        driver.runner.kv[:] = 0
        driver.resume("kv_cache")
        driver.go_on()
        driver.run_until_idle()
        check(driver, rid, prompt_of(40))
        again = ask(driver, prompt_of(40), 5)
        driver.run_until_idle()
        assert check(driver, again, prompt_of(40)).cached_tokens == 32
        assert driver.status().kv_tier.hit_tokens > 0


def test_status_counts_them(driver):
    assert driver.complete(prompt_of(5), 3).routed_experts is None, "it was not asked for"
    status = driver.status()
    assert status.kv.routing_bytes_per_token == LAYERS * TOP_K
    per_token = status.kv.bytes_per_token + status.kv.routing_bytes_per_token
    assert status.device_memory.kv_cache >= (status.kv.total + status.kv.page_size) * per_token


@dataclass(frozen=True)
class Ask:
    length: int
    new_tokens: int
    text: int
    start: int
    n: int


ASKS = st.builds(
    Ask,
    length=st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 32, 48, 64])),
    new_tokens=st.integers(1, 40),
    text=st.integers(0, 2),
    start=st.integers(0, 70),
    n=st.integers(1, 2),
)
ACTIONS = st.one_of(
    ASKS,
    ASKS,
    st.integers(1, 12),  # ticks
    st.sampled_from(
        ["in_place", "retract", "abort", "update", "update", "continue", "continue", "abort one"]
    ),
)


def act(driver: EngineDriver, action: Ask | int | str, asked: dict[str, Ask], models: list[str]) -> None:
    if isinstance(action, int):
        driver.tick(action)
    elif isinstance(action, Ask):
        prompt = prompt_of(action.length, action.text)
        start = min(action.start, action.length)
        asked[ask(driver, prompt, action.new_tokens, n=action.n, routed_experts_start_len=start)] = action
    elif action == "update":
        epoch = driver.status().weights_epoch
        driver.update(models[(epoch + 1) % 2], flush_cache=False)
    elif action == "continue":
        driver.go_on(torch_empty_cache=False)
    elif action == "abort one":
        driver.abort(next(iter(asked), "nobody"))
    else:
        driver.pause(action)


@settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTIONS, min_size=4, max_size=25), depth=st.sampled_from([0, 1]))
@pytest.mark.long
def test_no_order_of_events_changes_a_row(moe_models, actions, depth):
    with engine(moe_models[0], depth, kv_pool_tokens=POOL_TOKENS, max_running_requests=4) as driver:
        asked: dict[str, Ask] = {}
        for action in actions:
            act(driver, action, asked, moe_models)
        driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        for rid, each in asked.items():
            for index in range(each.n):
                check(driver, rid, prompt_of(each.length, each.text), index)


def test_expert_numbers_beyond_a_byte_are_16_bit(driver):
    batcher = driver.engine.batcher
    original = batcher.routed_experts
    batcher.routed_experts = lambda request: original(request).astype(np.uint16) + 300
    prompt = prompt_of(9)
    rid = ask(driver, prompt, 3)
    driver.run_until_idle()
    result = driver.result(rid)
    assert result.routed_experts.dtype == "U16"
    expected = expected_experts(prompt, result, LAYERS, TOP_K)
    np.testing.assert_array_equal(rows_of(result), expected.astype(np.int64) + 300)


@pytest.mark.parametrize("rows", [1, -1])
def test_routed_experts_of_other_positions_are_an_error(driver, rows):
    batcher = driver.engine.batcher
    original = batcher.routed_experts

    def resized(request):
        found = original(request)
        return np.resize(found, (len(found) + rows if found.size else 0, LAYERS, TOP_K))

    batcher.routed_experts = resized
    rid = ask(driver, prompt_of(9), 3)
    driver.run_until_idle()
    reason = driver.result(rid).finish_reason
    assert (reason.type, reason.code) == ("error", "internal")
    assert "rows of routed experts" in reason.message
