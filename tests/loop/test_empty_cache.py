"""Emptying of the device allocator: at which points, in which order, and never elsewhere."""

import logging
import re
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.buckets_by_hand import Sender
from support.clock import clock_of
from support.faults import Fault
from support.scripted import EngineDriver

from caesura.io_struct import (
    CaesuraError,
    ErrorCode,
    GetMemoryHistoryReqInput,
    PauseGenerationReqInput,
    ScoreReqInput,
)
from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.executor.executor import Executor

MIB = 1 << 20
FREED = "reserved 12.0 MB -> 8.0 MB (freed 4.0 MB)"


class Allocator:
    """A device module whose reserved memory is 12 MB before each emptying and 8 MB after."""

    def __init__(self, driver: EngineDriver) -> None:
        self.reserved = 12 * MIB
        self.log: list[str] = []
        """The generation and the epoch of the weights of each emptying, and what tests add."""
        self.on_empty: Callable[[], None] = lambda: None
        self._state = driver.engine.state

    def memory_reserved(self) -> int:
        return self.reserved

    def memory_allocated(self) -> int:
        return 7 * MIB

    def empty_cache(self) -> None:
        self.log.append(f"{self._state.generation} {self._state.stamp.epoch}")
        self.reserved = 8 * MIB
        self.on_empty()


def allocator_of(driver: EngineDriver) -> Allocator:
    driver.engine.device_cache.module = Allocator(driver)
    return driver.engine.device_cache.module


@pytest.fixture
def allocator(driver):
    return allocator_of(driver)


@pytest.fixture
def judging(tiny_model):
    with EngineDriver(str(tiny_model), reference_model_path=str(tiny_model)) as driver:
        yield driver, allocator_of(driver)


class Scratch:
    """A tensor of work that failed, and whether it was alive at each emptying."""

    tensor: weakref.ref | None = None

    def __init__(self) -> None:
        self.alive: list[bool] = []

    def fail(self, make: Callable[[], Exception]) -> None:
        temporary = torch.zeros(10)
        self.tensor = weakref.ref(temporary)
        raise make()  # no name here may keep the error, which keeps this frame

    def look(self) -> None:
        self.alive.append(self.tensor() is not None)


def emptied(driver: EngineDriver) -> dict[str, tuple[int, int]]:
    return {each.place: (each.count, each.freed_bytes) for each in driver.status().totals.emptied}


def test_emptyings_are_counted_by_place(driver, allocator):
    for call in (driver.flush, driver.flush, driver.pause, driver.go_on):
        call()
    found = emptied(driver)
    assert found.pop("start")[0] == 1
    assert found == {"flush": (2, 4 * MIB), "continue": (1, 0)}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_continue_empties_while_still_paused_and_says_so(driver, allocator, caplog, mode):
    driver.generate([5, 6, 7], 50)
    driver.tick(3)
    driver.pause(mode)
    assert allocator.log == [], "a pause empties nothing"
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.go_on()
    assert allocator.log == ["paused 0"]
    assert (reply.reserved_before, reply.reserved_after, reply.freed) == (12 * MIB, 8 * MIB, 4 * MIB)
    assert [line for line in caplog.messages if line.startswith("continue_generation")] == [
        f"continue_generation: {FREED}"
    ]


def test_an_expired_lease_empties_before_it_continues(driver, allocator, caplog):
    driver.pause(owner="trainer", lease_s=60.0)
    driver.engine.state.ownership.lease.expires = 0.0
    with caplog.at_level(logging.INFO, logger="caesura"):
        driver.tick()
    assert allocator.log == ["paused 0"]
    assert driver.status().generation == "running"
    assert f"lease_expiry: {FREED}" in caplog.messages


def test_new_allocations_do_not_count_as_freed(driver, allocator):
    """A freed figure is never negative; the two readings beside it say what the process did in all."""
    driver.pause()
    allocator.reserved = 8 * MIB - 4096
    reply = driver.go_on()
    assert (reply.reserved_before, reply.reserved_after, reply.freed) == (8 * MIB - 4096, 8 * MIB, 0)


def test_continue_empties_only_a_paused_engine_that_asks(driver, allocator, caplog):
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.go_on()
        assert (reply.was_paused, reply.freed) == (False, None)
        driver.pause()
        reply = driver.go_on(torch_empty_cache=False)
    assert (reply.was_paused, reply.reserved_before, reply.reserved_after, reply.freed) == (True, *[None] * 3)
    assert allocator.log == []
    assert not any(line.startswith("continue_generation") for line in caplog.messages)


