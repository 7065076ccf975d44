"""The real loop over a scripted model: batching, pausing and updates judged by the tokens that come out."""

import threading

import pytest
import zmq
from support.scripted import EngineDriver, assert_error, prompt_of, tokens_of
from support.waiting import eventually

from caesura.io_struct import (
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


@pytest.fixture
def driver(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        yield driver


def test_prompt_is_chunked_and_decoding_goes_on_meanwhile(driver):
    short = driver.generate(prompt_of(4), 30)
    driver.tick(3)
    long = driver.generate(prompt_of(100, 1), 4)
    driver.run_until_idle()
    driver.check(short)
    driver.check(long)
    mixed = [lens for decode, lens in driver.runner.launches if decode and len(lens) > decode]
    assert [lens[-1] for lens in mixed] == [32, 32, 32, 4], (
        "the prompt must be cut into chunks of 32 beside decoding"
    )


@pytest.mark.parametrize("updates", [False, True])
def test_the_first_step_after_a_stop_only_decodes(driver, other_model, updates):
    running = driver.generate(prompt_of(4), 30)
    driver.tick(4)
    waiting = [driver.generate(prompt_of(100, seed), 4) for seed in (1, 2)]
    for is_decode_alone in (True, False, True, False):
        driver.pause("in_place")
        if updates:
            driver.update(other_model, flush_cache=False)
        launched = len(driver.runner.launches)
        driver.go_on(torch_empty_cache=False)
        decode, lens = driver.runner.launches[launched]
        assert (decode, len(lens) == decode) == (1, is_decode_alone)
    driver.run_until_idle()
    for rid in (running, *waiting):
        driver.check(rid)


def test_prompts_end_under_updates_at_every_step(driver, tiny_model, other_model):
    running = driver.generate(prompt_of(4), 60)
    driver.tick(4)
    waiting = driver.generate(prompt_of(60), 1)
    for paths in (other_model, tiny_model) * 6:
        launched = len(driver.runner.launches)
        while len(driver.runner.launches) == launched:
            driver.tick()
        driver.pause("in_place")
        driver.update(paths, flush_cache=False)
        driver.go_on(torch_empty_cache=False)
    assert driver.result(waiting)
    driver.run_until_idle()
    driver.check(running)


def test_prefix_hit_of_a_finished_request(driver):
    prompt = prompt_of(40)
    result = driver.complete(prompt, 20)
    longer = prompt + tokens_of(result) + [5, 6, 7]
    second = driver.generate(longer, 5)
    driver.run_until_idle()
    assert driver.check(second).cached_tokens == 48
    salted = driver.generate(longer, 5, cache_salt="other")
    driver.run_until_idle()
    assert driver.check(salted).cached_tokens == 0


def test_stop_token_ends_and_is_kept(driver):
    prompt = prompt_of(6)
    rid = driver.generate(prompt, 12)
    driver.run_until_idle()
    tokens = tokens_of(driver.result(rid))
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    params = SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=[stop])
    result = driver.complete(prompt, sampling_params=params)
    assert tokens_of(result) == tokens[: tokens.index(stop) + 1]
    assert (result.finish_reason.type, result.finish_reason.matched) == ("stop", stop)
    assert driver.status().kv.held == 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_at_any_step(driver, mode):
    prompts = [prompt_of(70), prompt_of(3, 1), prompt_of(20, 2)]
    for ticks in range(1, 16):
        rids = [driver.generate(p, 10) for p in prompts]
        driver.tick(ticks)
        reply = driver.pause(mode)
        launched = len(driver.runner.launches)
        status = driver.status()
        assert (status.generation, status.pause_mode, reply.step) == ("paused", mode, launched)
        assert driver.ongoing is None
        if mode == "abort":
            assert all((rid, 0) in driver.results for rid in rids), "whatever had not ended has ended"
            assert reply.aborted_requests <= 3
            assert status.running_requests + status.prefilling_requests + status.waiting_requests == 0
        if mode in ("abort", "retract"):
            assert (reply.held_tokens, status.kv.held) == (0, 0)
        driver.tick(5)
        assert len(driver.runner.launches) == launched, "a paused engine launches nothing"
        driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        for result in map(driver.check, rids):
            assert len(result.weight_versions) == (1 if result.output_ids else 0)
            if mode != "abort" or result.finish_reason.type == "length":
                assert len(tokens_of(result)) == 10
            else:
                assert result.finish_reason.message == "Aborted by pause_generation"
        aborted = [rid for rid in rids if driver.result(rid).finish_reason.type == "abort"]
        assert len(aborted) == reply.aborted_requests
        assert driver.status().kv.held == 0
        driver.flush(torch_empty_cache=False)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_while_the_pool_is_exhausted(tiny_model, depth, mode):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, kv_pool_tokens=96) as driver:
        for ticks in range(1, 50, 4):
            rids = [driver.generate(prompt_of(20, seed), 50) for seed in range(4)]
            driver.tick(ticks)
            driver.pause(mode)
            if mode != "in_place":
                assert driver.status().kv.held == 0
            driver.go_on(torch_empty_cache=False)
            driver.run_until_idle()
            results = [driver.check(rid) for rid in rids]
            if mode == "abort":
                assert [result.finish_reason.type for result in results] == ["abort"] * 4
            else:
                assert [len(tokens_of(result)) for result in results] == [50] * 4
                assert sum(result.num_retractions for result in results) > 0, "the pool was meant to run out"
                if mode == "in_place":
                    assert results[0].num_retractions == 0, "the oldest request is never preempted"
            driver.flush(torch_empty_cache=False)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("mode", ["retract", "in_place", None])
