"""An engine that drains finishes what it has and begins nothing."""

import pytest
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import FetchResultReqInput, FlushCacheReqInput, ShutdownReqInput

PROMPT = [5, 6, 7]
LONG = 3600.0


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), shutdown_mode="drain", drain_timeout_s=LONG) as driver:
        yield driver


def test_drain_finishes_requests_and_refuses_new_ones(driver):
    first, queued = driver.generate(PROMPT, 20), driver.generate(PROMPT, 30)
    driver.tick()
    asked = driver.send(ShutdownReqInput(drain=True))
    late = driver.generate(PROMPT, 5)
    driver.engine.scheduler.run()
    driver.collect()
    assert 0 < driver.replies.pop(asked).drain_s <= LONG
    assert_error(driver.replies.pop(late), "shutting_down")
    for rid in (first, queued):
        assert driver.result(rid).finish_reason.type == "length"


@pytest.mark.parametrize("order", [{"drain": False}, {"drain": True, "timeout_s": 0.0}])
def test_a_second_message_ends_the_drain(driver, order):
    rid = driver.generate(PROMPT, 200)
    driver.tick()
    first = driver.send(ShutdownReqInput())
    driver.tick(2)
    second = driver.send(ShutdownReqInput(**order))
    driver.engine.scheduler.run()
    driver.collect()
    assert driver.replies.pop(first).drain_s > 0
    assert driver.replies.pop(second).drain_s == 0
    result = driver.result(rid)
    assert result.finish_reason.message == "the engine is shutting down"
    assert len(result.output_ids) > 0, "with what it had"


def test_the_deadline_ends_the_remaining_requests(driver):
    rid = driver.generate(PROMPT, 200)
    driver.tick()
    assert driver.pause("in_place").mode == "in_place"
    parked = driver.send(FlushCacheReqInput(timeout_s=LONG))
    driver.send(ShutdownReqInput(timeout_s=0.2))
    driver.engine.scheduler.run()
    driver.collect()
    assert driver.result(rid).finish_reason.type == "abort"
    assert_error(driver.replies.pop(parked), "shutting_down")


def test_a_retry_of_live_work_and_control_are_served_while_it_drains(driver):
    rid = driver.generate(PROMPT, 50, rid="r")
    driver.tick()
    driver.send(ShutdownReqInput())
    driver.tick(2)
    again = driver.generate(PROMPT, 50, client="other", rid="r")
    assert driver.status().running_requests == 1
    assert driver.call(FetchResultReqInput(rid="r")).live == 1
    assert driver.abort("r").aborted == 1
    driver.engine.scheduler.run()
    driver.collect()
    assert again == rid
    found = [result for _, output in driver.outputs for result in output.finished if result.rid == rid]
    assert len(found) == 2, "to each of the two that asked"


def test_by_default_a_message_ends_everything_at_once(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        rid = driver.generate(PROMPT, 200)
        driver.tick()
        asked = driver.send(ShutdownReqInput())
        driver.engine.scheduler.run()
        driver.collect()
        assert driver.replies.pop(asked).drain_s == 0
        assert driver.result(rid).finish_reason.message == "the engine is shutting down"