def test_flush_and_update_empty_only_when_asked(driver, allocator, other_model):
    driver.flush(torch_empty_cache=False)
    driver.update(other_model)
    assert allocator.log == [], "a flush inside an update empties only if that update says so"
    driver.flush()
    driver.update(other_model, torch_empty_cache=True)
    assert allocator.log == ["running 1", "running 2"]


@pytest.mark.parametrize("command", ["go_on", "flush"])
def test_implicit_commit_derives_before_it_empties(driver, allocator, other_model, command):
    driver.pause("abort")
    assert not Sender(driver, other_model).send(0).committed
    assert allocator.log == []
    getattr(driver, command)()
    assert allocator.log == ["paused 1"]


@pytest.mark.parametrize("asks", [(True, False), (False, True), (False, False)])
def test_one_call_of_a_session_that_asks_is_enough(driver, allocator, other_model, asks):
    driver.complete([5] * 40, 4)
    session = driver.begin()
    sender = Sender(driver, other_model)
    for number, each in enumerate(asks):
        sender.send(number, session_id=session, flush_cache=each, torch_empty_cache=each)
    assert driver.end(session_id=session).flushed is any(asks)
    assert driver.status().kv.cached == 0
    assert allocator.log == (["running 1"] if any(asks) else [])


@pytest.fixture
def scratch(allocator) -> Scratch:
    found = Scratch()
    allocator.on_empty = found.look
    return found


def test_a_failed_step_empties_once_it_is_forgotten(driver, scratch):
    def fail(batch: ForwardBatch) -> None:
        if scratch.tensor is None:
            scratch.fail(torch.OutOfMemoryError)

    driver.generate([5, 6, 7], 20)
    driver.tick(3)
    driver.runner.before = fail
    driver.run_until_idle()
    assert scratch.alive == [False]


def test_idle_sleep_empties_once_per_idle_period(driver, allocator, monkeypatch):
    clock = clock_of(monkeypatch, ["runtime.loop"])
    idle = driver.config.idle_empty_s
    driver.complete([5, 6, 7], 4)
    for step_s, times in ((idle - 0.1, 0), (0.2, 1), (10 * idle, 1)):  # nothing has run since
        clock.advance(step_s, driver, 3)
        assert len(allocator.log) == times
    driver.complete([5, 6, 7], 4)
    clock.advance(idle + 0.1, driver, 3)
    assert len(allocator.log) == 2


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_is_never_emptied_however_long_it_lasts(driver, allocator, monkeypatch, mode):
    clock = clock_of(monkeypatch, ["runtime.loop"])
    idle = driver.config.idle_empty_s
    driver.tick(2)
    driver.pause(mode)
    clock.advance(10 * idle, driver, 3)
    driver.go_on(torch_empty_cache=False)
    driver.tick(3)
    clock.advance(idle - 0.1, driver, 3)
    assert allocator.log == [], "time counts from the continue"
    clock.advance(0.2, driver, 3)
    assert allocator.log == ["running 0"]


@pytest.mark.parametrize("log_stages", [True, False])
def test_looking_empties_nothing_and_stages_are_logged(tiny_model, caplog, log_stages):
    caplog.set_level(logging.DEBUG, logger="caesura")
    with EngineDriver(str(tiny_model), log_stages=log_stages) as driver:
        module = allocator_of(driver)
        driver.status()
        driver.call(GetMemoryHistoryReqInput())
        driver.complete([5, 6, 7], 3)
        driver.engine.history.sample()
        driver.pause()
    assert module.log == []
    ends = [line for line in caplog.messages if re.match(r"stage (decode|pause) ends after", line)]
    assert bool(ends) is log_stages
    assert all(re.search(r"reserved [\d.]+ MiB, allocated [\d.]+ MiB$", line) for line in ends)
    assert ("stage pause begins" in caplog.messages) is log_stages


# --- what fails


