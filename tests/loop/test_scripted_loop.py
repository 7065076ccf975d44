"""The real loop over a scripted model: batching, pausing and updates judged by the tokens that come out."""

import threading

import pytest
import zmq
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of
from support.waiting import eventually

from caesura.io_struct import (
    FlushCacheReqInput,
    GenerateReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

VOCAB = 97


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


@pytest.fixture
def driver(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        yield driver


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 90 for i in range(length)]


def test_one_request(driver):
    rid = driver.generate(prompt_of(5), 6)
    driver.run_until_idle()
    result = driver.check(rid)
    assert len(tokens_of(result)) == 6
    assert result.finish_reason.type == "length"
    assert driver.status().kv.held == 0


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


def test_samples_of_a_prompt_share_its_prefix(driver):
    prompt = prompt_of(50)
    rid = driver.generate(prompt, 5, n=4)
    driver.run_until_idle()
    results = [driver.check(rid, i) for i in range(4)]
    assert [r.cached_tokens for r in results] == [0, 48, 48, 48]


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


def test_preemption_when_the_pool_is_full(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, kv_pool_tokens=96) as driver:
        rids = [driver.generate(prompt_of(20, seed), 50) for seed in range(4)]
        driver.run_until_idle()
        results = [driver.check(rid) for seed, rid in enumerate(rids)]
        assert all(len(tokens_of(r)) == 50 for r in results)
        assert sum(r.num_retractions for r in results) > 0, "the pool was meant to run out"
        assert results[0].num_retractions == 0, "the oldest request is never preempted"


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


@pytest.mark.parametrize("ticks", range(1, 16))
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_at_any_step(driver, mode, ticks):
    prompts = [prompt_of(70), prompt_of(3, 1), prompt_of(20, 2)]
    rids = [driver.generate(p, 10) for p in prompts]
    driver.tick(ticks)
    reply = driver.pause(mode)
    launched = len(driver.runner.launches)
    status = driver.status()
    assert (status.generation, status.pause_mode, reply.step) == ("paused", mode, launched)
    assert driver.ongoing is None
    if mode == "abort":
        ended = sum(len(found) for found in driver.results.values())
        assert ended == 3, "the pause has ended whatever had not ended before it"
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
            assert result.finish_reason.type == "abort"
    aborted = [rid for rid in rids if driver.result(rid).finish_reason.type == "abort"]
    assert len(aborted) == reply.aborted_requests
    assert driver.status().kv.held == 0


@pytest.mark.parametrize("ticks", range(1, 50, 4))
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_while_the_pool_is_exhausted(tiny_model, depth, mode, ticks):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, kv_pool_tokens=96) as driver:
        rids = [driver.generate(prompt_of(20, seed), 50) for seed in range(4)]
        driver.tick(ticks)
        driver.pause(mode)
        if mode != "in_place":
            assert driver.status().kv.held == 0
        driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        results = [driver.check(rid) for seed, rid in enumerate(rids)]
        if mode == "abort":
            assert [result.finish_reason.type for result in results] == ["abort"] * 4
        else:
            assert [len(tokens_of(result)) for result in results] == [50] * 4
            assert sum(result.num_retractions for result in results) > 0, "the pool was meant to run out"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_when_idle(driver, mode):
    reply = driver.pause(mode)
    assert (reply.step, reply.held_requests, reply.waiting_requests, reply.aborted_requests) == (0, 0, 0, 0)
    assert driver.go_on().was_paused
    rid = driver.generate(prompt_of(5), 3)
    driver.run_until_idle()
    assert len(tokens_of(driver.check(rid))) == 3


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


def test_a_request_that_sampled_nothing_restarts_its_prefill(driver, other_model):
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


