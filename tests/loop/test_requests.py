"""Requests: their order, their numbers, what is sent again, and the end of an engine that drains."""

import numpy as np
import pytest
from support.faults import BUG, NO_MEMORY, Fault, check_nothing_is_left
from support.scripted import EngineDriver, assert_error, tokens_of
from support.waiting import eventually

from caesura.io_struct import (
    FetchResultReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    SamplingParams,
    ShutdownReqInput,
    encode,
)
from caesura.scheduler.runtime.engine_config import PAGE_SIZE

PREFIX = [3 + i * 7 % 90 for i in range(4 * PAGE_SIZE)]
"""A prompt that takes two steps of 32 tokens."""


def engine(tiny_model, **options: object) -> EngineDriver:
    return EngineDriver(str(tiny_model), **{"chunked_prefill_size": 32, **options})


@pytest.fixture
def driver(tiny_model, depth):
    with engine(tiny_model, pipeline_depth=depth) as driver:
        yield driver


def running(driver: EngineDriver) -> dict[str, int]:
    counts: dict[str, int] = {}
    for request in driver.engine.batcher._active:
        counts[request.rid] = counts.get(request.rid, 0) + 1
    return counts


def test_a_large_request_does_not_starve_earlier_ones(tiny_model):
    with engine(tiny_model, kv_pool_tokens=16 * PAGE_SIZE) as driver:
        group = driver.generate(PREFIX, 4 * PAGE_SIZE, n=3)
        large = driver.generate([5 + i % 80 for i in range(12 * PAGE_SIZE)], 4)
        driver.tick(8)
        assert running(driver) == {group: 3}, "the siblings share their prefix: there is room for all of them"
        driver.run_until_idle()
        assert driver.result(large).finish_reason.type == "length"
        check_nothing_is_left(driver)


def test_overtaking_leaves_pages_for_prefix_waiters(tiny_model):
    with engine(tiny_model, kv_pool_tokens=16 * PAGE_SIZE, chunked_prefill_size=80) as driver:
        group = driver.generate(PREFIX, 2 * PAGE_SIZE, n=3)
        greedy = driver.generate([5 + i % 80 for i in range(10 * PAGE_SIZE)], 4)
        driver.tick(6)
        assert running(driver) == {group: 3}
        driver.run_until_idle()
        assert driver.result(greedy).num_retractions == 0


def test_a_small_request_still_overtakes(tiny_model):
    with engine(tiny_model, chunked_prefill_size=48) as driver:
        group = driver.generate(PREFIX + PREFIX, 40, n=3)
        small = driver.generate([5, 6, 7], 40)
        driver.tick(3)
        assert running(driver) == {group: 1, small: 1}
        driver.run_until_idle()


def test_samples_start_together_once_their_prefix_is_there(driver):
    rid = driver.generate(PREFIX[:-3], 60, n=8)
    driver.tick(6)
    assert running(driver) == {rid: 8}
    driver.run_until_idle()
    shared = [driver.result(rid, index).cached_tokens for index in range(8)]
    assert sorted(shared) == [0] + [3 * PAGE_SIZE] * 7


@pytest.mark.parametrize("start", [2, PAGE_SIZE - 1])
def test_samples_wait_only_for_what_they_can_use(driver, start):
    prompt = PREFIX[: PAGE_SIZE + 4]
    fields = {"return_logprob": True, "logprob_start_len": start}
    rids = [driver.generate(prompt, 60, **fields), driver.generate(prompt, 60, top_logprobs_num=1, **fields)]
    driver.hear()
    driver.tick(3)
    assert driver.runner.launches[0] == (0, [20, 12]), "the scores of the first are not enough for the second"
    assert running(driver) == dict.fromkeys(rids, 1)


def test_a_paused_engine_forgets_aborted_requests(driver):
    driver.pause("retract")
    stays = driver.generate(PREFIX, 4)
    for number in range(300):
        rid = driver.generate([5, 6, number % 90], 4)
        assert driver.abort(rid).aborted == 1
    queue = driver.engine.batcher.waiting
    assert len(queue) == 1
    assert len(queue._queue) < 150, "finished requests are kept for nobody"
    driver.go_on()
    driver.run_until_idle()
    assert driver.result(stays).finish_reason.type == "length"


