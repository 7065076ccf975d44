"""Figures of pause, continue and flush: replies, totals, the history and the log."""

import logging

import pytest
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import FlushCacheReqInput, GenerateReqInput
from caesura.io_struct.distribution import Distribution

PAGE = 16


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["control.engine_state", "control.pause"])


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), max_running_requests=2) as driver:
        yield driver


def pauses(driver: EngineDriver) -> list[tuple[str, int, float]]:
    return [(total.mode, total.count, total.seconds) for total in driver.status().totals.pauses]


def test_a_pause_reports_the_requests_it_holds(driver, caplog):
    driver.generate([5] * 4, 100)
    driver.generate([6] * 20, 100)
    driver.generate([7] * 4, 100)
    driver.tick(4)
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.pause("in_place")
    assert (reply.mode, reply.step, reply.aborted_requests) == ("in_place", driver.status().step, 0)
    assert (reply.held_requests, reply.held_tokens, reply.waiting_requests) == (2, 3 * PAGE, 1)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("pause_generation")]
    assert lines == [
        f"pause_generation: in_place at step {reply.step}, 2 requests hold 48 tokens of KV, 1 wait"
    ]
    assert driver.last_event("pause").detail == "in_place, 2 requests hold KV"


def test_a_flush_reports_freed_tokens(driver):
    driver.complete(list(range(3, 43)), 2)
    cached = driver.status().kv.cached
    assert cached == 2 * PAGE
    reply = driver.flush(torch_empty_cache=False)
    assert (reply.freed_tokens, reply.reserved_before, reply.reserved_after) == (cached, None, None)
    assert driver.last_event("flush").detail == "32 tokens"
    assert driver.status().kv.cached == 0


def test_a_refused_flush_reports_pending_requests(driver):
    driver.release("kv_cache")
    driver.generate([5, 6, 7], 100)
    driver.tick(2)
    error = assert_error(driver.flush(), "not_idle")
    assert error.detail == {"running": 0, "prefilling": 0, "waiting": 1, "held_tokens": 0}
    driver.resume()
    driver.generate([6] * 20, 100)
    driver.generate([7] * 4, 100)
    driver.tick(4)
    error = assert_error(driver.flush(), "not_idle")
    assert error.detail == {"running": 2, "prefilling": 0, "waiting": 1, "held_tokens": 3 * PAGE}


def test_a_flush_waits_until_its_time_is_up(driver, clock):
    driver.generate([5, 6, 7], 200)
    driver.tick(3)
    driver.pause("in_place")
    flush = driver.send(FlushCacheReqInput(timeout_s=5.0))
    driver.tick()
    clock.advance(4.99, driver, 3)
    assert flush not in driver.replies
    clock.now = 1005.0
    driver.tick(3)
    assert_error(driver.replies.pop(flush), "not_idle")


def test_the_age_of_a_pause_counts_from_its_first_reply(driver, clock):
    assert driver.status().pause_age_s is None
    driver.pause("abort")
    clock.now += 3.0
    driver.pause("retract")
    clock.now += 4.0
    assert driver.status().pause_age_s == 7.0
    driver.go_on()
    assert driver.status().pause_age_s is None
    driver.pause()
    clock.now += 2.0
    assert driver.status().pause_age_s == 2.0


def test_pauses_are_counted_and_timed_by_mode(driver, clock):
    assert pauses(driver) == []
    for mode, seconds in (("abort", 1.0), ("abort", 2.0), ("in_place", 4.0)):
        driver.pause(mode)
        clock.now += seconds
    assert pauses(driver) == [("abort", 1, 3.0), ("in_place", 1, 4.0)]
    driver.go_on()
    clock.now += 50.0
    driver.pause("abort")
    clock.now += 8.0
    assert pauses(driver) == [("abort", 2, 11.0), ("in_place", 1, 4.0)]
    driver.go_on()
    clock.now += 50.0
    assert pauses(driver) == [("abort", 2, 11.0), ("in_place", 1, 4.0)]


def test_an_expired_lease_is_logged_with_its_owner(driver, clock, caplog):
    driver.pause("abort", owner="trainer", lease_s=10.0, on_lease_expiry="continue")
    clock.now += 10.5
    with caplog.at_level(logging.WARNING, logger="caesura"):
        driver.tick(2)
    lines = [r.getMessage() for r in caplog.records if "lease" in r.getMessage()]
    assert lines == [
        "pause lease of 'trainer' expired after 10.0 s without a message from the owner: continue"
    ]
    assert driver.last_event("lease_expiry").detail == "of 'trainer'"


def test_a_lease_that_cannot_continue_says_why(driver, clock, caplog):
    driver.pause("abort", owner="trainer", lease_s=10.0, on_lease_expiry="continue")
    driver.engine.state.poison("test")
    caplog.clear()
    clock.now += 11.0
    with caplog.at_level(logging.ERROR, logger="caesura"):
        driver.tick(2)
    assert [r.getMessage() for r in caplog.records] == [
        "cannot continue: weights are poisoned; staying paused"
    ]
    assert driver.status().generation == "paused"


def test_weights_that_are_invalid_already_keep_their_reason(driver):
    state = driver.engine.state
    driver.release("weights")
    assert driver.status().weights_detail.startswith("their memory was released without a copy")
    state.weights_detail = "before"
    driver.release("kv_cache")
    driver.assert_status(weights="invalid", weights_detail="before", released_tags=["kv_cache", "weights"])


def test_a_request_names_the_oldest_epoch_that_it_takes(driver, other_model):
    driver.update(other_model)
    for minimum in (None, 0, 1):
        assert len(tokens_of(driver.complete([5, 6, 7], 2, min_weights_epoch=minimum))) == 2
    error = assert_error(driver.call(GenerateReqInput(input_ids=[5], min_weights_epoch=2)), "epoch_behind")
    assert error.message == "weights epoch is 1, the request needs 2"
    assert error.detail == {"weights_epoch": 1, "min_weights_epoch": 2}


def test_the_totals_count_staleness_and_durations(driver, other_model):
    driver.complete([5, 6, 7], 2)
    driver.generate([5, 6, 7], 100)
    driver.tick(4)
    for _ in range(2):
        driver.pause("in_place")
        driver.update(other_model, flush_cache=False)
        driver.go_on()
        driver.tick(2)
    driver.pause("abort")
    driver.generate([5, 6, 7], 2)  # it will have no token, and no staleness
    driver.pause("abort")
    totals = driver.status().totals
    assert totals.staleness == Distribution(counts=[1, 0, 1, *[0] * 7], sum=2.0)
    assert sum(totals.queue_time.counts) == sum(totals.latency_s.counts) == 3
    assert totals.queue_time.sum <= totals.latency_s.sum
