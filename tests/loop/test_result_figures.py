"""Figures of a terminal result, a stream and the totals of an engine."""

from dataclasses import replace

import numpy as np
import pytest
from support.clock import clock_of
from support.scripted import EngineDriver, expected_tokens, tokens_of

from caesura.io_struct import SamplingParams, WeightVersionSpan
from caesura.scheduler.scheduling.request import OutputArrays, Request

VOCAB = 97
PROMPT = [3 + i * 7 % 90 for i in range(20)]


@pytest.fixture
def driver(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth) as driver:
        yield driver


def floats(data: bytes | None) -> list[float] | None:
    return None if data is None else np.frombuffer(data, "<f4").tolist()


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def test_each_kind_of_logprobs_is_there_if_asked_for(driver):
    names = ("return_logprob", "return_raw_logprob", "return_sampled_logprob")
    for fields in ((), *((name,) for name in names)):
        result = driver.complete(PROMPT, 6, **dict.fromkeys(fields, True))
        tokens = tokens_of(result)
        assert tokens == expected_tokens(PROMPT, result, VOCAB)
        said = [
            floats(each) for each in (result.output_logprobs, result.raw_logprobs, result.sampled_logprobs)
        ]
        values = [[-token for token in tokens], [-2 * token for token in tokens], [0] * 6]
        assert said == [value if name in fields else None for name, value in zip(names, values)]


def test_a_result_tells_its_request_apart(driver):
    params = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True, n=2, seed=77)
    rid = driver.generate(PROMPT, sampling_params=params)
    driver.run_until_idle()
    results = [driver.result(rid, index) for index in (0, 1)]
    assert [(r.rid, r.index, r.prompt_tokens, r.seed, r.num_retractions) for r in results] == [
        (rid, 0, 20, 77, 0), (rid, 1, 20, 77, 0),
    ]  # fmt: skip
    assert [r.cached_tokens for r in results] == [0, 16]
    assert all((r.finish_reason.type, r.finish_reason.length) == ("length", 3) for r in results)
    assert all(r.routed_experts is None for r in results)


def test_times_count_from_the_arrival(driver, monkeypatch):
    clock = clock_of(monkeypatch, ["scheduling.waiting_queue", "scheduling.batcher", "scheduling.outputs"])
    driver.pause("retract")
    rid = driver.generate(PROMPT, 30)
    driver.tick()
    clock.now += 3.0
    driver.go_on()
    driver.tick(3)
    clock.now += 4.0
    driver.run_until_idle()
    result = driver.result(rid)
    assert (result.queue_time, result.e2e_latency) == (3.0, 7.0)
    driver.pause("retract")
    waiting = driver.generate(PROMPT, 30)
    driver.tick()
    clock.now += 5.0
    driver.abort(waiting)
    result = driver.result(waiting)
    assert (result.queue_time, result.e2e_latency, tokens_of(result)) == (5.0, 5.0, [])


def test_a_stream_has_every_token_once_at_its_place(driver):
    quiet = driver.generate(PROMPT, 5)
    with_logprobs = driver.generate(PROMPT[:7], 5, stream=True, return_logprob=True)
    without = driver.generate(PROMPT[:9], 4, n=2, stream=True)
    driver.run_until_idle()
    streamed: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
    for _, message in driver.outputs:
        delta = message.delta
        if delta is None:
            continue
        assert (delta.top, delta.token_ids) == (None, None)
        assert ints(delta.counts) == [1] * len(delta.rids)
        rows = zip(
            delta.rids,
            ints(delta.indices),
            ints(delta.starts),
            ints(delta.tokens),
            floats(delta.logprobs),
            strict=True,
        )
        for rid, index, start, token, logprob in rows:
            streamed.setdefault((rid, index), []).append((start, token, logprob))
    assert set(streamed) == {(with_logprobs, 0), (without, 0), (without, 1)}
    for (rid, index), rows in streamed.items():
        tokens = tokens_of(driver.result(rid, index))
        # The last token of a sample is in its result alone.
        assert [(start, token) for start, token, _ in rows] == list(enumerate(tokens))[: len(rows)]
        assert len(rows) >= len(tokens) - 1
        if rid == with_logprobs:
            assert [logprob for *_, logprob in rows] == [-token for _, token, _ in rows]
        else:
            assert all(np.isnan(logprob) for *_, logprob in rows)
    assert len(tokens_of(driver.result(quiet))) == 5
    steps = [output.step for _, output in driver.outputs]
    assert len(steps) == len(set(steps)), "one message per client and step"