def test_a_failed_batch_ends_its_requests_and_nothing_else(driver):
    first = driver.generate(prompt_of(10), 20)
    driver.tick(4)
    driver.runner.fail_next = True
    driver.run_until_idle()
    result = driver.result(first)
    assert (result.finish_reason.type, result.finish_reason.code) == ("error", "internal")
    assert 0 < len(tokens_of(result)) < 20, "tokens sampled before the failure are kept"
    second = driver.generate(prompt_of(10), 5)
    driver.run_until_idle()
    assert driver.check(second).cached_tokens == 0, "KV of a failed step is not trusted"
    assert driver.status().kv.held == 0


def test_a_failure_that_surfaces_late(tiny_model):
    with EngineDriver(str(tiny_model), pipeline_depth=1) as driver:
        rid = driver.generate(prompt_of(10), 20)
        driver.tick(4)
        driver.runner.fail_on_fetch = True
        driver.run_until_idle()
        assert driver.result(rid).finish_reason.type == "error"
        driver.tick(2)
        assert driver.status().kv.held == 0


def test_non_finite_logits_end_one_request(driver):
    bad = driver.generate(prompt_of(10), 20)
    good = driver.generate(prompt_of(12, 1), 20)
    driver.tick(4)
    driver.runner.non_finite_next = True
    driver.run_until_idle()
    assert driver.result(bad).finish_reason.type == "error"
    assert len(tokens_of(driver.check(good))) == 20


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


def test_abort_of_a_retracted_request_keeps_its_tokens(driver):
    rid = driver.generate(prompt_of(4), 50)
    driver.tick(8)
    driver.pause("retract")
    driver.abort(abort_all=True)
    result = driver.check(rid)
    assert len(tokens_of(result)) > 3
    assert result.num_retractions == 1


def test_abort_while_frozen_in_place_answers_at_once(driver):
    rid = driver.generate(prompt_of(4), 50)
    driver.tick(5)
    driver.pause("in_place")
    reply = driver.pause("abort")
    assert reply.aborted_requests == 1
    driver.check(rid)
    assert driver.status().kv.held == 0


def test_flush_needs_an_idle_engine(driver):
    driver.complete(prompt_of(40), 5)
    assert driver.status().kv.cached > 0
    rid = driver.generate(prompt_of(4), 30)
    driver.tick(3)
    error = assert_error(driver.flush(), "not_idle")
    assert error.detail["running"] == 1
    driver.pause("in_place")
    assert_error(driver.flush(), "not_idle")
    driver.pause("retract")
    reply = driver.flush()
    assert reply.freed_tokens > 0
    kv = driver.status().kv
    assert (kv.cached, kv.held, kv.free) == (0, 0, kv.total)
    driver.go_on()
    driver.run_until_idle()
    driver.check(rid)


def test_flush_with_a_timeout_waits_for_idleness_and_lets_others_pass(driver):
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


def test_a_request_during_a_pause_waits_and_can_be_aborted(driver):
    driver.pause("abort")
    stays, goes = driver.generate(prompt_of(4), 5), driver.generate(prompt_of(4, 1), 5)
    driver.tick(3)
    assert driver.status().waiting_requests == 2
    driver.abort(goes)
    assert driver.result(goes).finish_reason.type == "abort"
    driver.go_on()
    driver.run_until_idle()
    assert len(tokens_of(driver.check(stays))) == 5


def test_requests_while_paused_can_be_refused(tiny_model):
    with EngineDriver(str(tiny_model), requests_while_paused="refuse") as driver:
        driver.pause()
        message = GenerateReqInput(input_ids=[3, 4])
        assert_error(driver.call(message), "paused")


def test_streams_and_terminal_results_agree(driver):
    rids = [driver.generate(prompt_of(5, s), 9, stream=True, return_logprob=True) for s in range(3)]
    driver.run_until_idle()
    import numpy as np

    for rid in rids:
        streamed = []
        for _, output in driver.outputs:
            if output.delta is not None and rid in output.delta.rids:
                row = output.delta.rids.index(rid)
                ends = np.cumsum(np.frombuffer(output.delta.counts, "<i4"))
                starts = np.frombuffer(output.delta.starts, "<i4")
                assert starts[row] == len(streamed)
                streamed += np.frombuffer(output.delta.tokens, "<i4")[ends[row] - 1 : ends[row]].tolist()
        tokens = tokens_of(driver.check(rid))
        assert streamed == tokens[: len(streamed)]
        assert len(streamed) >= len(tokens) - 1, "every token but the one of the terminal message is streamed"
    per_step = [output.step for _, output in driver.outputs]
    assert len(per_step) == len(set(per_step)), "one message per client and step"


