"""Leased prefixes: found again where unleased ones are gone, and first to go once they have ended."""

import pytest
from support.scripted import EngineDriver, prompt_of

from caesura.io_struct import EndPrefixLeasesReqInput
from caesura.scheduler.cache.manager import LEASED_SHARE

PAGES = 64


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), kv_pool_tokens=PAGES * 16) as driver:
        yield driver


def turn(driver, seed, length=128, **fields):
    return driver.complete(prompt_of(length, seed), 4, **fields).cached_tokens


def fill(driver, prompts=20):
    for seed in range(100, 100 + prompts):
        turn(driver, seed, 96)  # six pages are kept


def leases(driver):
    return driver.engine.cache.ranks[0].leases


def test_a_leased_prefix_outlives_others(driver):
    turn(driver, 1, prefix_lease="one")
    turn(driver, 2)
    fill(driver)
    assert (turn(driver, 1, prefix_lease="one"), turn(driver, 2)) == (112, 0)


def test_an_ended_lease_goes_first(driver):
    turn(driver, 1, prefix_lease="one")
    turn(driver, 2)
    reply = driver.call(EndPrefixLeasesReqInput(names=["one", "none"]))
    assert reply.ended == 1
    fill(driver, 9)
    assert turn(driver, 2) == 112
    assert turn(driver, 1) <= 16


def test_leases_end_by_time_and_hinder_nobody(driver):
    leases(driver)._clock = lambda: 0.0
    for seed in range(20):
        turn(driver, seed, 64, prefix_lease=str(seed), prefix_lease_s=5.0)
        assert driver.engine.cache.ranks[0].tree.num_leased_pages <= LEASED_SHARE * PAGES + 1
    assert 0 < len(leases(driver)) < 20
    leases(driver)._clock = lambda: 5.0
    fill(driver)
    assert len(leases(driver)) == 0


def test_flush_update_and_retraction_go_on(driver, tiny_model):
    turn(driver, 1, prefix_lease="one")
    driver.flush()
    assert (len(leases(driver)), turn(driver, 1, prefix_lease="one")) == (0, 0)
    driver.update(tiny_model)
    assert (len(leases(driver)), turn(driver, 1, prefix_lease="one")) == (0, 0)
    rid = driver.generate(prompt_of(128, 1), 64, prefix_lease="one")
    driver.tick(4)
    driver.pause("retract")
    driver.go_on()
    driver.run_until_idle()
    assert driver.result(rid).num_retractions == 1
    driver.engine.cache.check()
    assert turn(driver, 1) == 112
