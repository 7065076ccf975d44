"""Order of the queue, what it remembers, and which requests pay where one cannot be started."""

import numpy as np
import pytest
from support.faults import BUG, NO_MEMORY, Fault, check_nothing_is_left
from support.scripted import EngineDriver, tokens_of

from caesura.scheduler.runtime.config import PAGE_SIZE

PREFIX = [3 + i * 7 % 90 for i in range(4 * PAGE_SIZE)]
"""A prompt that takes two steps of 32 tokens."""


def engine(tiny_model, **options: object) -> EngineDriver:
    return EngineDriver(str(tiny_model), **{"chunked_prefill_size": 32, **options})


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(tiny_model, request):
    with engine(tiny_model, pipeline_depth=request.param) as driver:
        yield driver


def running(driver: EngineDriver) -> dict[str, int]:
    counts: dict[str, int] = {}
    for request in driver.engine.batcher._active:
        counts[request.rid] = counts.get(request.rid, 0) + 1
    return counts


def test_a_large_request_does_not_starve_those_it_would_have_overtaken(tiny_model):
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


@pytest.mark.parametrize("start", [0, 2, PAGE_SIZE - 1])
def test_samples_that_cannot_use_the_prefix_do_not_wait_for_it(driver, start):
    prompt = PREFIX[: PAGE_SIZE + 4]
    rid = driver.generate(prompt, 60, n=4, return_logprob=True, logprob_start_len=start)
    driver.hear()
    chunk = sum(len(prompt) for _ in range(4))
    driver.tick(-(-chunk // 32) + 1)
    assert driver.runner.launches[0] == (0, [20, 12])
    assert running(driver) == {rid: 4}


def test_an_engine_that_is_paused_forgets_requests_that_were_aborted(driver):
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


@pytest.mark.parametrize("error", [BUG, NO_MEMORY[2]], ids=["bug", "memory"])
@pytest.mark.parametrize("stage", ["open", "extend", "bind"])
def test_a_request_that_cannot_be_started_ends_alone(driver, monkeypatch, stage, error):
    runs = driver.generate([5, 6, 7], 40)
    driver.tick(4)
    batcher = driver.engine.batcher
    owner = batcher.table if stage == "bind" else batcher.cache
    bad, behind = driver.generate(PREFIX, 5), driver.generate([9, 10], 5)
    original = getattr(owner, stage)

    def fail(first, *rest):
        request = first if stage == "bind" else None
        tokens = request.prompt if request else first if stage == "open" else None
        if stage == "extend":
            is_bad = rest[0] == len(PREFIX)
        else:
            is_bad = np.array_equal(tokens, PREFIX)
        if is_bad:
            raise error
        return original(first, *rest)

    monkeypatch.setattr(owner, stage, fail)
    driver.run_until_idle()
    assert driver.result(bad).finish_reason.type == "error"
    assert driver.result(bad).finish_reason.code == ("internal" if error is BUG else "out_of_memory")
    for rid, count in ((runs, 40), (behind, 5)):
        result = driver.check(rid)
        assert result.finish_reason.type == "length"
        assert len(tokens_of(result)) == count
    monkeypatch.undo()
    check_nothing_is_left(driver)


def test_a_start_that_fails_once_ends_no_request(driver, monkeypatch):
    runs = driver.generate([5, 6, 7], 40)
    driver.tick(4)
    rid = driver.generate(PREFIX, 5)
    fault = Fault(monkeypatch, driver.engine.batcher.table, "bind", BUG, {0})
    driver.run_until_idle()
    assert fault.raised == 1
    assert {driver.result(each).finish_reason.type for each in (runs, rid)} == {"length"}
