"""Orders of events that random sequences rarely meet: two accidents at once, or one at the worst moment."""

import threading

import pytest
import zmq
from support.scripted import EngineDriver, assert_error
from support.waiting import eventually

from caesura.io_struct import (
    EndWeightUpdateReqInput,
    GenerateReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

VOCAB = 97
LONG = [3 + i * 7 % 90 for i in range(100)]
SHORT = [5, 6, 7, 8]


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(tiny_model, request):
    with EngineDriver(str(tiny_model), pipeline_depth=request.param, chunked_prefill_size=32) as driver:
        yield driver


@pytest.mark.parametrize("ticks", [1, 2, 3])
@pytest.mark.parametrize("accident", ["fail_next", "fail_on_fetch", "non_finite_next"])
def test_kv_of_a_step_that_failed_is_never_shared(driver, accident, ticks):
    driver.generate(LONG, 4)
    driver.tick(ticks)
    setattr(driver.runner, accident, True)
    driver.run_until_idle()
    driver.tick(2)
    again = driver.generate(LONG, 4)
    driver.run_until_idle()
    assert driver.check(again).cached_tokens == 0
    assert driver.status().kv.held == 0


def test_two_requests_of_a_client_that_left_end_in_one_step(driver):
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    shared = GenerateReqInput(input_ids=SHORT, sampling_params=params)
    driver.send(shared)
    driver.send(shared, "guest")  # attaches
    own = driver.generate(SHORT, 6, client="guest")
    driver.tick(4)
    leave(driver, "guest", own)
    driver.run_until_idle()
    driver.check(shared.id)
    assert not driver.engine.live.samples(own)
    assert driver.status().kv.held == 0


def test_abort_all_meets_a_client_that_left(driver):
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    shared = GenerateReqInput(input_ids=SHORT, sampling_params=params)
    driver.send(shared)
    driver.send(shared, "guest")
    own = driver.generate(SHORT, 60, client="guest")
    driver.tick(4)
    leave(driver, "guest", own)
    assert driver.abort(abort_all=True).aborted == 2
    driver.run_until_idle()
    assert driver.result(shared.id).finish_reason.type == "abort"
    assert driver.status().kv.held == 0


def leave(driver: EngineDriver, client: str, rid: str) -> None:
    identity = driver.engine.live.samples(rid)[0].client
    driver.collect()
    driver.clients.pop(client).close(0)
    router = driver.engine.router.socket
    for _ in range(5000):
        try:
            router.send_multipart([identity, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            assert error.errno == zmq.EHOSTUNREACH
            return
        router.poll(1)
    raise AssertionError("the engine's socket does not see that the client left")


def test_a_session_commits_while_the_engine_is_busy(driver):
    """The session's barrier holds back new steps; otherwise one would always be in flight."""
    rid = driver.generate(SHORT, 200)
    driver.tick(3)
    session_id = driver.begin()
    end = EndWeightUpdateReqInput(session_id=session_id, weight_version="v1")
    assert driver.call(end, max_ticks=5).committed
    driver.run_until_idle()
    spans = driver.check(rid).weight_versions
    assert [span.version for span in spans] == ["default", "v1"]


@pytest.mark.parametrize("command", ["update", "end"])
def test_a_session_that_expires_before_the_first_byte(tiny_model, other_model, command):
    with EngineDriver(str(tiny_model), pipeline_depth=1) as driver:
        rid = driver.generate(SHORT, 50)
        driver.tick(3)
        session_id = driver.begin()
        before = driver.check_weights().total
        update = UpdateWeightFromDiskReqInput(
            model_path=str(other_model), flush_cache=False, session_id=session_id
        )
        waiting = driver.send(
            update if command == "update" else EndWeightUpdateReqInput(session_id=session_id)
        )
        driver.hear()
        eventually(lambda: driver.engine.commands.advance() or driver.engine.dispatcher.wants_tick)
        assert driver.engine.commands.is_busy, "it was meant to wait for the step"
        driver.engine.sessions.current.deadline = 0.0
        driver.tick(2)
        assert_error(driver.replies.pop(waiting), "deadline_exceeded")
        status = driver.status()
        assert (status.weights, status.weights_epoch, status.session) == ("valid", 0, None)
        assert driver.check_weights().total == before
        driver.run_until_idle()
        assert len(driver.check(rid).weight_versions) == 1


def test_a_session_that_expires_while_its_checkpoint_is_looked_at(driver, other_model, monkeypatch):
    looked, go_on, open_fitting = threading.Event(), threading.Event(), driver.engine.open_folder

    def slow(*arguments):
        looked.set()
        assert go_on.wait()
        return open_fitting(*arguments)

    monkeypatch.setattr(driver.engine, "open_folder", slow)
    session_id = driver.begin()
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model), session_id=session_id))
    driver.tick()
    assert looked.wait()
    driver.engine.sessions.current.deadline = 0.0
    driver.tick()
    assert driver.status().session is None
    go_on.set()
    eventually(lambda: driver.tick() or update in driver.replies)
    assert_error(driver.replies.pop(update), "deadline_exceeded")
    status = driver.status()
    assert (status.weights, status.weights_epoch) == ("valid", 0)


def test_update_that_aborts_all_may_flush_frozen_requests(driver, other_model):
    rid = driver.generate(SHORT, 50)
    driver.tick(5)
    driver.pause("in_place")
    reply = driver.update(other_model, abort_all_requests=True)
    assert (reply.committed, reply.flushed) == (True, True)
    assert driver.check(rid).finish_reason.type == "abort"
    kv = driver.status().kv
    assert kv.free == kv.total


def test_a_recomputed_prefix_is_of_one_epoch(driver, other_model):
    rid = driver.generate(LONG, 20)
    driver.tick(8)
    driver.pause("retract")
    driver.update(other_model)
    driver.go_on(torch_empty_cache=False)
    driver.tick(1)
    assert driver.status().prefilling_requests == 1
    driver.pause("in_place")
    driver.update(other_model, flush_cache=False)
    driver.go_on(torch_empty_cache=False)
    driver.run_until_idle()
    result = driver.check(rid)
    spans = result.weight_versions
    assert [(span.epoch, span.stale_kv) for span in spans] == [(0, False), (2, False)]
    assert result.num_retractions == 1, "the restart is no retraction"