@pytest.mark.parametrize("stage", ["open", "extend", "bind"])
def test_a_request_that_cannot_be_started_ends_alone(driver, stage):
    batcher = driver.engine.batcher
    owner, is_bad = {
        "open": (batcher.cache, lambda tokens, *rest: np.array_equal(tokens, PREFIX)),
        "extend": (batcher.cache, lambda lease, length, *rest: length == len(PREFIX)),
        "bind": (batcher.table, lambda request, *rest: np.array_equal(request.prompt, PREFIX)),
    }[stage]
    for error, code in ((BUG, "internal"), (NO_MEMORY[2], "out_of_memory")):
        runs = driver.generate([5, 6, 7], 40)
        driver.tick(4)
        bad, behind = driver.generate(PREFIX, 5), driver.generate([9, 10], 5)
        with Fault(owner, stage, error, range(1000), only=is_bad):
            driver.run_until_idle()
        reason = driver.result(bad).finish_reason
        assert (reason.type, reason.code) == ("error", code)
        for rid, count in ((runs, 40), (behind, 5)):
            result = driver.check(rid)
            assert result.finish_reason.type == "length"
            assert len(tokens_of(result)) == count
        check_nothing_is_left(driver)


def test_a_start_that_fails_once_ends_no_request(driver):
    runs = driver.generate([5, 6, 7], 40)
    driver.tick(4)
    rid = driver.generate(PREFIX, 5)
    with Fault(driver.engine.batcher.table, "bind", BUG) as fault:
        driver.run_until_idle()
    assert fault.raised == 1
    assert {driver.result(each).finish_reason.type for each in (runs, rid)} == {"length"}


BEYOND_ALL_NUMBERS = [
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
]
AT_THE_ENDS = [
    SamplingParams(max_new_tokens=None, min_new_tokens=2**31 - 1, temperature=0.0),
    SamplingParams(max_new_tokens=3, top_p=5e-324),
    SamplingParams(max_new_tokens=3, min_p=5e-324),
    SamplingParams(max_new_tokens=3, temperature=1e-6),
    SamplingParams(max_new_tokens=3, temperature=1e4, repetition_penalty=1e-6),
    SamplingParams(max_new_tokens=3, temperature=1e-6, repetition_penalty=1e-6, frequency_penalty=-2.0),
    SamplingParams(max_new_tokens=3, frequency_penalty=5e-324, presence_penalty=-1e-310),
    SamplingParams(max_new_tokens=3, seed=2**63 - 1, top_k=2**31 - 1, logit_bias={5: 5e-324}),
]


def test_numbers_that_nothing_holds_end_their_own_request(driver):
    runs = driver.generate([5, 6, 7], 40)
    driver.tick(3)
    for fields in BEYOND_ALL_NUMBERS:
        reply = driver.call(GenerateReqInput(input_ids=[5, 6], **fields))
        assert reply.code in ("invalid_request", "malformed_message", "prompt_too_long", "epoch_behind")
    driver.run_until_idle()
    assert driver.result(runs).finish_reason.type == "length"


