"""The log line about load and the throughput of status: over which time, how often, never while idle."""

import logging

import pytest
from support.clock import Clock, clock_of
from support.scripted import EngineDriver

from caesura.scheduler.observability.throughput import WINDOW_S

INTERVAL = 10.0
NEVER_S = 1e9


@pytest.fixture
def clock(monkeypatch):
    return clock_of(
        monkeypatch,
        ["runtime.loop", "runtime.housekeeping", "control.engine_state", "observability.throughput"],
    )


@pytest.fixture
def driver(tiny_model, clock, caplog):
    caplog.set_level(logging.INFO, logger="caesura")
    # An idle engine wakes for nothing else.
    with EngineDriver(
        str(tiny_model), log_stats_interval_s=INTERVAL, idle_empty_s=NEVER_S, kv_pool_tokens=4096
    ) as driver:
        yield driver


def lines(caplog) -> list[str]:
    found = [message for message in caplog.messages if message.startswith("load: ")]
    caplog.clear()
    return found


def step_for(driver: EngineDriver, clock: Clock, seconds: int) -> None:
    for _ in range(4 * seconds):
        driver.tick()
        clock.now += 0.25


def sleeps(driver: EngineDriver) -> float | None:
    return driver.sleep_s(driver.ongoing)


def test_a_line_each_interval_while_requests_run(driver, clock, caplog):
    driver.generate(list(range(3, 35)), 100)
    driver.generate(list(range(3, 35)), 100)
    step_for(driver, clock, 21)
    first, second = lines(caplog)
    assert first.startswith("load: running; 2 running, 0 waiting, KV ")
    assert "prefilled 4.8 tok/s, prefix hits 25 %;" in first, (
        "of 64 prompt tokens, 16 lay in a page of the other"
    )
    assert second.endswith("generated 8.0 tok/s, prefilled 0.0 tok/s, prefix hits none; over 10.0 s")
    driver.run_until_idle()
    assert 0 < sleeps(driver) <= INTERVAL, "the only thing that it wakes for"
    clock.advance(sleeps(driver), driver)
    (last,) = lines(caplog)
    assert last.startswith("load: running; 0 running, 0 waiting, KV 0 % held; generated ")
    for _ in range(3):
        clock.advance(3600, driver)
    assert lines(caplog) == []
    assert sleeps(driver) > NEVER_S / 2


def test_an_hour_of_rest_is_not_averaged_in(driver, clock, caplog):
    driver.complete([5, 6, 7], 2)
    clock.advance(INTERVAL, driver, 2)
    assert len(lines(caplog)) == 1
    clock.now += 3600
    driver.generate([5, 6, 7], 200)
    step_for(driver, clock, 11)
    (line,) = lines(caplog)
    assert "generated 4.0 tok/s" in line
    assert line.endswith("over 10.0 s")


def test_a_pause_is_said_and_counted(driver, clock, caplog):
    driver.generate([5, 6, 7], 200)
    step_for(driver, clock, 2)
    driver.pause("in_place")
    clock.now += 4.0
    driver.go_on()
    step_for(driver, clock, 5)
    (line,) = lines(caplog)
    assert line.endswith(", 4.0 s of them paused")
    driver.pause("in_place")
    clock.advance(INTERVAL, driver, 2)
    (line,) = lines(caplog)
    assert line.startswith("load: paused in_place; 1 running, 0 waiting")
    clock.advance(3600, driver, 2)
    assert lines(caplog) == [], "a pause is no work"


def test_recomputed_prompts_count_as_prefill(driver, clock, caplog):
    driver.generate(list(range(3, 35)), 200)
    step_for(driver, clock, 1)
    driver.pause("retract")
    driver.update(driver.config.model_path)
    driver.go_on()
    step_for(driver, clock, 10)
    (line,) = lines(caplog)
    assert "prefilled 6.8 tok/s" in line, "32 tokens, and again with the 4 that were sampled"


def test_without_an_interval_there_is_no_line(tiny_model, clock, caplog):
    caplog.set_level(logging.INFO, logger="caesura")
    with EngineDriver(str(tiny_model), log_stats_interval_s=0.0, idle_empty_s=NEVER_S) as driver:
        driver.generate([5, 6, 7], 60)
        step_for(driver, clock, 12)
        assert driver.status().gen_throughput == pytest.approx(4.0, rel=0.1)
        driver.run_until_idle()
        assert sleeps(driver) > NEVER_S / 2
        assert lines(caplog) == []


def test_status_has_the_throughput_of_the_last_seconds(driver, clock):
    assert driver.status().gen_throughput == 0.0
    driver.generate([5, 6, 7], 200)
    step_for(driver, clock, 2)
    assert driver.status().gen_throughput == pytest.approx(4.0, rel=0.3), "since the work began"
    step_for(driver, clock, 20)
    assert driver.status().gen_throughput == pytest.approx(4.0, rel=0.1)
    driver.pause("in_place")
    clock.now += 3.0
    assert 0.5 < driver.status().gen_throughput < 3.0
    clock.now += WINDOW_S
    assert driver.status().gen_throughput == 0.0, "nothing of it is in the window any more"
    driver.go_on()
    clock.advance(8.0, driver)
    clock.now += 8.0
    assert driver.status().gen_throughput > 0.0, "a step may be longer than the window"
