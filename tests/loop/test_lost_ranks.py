"""A worker that is killed ends its engine by what the operating system says at once, wherever rank 0 waits at
that moment.

No wait here ends by itself in less than minutes. How long an engine takes is measured by benchmarks/ranks.py
--turns 0.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import zmq
from support import engine_template
from support.checkpoints import make_checkpoint
from support.deltas import SentDelta, some_changed
from support.lanes import quick
from support.plain_trainer import free_port, weights_of
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.client.launch.launcher import worker_command
from caesura.io_struct import (
    ContinueGenerationReqInput,
    DeltaBase,
    ErrorReply,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from caesura.scheduler.executor.rpc import decode_call
from caesura.scheduler.executor.workers import Workers
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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        sizes = {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "hidden_size": 36,
            "num_experts_per_tok": 1,
        }
        make_checkpoint(path, "deepseek-v3", seed=seed, **sizes)
    return paths


def updated(driver, models):
    return UpdateWeightFromDiskReqInput(model_path=str(models[1]))


def changed(driver, models):
    weights = weights_of(models[0])
    sent = SentDelta(weights, some_changed(weights))
    driver.buffers = [memoryview(sent.buffer)]
    return UpdateWeightsFromTensorReqInput(specs=sent.specs, delta=DeltaBase(base_epoch=0))


def released(driver, models):
    driver.pause("retract")
    return ReleaseMemoryOccupationReqInput()


def resumed(driver, models):
    driver.call(released(driver, models))
    return ResumeMemoryOccupationReqInput()


def continued(driver, models):
    driver.pause("in_place")
    return ContinueGenerationReqInput()


CALLS: dict[str, Callable[[EngineDriver, Any], Any]] = {
    "write": updated,
    "commit_delta": changed,
    "derive": updated,
    "release": released,
    "open": updated,
    "digests": updated,
    "swap": changed,
    "resume": resumed,
    "empty": continued,
    "synchronize": lambda driver, models: PauseGenerationReqInput(mode="in_place"),
    "checksums": lambda driver, models: WeightsCheckerReqInput(action="checksum"),
    "execute": lambda driver, models: None,
}
"""Commands in whose midst rank 0 calls the workers."""


@pytest.fixture
def workers() -> Iterator[list[psutil.Process]]:
    """Yield a list for processes, none of which outlives the test."""
    found: list[psutil.Process] = []
    yield found
    assert found
    eventually(lambda: all(has_ended(each) for each in found))


@pytest.fixture
def killed_before(monkeypatch, workers):
    """Return a function that kills the last rank when it is called next, before the call reaches it."""

    def kill(method: str) -> None:
        send = Workers.send_to

        def send_to(self: Workers, rank: int, frames: Any) -> None:
            if rank == max(self.joined) and decode_call(frames[0]).method == method:
                workers.extend(psutil.Process(self.joined[each].pid) for each in sorted(self.joined))
                workers[-1].kill()
            send(self, rank, frames)

        monkeypatch.setattr(Workers, "send_to", send_to)

    return kill


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(models, workers):
    """Return a function that starts an engine of three ranks, the last one over gloo if ``joins``."""
    with ExitStack() as stack:

        def started(*, joins: bool = False, **options: Any) -> EngineDriver:
            if joins:
                options |= {"tp_joined": 1, "tp_address": f"tcp://127.0.0.1:{free_port()}"}
                command = worker_command("--join", options["tp_address"], "--rank", "2")
                worker = engine_template.Process(command)
                stack.callback(worker.wait)
                stack.callback(worker.kill)
            division = {"tp": 3, "ep": 3, "dp_attention": 3, "scripted": False}
            return stack.enter_context(EngineDriver(str(models[0]), **division, **options))

        yield started


LOST = r"rank 2 \(pid \d+\) was killed by SIGKILL|the connection to rank 2 \(pid \d+ on .+\) has ended"


@pytest.mark.parametrize("joins", quick([False, True]))
@pytest.mark.parametrize("method", quick(CALLS, 3))
def test_a_rank_that_is_killed_at_a_call_ends_the_engine(start, models, killed_before, method, joins):
    driver = start(joins=joins)
    rids = [driver.generate([1, 2, 3 + number], 100) for number in range(4)]
    driver.tick(3)
    driver.buffers = ()
    message = CALLS[method](driver, models)
    killed_before(method)
    command = message and driver.send(message, buffers=driver.buffers)
    with pytest.raises(EngineEndsError, match=LOST) as caught:
        driver.engine.scheduler.run()
    assert caught.value.error.code == "engine_died"
    driver.collect()
    for rid in rids:
        assert driver.result(rid).finish_reason.code == "engine_died"
    if message:
        reply = driver.replies[command]
        assert isinstance(reply, ErrorReply)
        assert reply.code == "engine_died"


@pytest.mark.parametrize("joins", quick([False, True]))
@pytest.mark.parametrize("method", quick(["all_to_all", "gather_rows", "reduce_scatter"]))
def test_a_rank_that_is_killed_in_a_collective_ends_the_engine(start, workers, monkeypatch, method, joins):
    driver = start(joins=joins)
    rids = [driver.generate([1, 2, 3 + number], 100) for number in range(4)]
    driver.tick(3)
    workers += [psutil.Process(rank.pid) for rank in driver.status().ranks]
    group = driver.engine.executor.parallel
    call = getattr(group, method)

    def entered(*arguments: Any) -> Any:
        workers[-1].kill()
        return call(*arguments)

    monkeypatch.setattr(group, method, entered)
    rids.append(driver.generate([1, 2] * 9, 100))  # rows of prompts alone are exchanged
    with pytest.raises(EngineEndsError, match=LOST):
        driver.engine.scheduler.run()
    driver.collect()
    for rid in rids:
        assert driver.result(rid).finish_reason.code == "engine_died"


@pytest.mark.parametrize("joins", quick([True, False]))
@pytest.mark.parametrize("method", quick(["start", "offer", "agree"]))
def test_a_rank_that_is_killed_in_a_start_ends_it(start, killed_before, method, joins):
    killed_before(method)
    with pytest.raises(EngineEndsError, match=LOST):
        start(joins=joins, kv_pool_tokens=None, kv_memory_fraction=0.001)