def test_update_in_the_middle(driver, other_model, mode, flush):
    prompts = [prompt_of(70), prompt_of(3, 1)]
    rids = [driver.generate(p, 12) for p in prompts]
    driver.tick(6)
    if mode is not None:
        driver.pause(mode)
    reply = driver.update(other_model, flush_cache=flush, weight_version="v1")
    if mode == "in_place" and flush:
        assert_error(reply, "not_idle")
        assert driver.status().weights_epoch == 0
        return
    assert (reply.committed, reply.weights_epoch, reply.weight_version) == (True, 1, "v1")
    if mode is not None:
        driver.go_on(torch_empty_cache=False)
    late = driver.generate(prompts[0], 5)
    driver.run_until_idle()
    assert driver.check(late).weight_versions[0].epoch == 1
    for result in map(driver.check, rids):
        spans = result.weight_versions
        assert [s.version for s in spans] == ["default", "v1"]
        assert spans[1].stale_kv == (not flush and mode != "retract")
        assert (spans[0].start, spans[-1].end) == (0, 12)


def test_a_request_without_tokens_restarts_its_prefill(driver, other_model):
    prompt = prompt_of(100)
    rid = driver.generate(prompt, 5)
    driver.tick(2)
    assert driver.status().prefilling_requests == 1
    driver.pause("in_place")
    driver.update(other_model, flush_cache=False)
    assert driver.status().kv.held == 0
    driver.go_on(torch_empty_cache=False)
    driver.run_until_idle()
    spans = driver.check(rid).weight_versions
    assert [(s.epoch, s.stale_kv) for s in spans] == [(1, False)]


def test_no_kv_crosses_epochs_through_the_prefix_cache(driver, other_model):
    prompt = prompt_of(60)
    driver.complete(prompt, 4)
    crossing = driver.generate(prompt, 20)
    driver.tick(6)
    driver.pause("in_place")
    driver.update(other_model, flush_cache=False)
    driver.go_on(torch_empty_cache=False)
    fresh = driver.generate(prompt, 6)
    driver.run_until_idle()
    assert driver.check(crossing).weight_versions[-1].stale_kv
    assert driver.check(fresh).cached_tokens == 0
    again = driver.generate(prompt, 6)
    driver.run_until_idle()
    assert driver.check(again).cached_tokens == 48, "the fresh request's KV is shared, the stale one's is not"


def test_abort_returns_partial_tokens_from_everywhere(tiny_model, depth):
    with EngineDriver(
        str(tiny_model), pipeline_depth=depth, max_running_requests=2, chunked_prefill_size=32
    ) as driver:
        running = driver.generate(prompt_of(4), 50)
        driver.tick(6)
        chunked = driver.generate(prompt_of(120, 1), 5)
        queued = driver.generate(prompt_of(4, 2), 5)
        driver.tick(2)
        for rid in (running, chunked, queued):
            assert driver.abort(rid).aborted == 1
        assert driver.abort("never heard of").aborted == 0
        driver.run_until_idle()
        assert len(tokens_of(driver.check(running))) > 3
        assert [driver.result(r).finish_reason.type for r in (running, chunked, queued)] == ["abort"] * 3
        driver.tick(2)
        assert driver.status().kv.held == 0