@pytest.mark.parametrize(
    ("part", "method", "error"),
    [
        pytest.param(lambda e: e.scoring.model, "forward_by_layer", MemoryError(), id="in a chunk"),
        pytest.param(lambda e: e.residency, "leave", MemoryError(), id="outside of its chunks"),
        pytest.param(lambda e: e.residency, "leave", OSError("no space"), id="the reference cannot leave"),
    ],
)
def test_a_failed_score_empties(judging, part, method, error):
    driver, module = judging
    driver.send(ScoreReqInput(input_ids=[[1, 2, 3]], start=[1]))
    with Fault(part(driver.engine), method, error, range(100)):
        driver.tick(20)
    assert module.log == ["running 0"]


def test_emptying_waits_for_a_score_on_the_forward_stream(judging):
    driver, module = judging
    driver.pause()
    driver.runner.synchronize = lambda: module.log.append("idle")
    module.log.clear()
    driver.send(ScoreReqInput(input_ids=[[1, 2, 3, 4]], start=[1]))
    driver.go_on()
    assert module.log[:2] == ["idle", "paused 0"]


@pytest.fixture
def answers(driver, allocator):
    """Log each answer, too."""
    replies = driver.engine.replies
    answer = replies.send_answer
    replies.send_answer = lambda *said: (allocator.log.append("answered"), answer(*said))[1]


@pytest.mark.parametrize(
    ("make", "code"), [(MemoryError, "out_of_memory"), (partial(CaesuraError, "busy", "half"), "busy")]
)
def test_a_commit_that_fails_empties_before_it_answers(
    driver, allocator, answers, scratch, other_model, monkeypatch, make, code
):
    # pytest keeps records, exceptions included.
    monkeypatch.setattr(logging.getLogger("caesura"), "propagate", False)
    driver.engine.model.finalize_weights = lambda: scratch.fail(make)
    assert driver.update(other_model).code == code
    assert allocator.log == ["running 0", "answered"]
    if code == "out_of_memory":
        assert scratch.alive == [False]
    assert driver.status().weights == "poisoned"


def test_a_refused_command_empties_nothing(driver, allocator, tmp_path):
    assert driver.update(tmp_path).code == ErrorCode.CHECKPOINT_ERROR
    assert allocator.log == []


def test_a_message_that_fails_at_once_empties_and_answers(driver, allocator, answers):
    driver.send(PauseGenerationReqInput())
    with Fault(driver.engine.answers, "attach", MemoryError()):
        driver.tick(2)
    assert allocator.log == ["running 0", "answered"]


# --- the start of an engine


def test_the_model_is_warm_before_its_graphs_are_captured(tiny_model, monkeypatch):
    """The warm-up runs in inference mode: autograd would keep tensors alive by what was made from them."""
    order: list[str | bool] = []
    dummy_run = ModelRunner._dummy_run

    class Graphs:
        nbytes = 0

        def capture(self):
            order.append("captured")
            yield

    def warm(runner: ModelRunner, *arguments: object) -> object:
        order.append(torch.is_inference_mode_enabled())
        runner.graphs = Graphs()
        return dummy_run(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "_dummy_run", warm)
    with EngineDriver(str(tiny_model), scripted=False):
        pass
    assert order == [True, "captured"]


def test_the_pool_is_sized_for_the_rank_that_has_the_least(tiny_model, monkeypatch):
    with EngineDriver(str(tiny_model), kv_pool_tokens=None) as driver:
        alone, per_token = driver.status().kv.total, driver.status().kv.bytes_per_token
    monkeypatch.setattr(Executor, "all_reduce_min", lambda _, value: min(value, 1 * MIB))
    with EngineDriver(str(tiny_model), kv_pool_tokens=None, kv_memory_fraction=0.5) as driver:
        total = driver.status().kv.total
    assert total < alone
    assert total * per_token <= MIB // 2 < (total + 16) * per_token


def test_a_device_of_unknown_free_memory_needs_a_pool_size(tiny_model, monkeypatch):
    monkeypatch.setattr("caesura.scheduler.memory.device_memory.free_and_total", lambda module: None)
    with pytest.raises(CaesuraError, match="set kv_pool_tokens") as refusal:
        EngineDriver(str(tiny_model), kv_pool_tokens=None)
    assert refusal.value.detail["field"] == "kv_pool_tokens"
    with EngineDriver(str(tiny_model), kv_pool_tokens=256) as driver:
        assert driver.status().device_memory.available is None
        driver.pause("abort")
        assert driver.release().released_tags == ["kv_cache", "weights"]
        assert driver.resume().released_tags == []
