"""Emptying of the device allocator: at which points, and never elsewhere."""

import logging

import pytest
from support.clock import clock_of
from support.scripted import EngineDriver

from caesura.io_struct import CaesuraError

MIB = 1 << 20


class Allocator:
    """A device module whose reserved memory is 12 MB before each emptying and 8 MB after."""

    def __init__(self, driver: EngineDriver) -> None:
        self.reserved = 12 * MIB
        self.emptied_while: list[str] = []
        self._lifecycle = driver.engine.state

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return 0

    def empty_cache(self) -> None:
        self.emptied_while.append(self._lifecycle.generation)
        self.reserved = 8 * MIB


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


@pytest.fixture
def allocator(driver):
    allocator = Allocator(driver)
    driver.engine.device_cache.module = allocator
    return allocator


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_continue_empties_while_still_paused_and_says_so(driver, allocator, caplog, mode):
    driver.generate([5, 6, 7], 50)
    driver.tick(3)
    driver.pause(mode)
    assert allocator.emptied_while == [], "a pause empties nothing"
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.go_on()
    assert allocator.emptied_while == ["paused"]
    assert (reply.reserved_before, reply.reserved_after, reply.freed) == (12 * MIB, 8 * MIB, 4 * MIB)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("continue_generation")]
    assert lines == ["continue_generation: reserved 12.0 MB -> 8.0 MB (freed 4.0 MB)"]


def test_new_allocations_do_not_count_as_freed(driver, allocator):
    """A freed figure is never negative; the two readings beside it say what the process did in all."""
    driver.pause()
    allocator.reserved = 8 * MIB - 4096
    reply = driver.go_on()
    assert (reply.reserved_before, reply.reserved_after, reply.freed) == (8 * MIB - 4096, 8 * MIB, 0)


def test_continue_can_be_told_not_to(driver, allocator, caplog):
    driver.pause()
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.go_on(torch_empty_cache=False)
    assert allocator.emptied_while == []
    assert (reply.was_paused, reply.reserved_before, reply.reserved_after, reply.freed) == (
        True,
        None,
        None,
        None,
    )
    assert not [r for r in caplog.records if r.getMessage().startswith("continue_generation")]


def test_continue_on_a_running_engine_does_nothing(driver, allocator):
    reply = driver.go_on()
    assert (reply.was_paused, reply.freed, allocator.emptied_while) == (False, None, [])


def test_flush_and_update_empty_only_when_asked(driver, allocator, other_model):
    driver.flush(torch_empty_cache=False)
    driver.update(other_model)
    assert allocator.emptied_while == [], "a flush inside an update empties only if that update says so"
    driver.flush()
    assert len(allocator.emptied_while) == 1
    driver.update(other_model, torch_empty_cache=True)
    assert len(allocator.emptied_while) == 2


def test_a_failed_step_empties_once(driver, allocator):
    driver.generate([5, 6, 7], 20)
    driver.tick(3)
    driver.runner.fail_next = True
    driver.run_until_idle()
    assert len(allocator.emptied_while) == 1


def test_idle_sleep_empties_once_per_idle_period(driver, allocator, monkeypatch):
    clock = clock_of(monkeypatch, ["runtime.loop"])
    idle = driver.config.idle_empty_s
    driver.complete([5, 6, 7], 4)
    clock.now += idle - 0.1
    driver.tick(3)
    assert allocator.emptied_while == [], "not before its time"
    clock.now += 0.2
    driver.tick(3)
    assert len(allocator.emptied_while) == 1
    clock.now += 10 * idle
    driver.tick(3)
    assert len(allocator.emptied_while) == 1, "once is enough: nothing has run since"
    driver.complete([5, 6, 7], 4)
    clock.now += idle + 0.1
    driver.tick(3)
    assert len(allocator.emptied_while) == 2


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_is_never_emptied_however_long_it_lasts(driver, allocator, monkeypatch, mode):
    clock = clock_of(monkeypatch, ["runtime.loop"])
    idle = driver.config.idle_empty_s
    driver.tick(2)
    driver.pause(mode)
    clock.now += 10 * idle
    driver.tick(3)
    assert allocator.emptied_while == []
    driver.go_on(torch_empty_cache=False)
    driver.tick(3)
    clock.now += idle - 0.1
    driver.tick(3)
    assert allocator.emptied_while == [], "time counts from the continue"
    clock.now += 0.2
    driver.tick(3)
    assert allocator.emptied_while == ["running"]


def test_status_reads_memory_without_emptying(driver, allocator):
    driver.status()
    assert allocator.emptied_while == []


def test_a_backend_that_does_not_tell_its_free_memory_needs_the_size_of_the_pool(tiny_model, monkeypatch):
    monkeypatch.setattr("caesura.scheduler.memory.device_memory.free_and_total", lambda module: None)
    with (
        pytest.raises(CaesuraError, match="set kv_pool_tokens") as refusal,
        EngineDriver(str(tiny_model), kv_pool_tokens=None),
    ):
        pass
    assert refusal.value.detail["field"] == "kv_pool_tokens"
    with EngineDriver(str(tiny_model), kv_pool_tokens=256) as driver:
        assert driver.status().device_memory.available is None
        driver.pause("abort")
        assert driver.release().released_tags == ["kv_cache", "weights"]
        assert driver.resume().released_tags == []