def test_numbers_at_the_ends_of_their_ranges_work(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        for params in AT_THE_ENDS:
            reason = driver.complete([5, 6, 7, 7, 7], sampling_params=params).finish_reason
            assert reason.type in ("length", "stop"), (reason, params)
        assert driver.status().step_failures.failed == 0


def test_top_k_of_zero_keeps_all_tokens_as_minus_one_does(driver):
    """TRL's default is 0, SGLang's is -1; 1 would be greedy."""
    table = driver.engine.batcher.table
    for top_k in (-1, 0):
        params = SamplingParams(max_new_tokens=20, top_k=top_k, seed=7, ignore_eos=True, temperature=3.0)
        rid = driver.generate([5, 6, 7], sampling_params=params)
        driver.tick()
        slot = driver.engine.live.samples(rid)[0].slot
        assert (table.sampling.top_k[slot], table.sampling.filtered[slot]) == (table.vocab_size, False)


PARAMS = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


def batch(count: int, params: SamplingParams = PARAMS) -> list[GenerateReqInput]:
    return [
        GenerateReqInput(input_ids=[5, 6, 7 + number % 80], sampling_params=params) for number in range(count)
    ]


def generate(driver: EngineDriver, messages: list[GenerateReqInput], client: str = "main") -> None:
    for message in messages:
        driver.send(encode(message), client)
    left = {message.id for message in messages}

    def answered() -> bool:
        driver.tick()
        left.difference_update(driver.replies, (rid for rid, _ in driver.results))
        return not left

    eventually(answered)  # the socket does not hold all of them at once


def test_a_batch_sent_again_is_answered_and_not_generated(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        messages = batch(300)
        generate(driver, messages)
        first = {message.id: tokens_of(driver.result(message.id)) for message in messages}
        steps = driver.status().step
        driver.results.clear()
        generate(driver, messages)
        assert {message.id: tokens_of(driver.result(message.id)) for message in messages} == first
        assert driver.status().step == steps, "nothing was computed again"


@pytest.mark.parametrize(("limit", "fewest", "most"), [(0, 0, 0), (4 << 10, 4, 12), (8 << 10, 10, 24)])
def test_answers_are_stored_within_the_configured_bytes(tiny_model, limit, fewest, most):
    """A result that is not stored any more is no second generation."""
    with EngineDriver(str(tiny_model), result_bytes=limit) as driver:
        messages = batch(40)
        for message in messages:
            generate(driver, [message])
        steps, generated = driver.status().step, driver.status().generated_tokens
        driver.results.clear()
        generate(driver, messages)
        assert fewest <= len(driver.results) <= most
        assert len(driver.results) + len(driver.replies) == 40
        assert {reply.code for reply in driver.replies.values()} == {"answer_forgotten"}
        driver.assert_status(step=steps, generated_tokens=generated)


@pytest.mark.parametrize("live", [True, False])
def test_a_message_that_joined_is_answered_again(tiny_model, live):
    with EngineDriver(str(tiny_model)) as driver:
        params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, n=2)
        messages = [GenerateReqInput(rid="r", input_ids=[5, 6, 7], sampling_params=params) for _ in range(2)]
        driver.client("second")
        driver.send(messages[0])
        driver.tick(3)
        driver.send(messages[1], "second")
        if not live:
            driver.run_until_idle()
        else:
            driver.tick(1)
        driver.send(messages[1], "second")
        driver.run_until_idle()
        steps = driver.status().step
        for message in messages:
            driver.results.clear()
            driver.send(message, "second")
            driver.run_until_idle()
            assert {key: len(found) for key, found in driver.results.items()} == {("r", 0): 1, ("r", 1): 1}
        assert driver.status().step == steps


PROMPT = [5, 6, 7]
LONG = 3600.0


@pytest.fixture
def draining(tiny_model):
    with EngineDriver(str(tiny_model), shutdown_mode="drain", drain_timeout_s=LONG) as driver:
        yield driver


def test_drain_finishes_requests_and_refuses_new_ones(draining):
    first, queued = draining.generate(PROMPT, 20), draining.generate(PROMPT, 30)
    draining.tick()
    asked = draining.send(ShutdownReqInput(drain=True))
    late = draining.generate(PROMPT, 5)
    draining.engine.scheduler.run()
    draining.collect()
    assert 0 < draining.replies.pop(asked).drain_s <= LONG
    assert_error(draining.replies.pop(late), "shutting_down")
    for rid in (first, queued):
        assert draining.result(rid).finish_reason.type == "length"


@pytest.mark.parametrize("order", [{}, {"drain": False}, {"drain": True, "timeout_s": 0.0}])
def test_the_end_comes_at_once_by_default_or_second_order(tiny_model, order):
    """An engine that is not configured to drain ends with the first message."""
    options = {"shutdown_mode": "drain", "drain_timeout_s": LONG} if order else {}
    with EngineDriver(str(tiny_model), **options) as driver:
        rid = driver.generate(PROMPT, 200)
        driver.tick(3)
        if order:
            first = driver.send(ShutdownReqInput())
            driver.tick(2)
        last = driver.send(ShutdownReqInput(**order))
        driver.engine.scheduler.run()
        driver.collect()
        assert not order or driver.replies.pop(first).drain_s > 0
        assert driver.replies.pop(last).drain_s == 0
        result = driver.result(rid)
        assert result.finish_reason.message == "the engine is shutting down"
        assert len(result.output_ids) > 0, "with what it had"


def test_the_deadline_ends_the_remaining_requests(draining):
    rid = draining.generate(PROMPT, 200)
    draining.tick()
    assert draining.pause("in_place").mode == "in_place"
    parked = draining.send(FlushCacheReqInput(timeout_s=LONG))
    draining.send(ShutdownReqInput(timeout_s=0.2))
    draining.engine.scheduler.run()
    draining.collect()
    assert draining.result(rid).finish_reason.type == "abort"
    assert_error(draining.replies.pop(parked), "shutting_down")


def test_retries_and_control_are_served_while_it_drains(draining):
    rid = draining.generate(PROMPT, 50, rid="r")
    draining.tick()
    draining.send(ShutdownReqInput())
    draining.tick(2)
    again = draining.generate(PROMPT, 50, client="other", rid="r")
    assert draining.status().running_requests == 1
    assert draining.call(FetchResultReqInput(rid="r")).live == 1
    assert draining.abort("r").aborted == 1
    draining.engine.scheduler.run()
    draining.collect()
    assert again == rid
    found = [result for _, output in draining.outputs for result in output.finished if result.rid == rid]
    assert len(found) == 2, "to each of the two that asked"
