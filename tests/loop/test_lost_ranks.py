"""A worker that is killed ends its engine by what the operating system says at once, wherever rank 0 waits at
that moment.

No wait here ends by itself in less than minutes. How long an engine takes is measured by benchmarks/ranks.py
--turns 0.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.io_struct import ErrorReply, PauseGenerationReqInput, UpdateWeightFromDiskReqInput
from caesura.scheduler.runtime.guard import EngineEndsError

pytestmark = pytest.mark.slow  # a worker takes seconds to start

KILLED = r"rank 1 \(pid \d+\) was killed by SIGKILL"


class Polls:
    """The loop's own poller, and what its last look was for and has found."""

    def __init__(self, driver: EngineDriver) -> None:
        self._poller, self._inbox = driver._inbox.poller, driver._inbox
        self.last: tuple[int | None, set[Any]] = (0, set())

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        if self._inbox._waiting:  # taken off the socket when it was sent
            return [(self._inbox._socket, zmq.POLLIN)]
        found = self._poller.poll(timeout)
        self.last = timeout, {each for each, _ in found}
        return found


@pytest.fixture
def driver(tiny_model) -> Iterator[EngineDriver]:
    with EngineDriver(str(tiny_model), scripted=False, tp=2) as driver:
        yield driver


@pytest.fixture
def worker(driver) -> psutil.Process:
    (rank,) = driver.status().ranks
    return psutil.Process(rank.pid)


def stop(worker: psutil.Process) -> None:
    worker.suspend()
    eventually(lambda: worker.status() == psutil.STATUS_STOPPED)


def run_to_its_end(driver: EngineDriver, worker: psutil.Process, when: Callable[[], bool]) -> Polls:
    scheduler = driver.engine.scheduler
    polls = Polls(driver)
    scheduler._poller = polls  # type: ignore[assignment]

    def kill() -> None:
        try:
            eventually(when)
        finally:
            worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineEndsError, match=KILLED) as caught:
        scheduler.run()
    killer.join()
    assert caught.value.error.code == "engine_died"
    return polls


def assert_all_told(driver: EngineDriver, rids: list[str]) -> None:
    driver.collect()
    for rid in rids:
        reason = driver.result(rid).finish_reason
        assert (reason.type, reason.code) == ("error", "engine_died")
        assert "was killed by SIGKILL" in reason.message


@pytest.mark.parametrize("state", ["idle", "paused in an update"])
def test_a_loop_that_sleeps_is_woken(driver, worker, other_model, state):
    rids = []
    if state != "idle":
        rids = [driver.generate([1, 2, 3 + number], 100) for number in range(3)]
        driver.tick(5)
        assert not isinstance(driver.pause("in_place"), ErrorReply)
        session = driver.begin()
        update = UpdateWeightFromDiskReqInput(
            model_path=str(other_model), session_id=session, flush_cache=False
        )
        assert not isinstance(driver.call(update, max_ticks=100_000), ErrorReply)
    polls = run_to_its_end(driver, worker, lambda: driver.engine.heartbeat.asleep)
    timeout, found = polls.last
    assert timeout is None or timeout > 1_000
    assert found & driver.engine.executor.heard.keys()
    assert_all_told(driver, rids)


def test_a_step_in_a_collective_is_broken_off(driver, worker):
    rids = [driver.generate([1, 2, 3 + number], 100) for number in range(3)]
    driver.tick(5)
    model, within = driver.engine.runner.own.model, threading.Event()
    forward = model.forward

    def entered(*arguments: Any) -> Any:
        within.set()
        return forward(*arguments)

    model.forward = entered
    stop(worker)
    run_to_its_end(driver, worker, within.is_set)
    assert_all_told(driver, rids)


def test_a_command_that_waits_for_an_answer_is_told(driver, worker):
    rid = driver.generate([1, 2, 3], 100)
    driver.tick(5)
    executor, within = driver.engine.executor, threading.Event()
    waits = executor.wait

    def entered(*arguments: Any) -> None:
        within.set()
        waits(*arguments)

    executor.wait = entered
    stop(worker)
    # Nothing is launched before this is looked at: the pause is what meets the worker that does not answer.
    command = driver.send(PauseGenerationReqInput(mode="in_place"))
    run_to_its_end(driver, worker, within.is_set)
    assert_all_told(driver, [rid])
    reply = driver.replies[command]
    assert isinstance(reply, ErrorReply)
    assert reply.code == "engine_died"
    assert "was killed by SIGKILL" in reply.message