def test_a_flush_with_a_timeout_lets_others_pass(driver):
    rid = driver.generate(prompt_of(4), 10)
    driver.tick(2)
    flush = driver.send(FlushCacheReqInput(timeout_s=60))
    driver.tick(2)
    assert driver.pause("in_place").held_requests == 1
    driver.go_on()
    assert flush not in driver.replies
    driver.run_until_idle()
    driver.tick(2)
    assert driver.replies.pop(flush).freed_tokens >= 0
    driver.check(rid)


def test_requests_while_paused_can_be_refused(tiny_model):
    with EngineDriver(str(tiny_model), requests_while_paused="refuse") as driver:
        driver.pause()
        message = GenerateReqInput(input_ids=[3, 4])
        assert_error(driver.call(message), "paused")


def test_an_explicit_session_on_a_busy_engine(driver, other_model):
    rid = driver.generate(prompt_of(4), 60)
    driver.tick(3)
    # Its barrier holds back new steps; otherwise one would always be in flight.
    end = EndWeightUpdateReqInput(session_id=driver.begin(), weight_version="v0")
    assert driver.call(end, max_ticks=5).committed
    session_id = driver.begin()
    driver.tick(5)
    assert driver.status().step >= 5
    driver.update(other_model, flush_cache=False, session_id=session_id)
    step = driver.status().step
    driver.tick(5)
    driver.assert_status(step=step, weights="updating", generation="running")
    assert driver.end(session_id=session_id, weight_version="v1").committed
    driver.run_until_idle()
    spans = driver.check(rid).weight_versions
    assert [(s.version, s.stale_kv) for s in spans] == [("default", False), ("v0", True), ("v1", True)]


@pytest.fixture
def slow_open(driver):
    """Return two events of the thread that looks at a checkpoint: that it does, and that it may go on."""
    looked, go_on, open_folder = threading.Event(), threading.Event(), driver.engine.open_folder

    def slow(*arguments):
        looked.set()
        assert go_on.wait()
        return open_folder(*arguments)

    driver.engine.open_folder = slow
    return looked, go_on


def test_all_is_answered_while_a_checkpoint_is_looked_at(driver, other_model, slow_open):
    looked, go_on = slow_open
    rid = driver.generate(prompt_of(4), 200)
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    driver.tick()
    assert looked.wait()
    before = driver.status().generated_tokens
    driver.tick(3)
    assert driver.status().generated_tokens > before
    assert driver.abort(rid).aborted == 1
    assert update not in driver.replies
    go_on.set()
    eventually(lambda: driver.tick() or update in driver.replies)
    assert driver.replies.pop(update).committed


def test_an_idle_loop_sleeps_while_a_checkpoint_is_read(driver, other_model):
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    driver.tick()
    if update not in driver.replies and not driver.engine.dispatcher.wants_tick:
        poller = zmq.Poller()
        poller.register(driver.engine.wakeup.fd, zmq.POLLIN)
        assert poller.poll(60_000)
    eventually(lambda: driver.tick() or update in driver.replies)


LONG = [3 + i * 7 % 90 for i in range(100)]
SHORT = [5, 6, 7, 8]


@pytest.mark.parametrize("accident", ["fail_next", "fail_on_fetch", "non_finite_next"])
def test_kv_of_a_step_that_failed_is_never_shared(driver, accident):
    for ticks in (1, 2, 3):
        driver.generate(LONG, 4)
        driver.tick(ticks)
        setattr(driver.runner, accident, True)
        driver.run_until_idle()
        driver.tick(2)
        again = driver.generate(LONG, 4)
        driver.run_until_idle()
        assert driver.check(again).cached_tokens == 0
        assert driver.status().kv.held == 0
        driver.flush(torch_empty_cache=False)


@pytest.mark.parametrize("abort", [False, True])
def test_requests_of_a_client_that_left_end_in_one_step(driver, abort):
    count = 60 if abort else 6
    params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    shared = GenerateReqInput(input_ids=SHORT, sampling_params=params)
    driver.send(shared)
    driver.send(shared, "guest")  # attaches
    own = driver.generate(SHORT, count, client="guest")
    driver.tick(4)
    leave(driver, "guest", own)
    assert not abort or driver.abort(abort_all=True).aborted == 2
    driver.run_until_idle()
    assert driver.check(shared.id).finish_reason.type == ("abort" if abort else "length")
    assert not driver.engine.live.samples(own)
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
        driver.assert_status(weights="valid", weights_epoch=0, session=None)
        assert driver.check_weights().total == before
        driver.run_until_idle()
        assert len(driver.check(rid).weight_versions) == 1


def test_a_session_expires_while_its_checkpoint_is_read(driver, other_model, slow_open):
    looked, go_on = slow_open
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
    driver.assert_status(weights="valid", weights_epoch=0)


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