def test_an_explicit_session_on_a_busy_engine(driver, other_model):
    rid = driver.generate(prompt_of(4), 60)
    session_id = driver.begin()
    driver.tick(5)
    assert driver.status().step >= 5
    driver.update(other_model, flush_cache=False, session_id=session_id)
    step = driver.status().step
    driver.tick(5)
    status = driver.status()
    assert (status.step, status.weights, status.generation) == (step, "updating", "running")
    assert driver.end(session_id=session_id, weight_version="v1").committed
    driver.run_until_idle()
    spans = driver.check(rid).weight_versions
    assert [(s.version, s.stale_kv) for s in spans] == [("default", False), ("v1", True)]


def test_an_empty_session_commits_on_a_busy_engine(driver):
    rid = driver.generate(prompt_of(4), 60)
    driver.tick(3)
    assert driver.end(session_id=driver.begin(), weight_version="v1").weights_epoch == 1
    driver.run_until_idle()
    assert [s.version for s in driver.check(rid).weight_versions] == ["default", "v1"]


def test_an_update_that_fails_in_the_middle_poisons(driver, other_model, monkeypatch):
    loader = driver.engine.loader
    write, calls = loader.write, []

    def failing(piece):
        calls.append(piece.name)
        if len(calls) == 3:
            raise MemoryError("scripted")
        write(piece)

    rid = driver.generate(prompt_of(4), 20)
    driver.tick(3)
    monkeypatch.setattr(loader, "write", failing)
    assert_error(driver.update(other_model), "out_of_memory")
    status = driver.status()
    assert (status.weights, status.weights_epoch, status.session) == ("poisoned", 0, None)
    monkeypatch.undo()
    step = driver.status().step
    driver.tick(3)
    assert driver.status().step == step, "poisoned weights serve nobody"
    assert driver.update(other_model).committed
    driver.run_until_idle()
    assert len(tokens_of(driver.check(rid))) == 20


def test_everything_is_answered_while_a_checkpoint_is_looked_at(driver, other_model, monkeypatch):
    looked, go_on, open_fitting = threading.Event(), threading.Event(), driver.engine.open_folder

    def slow(*arguments):
        looked.set()
        assert go_on.wait()
        return open_fitting(*arguments)

    monkeypatch.setattr(driver.engine, "open_folder", slow)
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


def test_an_idle_loop_sleeps_while_a_checkpoint_is_looked_at(driver, other_model):
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    driver.tick()
    if update not in driver.replies and not driver.engine.dispatcher.wants_tick:
        poller = zmq.Poller()
        poller.register(driver.engine.wakeup.fd, zmq.POLLIN)
        assert poller.poll(60_000)
    eventually(lambda: driver.tick() or update in driver.replies)


def test_status_and_abort_are_answered_between_two_buckets_of_an_update(driver, other_model, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    rid = driver.generate(prompt_of(4), 50)
    driver.tick(4)
    driver.pause("in_place")
    update = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model), flush_cache=False))
    eventually(lambda: driver.status().update)
    written = [driver.status().update.written_bytes for _ in range(3)]
    assert 0 < written[0] < written[1] < written[2]
    assert driver.abort(rid).aborted == 1
    assert driver.result(rid).finish_reason.type == "abort"
    assert driver.status().update is not None
    assert update not in driver.replies, "all of that came from within the update"
    while update not in driver.replies:
        driver.tick()
    assert driver.replies.pop(update).committed