def test_totals_count_tokens_and_ends(driver):
    assert (driver.status().generated_tokens, driver.status().totals.finished_requests) == (0, {})
    rids = [driver.generate(PROMPT, length) for length in (4, 5, 200)]
    for _ in range(12):
        driver.tick()
    driver.abort(rids[2])
    driver.run_until_idle()
    status = driver.status()
    assert status.generated_tokens == sum(len(tokens_of(driver.result(rid))) for rid in rids)
    assert status.totals.finished_requests == {"length": 2, "abort": 1}


def test_a_stop_token_at_the_limit_is_a_stop(driver):
    result = driver.complete(PROMPT, 4)
    tokens, reason = tokens_of(result), result.finish_reason
    assert (reason.type, reason.matched, reason.length) == ("length", None, 4)
    assert tokens[3] not in tokens[:3]
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True, stop_token_ids=tokens[3:])
    reason = driver.complete(PROMPT, sampling_params=params).finish_reason
    assert (reason.type, reason.matched, reason.length) == ("stop", tokens[3], None)


@pytest.mark.parametrize("last", ["in_place", "retract"])
def test_spans_begin_where_weights_changed(driver, other_model, last):
    for number in range(100):
        driver.engine.state.commit_weights(f"v{number}", "")
    rid = driver.generate(PROMPT, 40)
    driver.tick(6)
    for version, mode in (("one", "in_place"), ("two", last)):
        driver.pause(mode)
        driver.update(other_model, flush_cache=False, weight_version=version)
        driver.go_on()
        driver.tick(5)
    driver.run_until_idle()
    result = driver.check(rid)
    spans = result.weight_versions
    assert [(span.version, span.epoch, span.stale_kv) for span in spans] == [
        ("v99", 100, False), ("one", 101, True), ("two", 102, last == "in_place"),
    ]  # fmt: skip
    assert [span.start for span in spans] == [0, spans[0].end, spans[1].end]
    assert spans[-1].end == 40


def test_weights_before_the_first_token_open_no_span(driver, other_model):
    driver.pause("retract")
    rid = driver.generate(PROMPT, 4)
    driver.tick()
    driver.update(other_model, weight_version="new")
    driver.go_on()
    driver.run_until_idle()
    status = driver.status()
    assert driver.result(rid).weight_versions == [
        WeightVersionSpan(
            version="new", epoch=1, start=0, end=4, incarnation=status.incarnation, digest=status.digest
        )
    ]


@pytest.mark.parametrize("edited", [False, True])
def test_non_finite_logits_name_the_remedy(driver, edited):
    edits = {
        "repetition_penalty": 1.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {4: 1.0},
    }
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True, **(edits if edited else {}))
    rid = driver.generate(PROMPT, sampling_params=params)
    other = driver.generate(PROMPT[:5], 6)
    driver.tick()
    driver.runner.non_finite_next = True
    driver.run_until_idle()
    reason = driver.result(rid).finish_reason
    assert (reason.type, reason.code) == ("error", "internal")
    assert reason.message == (
        "the logits are not finite after repetition_penalty = 1.25, frequency_penalty = 0.5, "
        "presence_penalty = -0.5, 1 biases, 0 allowed tokens and min_new_tokens = 0: check these, and the "
        "weights"
        if edited
        else "the model's logits are not finite: check the weights"
    )
    assert len(tokens_of(driver.check(other))) == 6


def test_pages_of_an_aborted_request_are_kept(driver):
    rid = driver.generate(PROMPT, 100)
    driver.tick(20)
    assert driver.abort(rid).aborted == 1
    driver.run_until_idle()
    prompt = PROMPT + tokens_of(driver.result(rid))
    assert len(prompt) > 33
    result = driver.complete(prompt, 2)
    assert result.cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("lost", [-1, 1])
@pytest.mark.parametrize("what", ["logprobs", "spans"])
def test_a_result_whose_parts_differ_in_length_is_an_error(driver, monkeypatch, what, lost):
    table, spans = driver.engine.batcher.table, Request.version_spans
    outputs = table.outputs

    def wrong_outputs(request: Request) -> OutputArrays:
        found = outputs(request)
        return replace(found, logprobs=np.resize(found.logprobs, len(found.tokens) - lost))

    if what == "logprobs":
        table.outputs = wrong_outputs
    else:
        monkeypatch.setattr(Request, "version_spans", lambda request, count: spans(request, count - lost))
    result = driver.complete(PROMPT, 4)
    assert (result.finish_reason.type, result.finish_reason.code) == ("error", "internal")
    assert "could not be built" in result.finish_reason.message
    assert tokens_of(result) == []
