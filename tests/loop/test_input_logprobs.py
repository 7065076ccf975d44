"""Log-probabilities of prompts, across commits of weights."""

import tracemalloc

import msgspec
import numpy as np
import pytest
from support.edited_logits import edited, log_softmax, logits_of, with_logits
from support.faults import Fault
from support.scripted import EngineDriver, cell, next_token, prompt_of, tokens_of

from caesura.io_struct import GenerateReqInput, GenerateReqOutput, SamplingParams
from caesura.scheduler.cache import prompt_logprobs
from caesura.scheduler.scheduling.sampling import LogprobRecord

PROMPT = [3 + i * 7 % 90 for i in range(33)]
EVERY_LOGPROB = {
    "return_logprob": True,
    "return_raw_logprob": True,
    "return_sampled_logprob": True,
    "logprob_start_len": 1,
    "top_logprobs_num": 2,
    "token_ids_logprob": [5, 9],
}


def engine(tiny_model, chunk: int = 32) -> EngineDriver:
    return EngineDriver(str(tiny_model), scripted=False, chunked_prefill_size=chunk)


def input_logprobs(driver: EngineDriver) -> np.ndarray:
    driver.run_until_idle()
    result = driver.complete(PROMPT, 2, return_logprob=True, logprob_start_len=1, cache_salt="alone")
    return np.frombuffer(result.input_logprobs, "<f4")


def commit(driver: EngineDriver, path: object) -> None:
    driver.update(path, flush_cache=False)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_logprobs_of_a_prompt_are_of_weights_that_sample(tiny_model, other_model, mode, parts):
    with engine(tiny_model, 32 // parts) as driver:
        rid = driver.generate(PROMPT, 4, return_logprob=True, logprob_start_len=1, top_logprobs_num=1)
        driver.tick(1)
        request = driver.engine.live.samples(rid)[0]
        assert driver.engine.batcher.table.scheduled[request.slot] == 32 // parts
        driver.pause(mode)
        commit(driver, other_model)
        driver.go_on()
        driver.run_until_idle()
        result = driver.result(rid)
        assert [(span.epoch, span.stale_kv) for span in result.weight_versions] == [(1, False)]
        np.testing.assert_allclose(
            np.frombuffer(result.input_logprobs, "<f4"), input_logprobs(driver), atol=1e-5
        )


def test_logprobs_of_a_prompt_outlive_an_update(tiny_model, other_model):
    with engine(tiny_model) as driver:
        expected = input_logprobs(driver)
        rid = driver.generate(PROMPT, 8, return_logprob=True, logprob_start_len=1)
        driver.tick(4)
        driver.pause("retract")
        commit(driver, other_model)
        driver.go_on()
        driver.run_until_idle()
        result = driver.result(rid)
        assert [span.epoch for span in result.weight_versions] == [0, 1]
        np.testing.assert_allclose(np.frombuffer(result.input_logprobs, "<f4"), expected, atol=1e-5)


def aborted_after_a_retract(driver: EngineDriver, ticks: int) -> GenerateReqOutput:
    rid = driver.generate(PROMPT, 50, **EVERY_LOGPROB)
    driver.tick(ticks)
    driver.pause("retract")
    driver.abort(abort_all=True)
    return driver.result(rid)


@pytest.mark.parametrize("ticks", [1, 2])
def test_an_abort_of_a_retracted_prompt_has_no_logprobs(tiny_model, ticks):
    with engine(tiny_model, 8) as driver:
        result = aborted_after_a_retract(driver, ticks)
    assert (result.num_retractions, result.output_ids, result.output_logprobs) == (1, b"", b"")
    prompt = (result.input_logprobs, result.input_top_logprobs, result.input_token_ids_logprobs)
    assert prompt == (None, None, None)
    assert result.weight_versions == []


def test_an_abort_after_a_retract_has_the_sampled_logprobs(tiny_model):
    with engine(tiny_model) as driver:
        whole = driver.generate(PROMPT, 50, **EVERY_LOGPROB)
        driver.run_until_idle()
        whole = driver.result(whole)
        part = aborted_after_a_retract(driver, 6)
    count = len(part.output_ids) // 4
    assert (part.num_retractions, 0 < count < 50) == (1, True)
    assert sum(span.end - span.start for span in part.weight_versions) == count
    for name in ("output_ids", "output_logprobs", "raw_logprobs", "sampled_logprobs"):
        assert len(getattr(part, name)) == 4 * count, name
        assert getattr(part, name) == getattr(whole, name)[: 4 * count], name
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        found, expected = getattr(part, name), getattr(whole, name)
        assert found.logprobs == expected.logprobs[: 4 * found.k * count], name
    assert part.input_logprobs[4:] == whole.input_logprobs[4:]  # the first is no number


VOCAB, EOS, NEW = 97, (2,), 14


def greedy(**penalties) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True, **penalties)


LIKELIEST = [int(logits_of(kind, vocab_size=VOCAB).argmax()) for kind in range(3)]
PAIRS = [[one, other] for one in LIKELIEST for other in LIKELIEST if one != other]
"""Words of two tokens; the model's likeliest tokens make samples that meet them, and those of three."""
PARAMS = [
    greedy(),
    greedy(frequency_penalty=1.7, repetition_penalty=1.4),
    greedy(presence_penalty=2.0, logit_bias={7: 3.5}),
    greedy(repetition_penalty=0.7, bad_words_ids=[*PAIRS[:2], *([one, one, one] for one in LIKELIEST)]),
]


PROMPTS = [prompt_of(40), prompt_of(3, 1), prompt_of(20, 2), prompt_of(33, 3)]


def check(result: GenerateReqOutput, prompt: list[int], params: SamplingParams) -> None:
    tokens, cells, output = tokens_of(result), [cell(token, 0) for token in prompt], []
    logprobs = np.frombuffer(result.output_logprobs, "<f4")
    top = result.output_top_logprobs
    ids = np.frombuffer(top.ids, "<i4").reshape(-1, top.k)
    values = np.frombuffer(top.logprobs, "<f4").reshape(-1, top.k)
    assert len(ids) == len(values) == len(logprobs) == len(tokens)
    for at, token in enumerate(tokens):
        row = logits_of(next_token(np.asarray(cells, np.uint64), VOCAB) % 3, vocab_size=VOCAB)
        expected = log_softmax(edited(row.astype(np.float64), params, prompt, output, EOS))
        assert token == int(np.argmax(expected)), f"output token {at}"
        assert logprobs[at] == pytest.approx(max(expected), abs=1e-4)
        assert values[at] == pytest.approx(sorted(expected, reverse=True)[: top.k], abs=1e-4)
        assert ids[at, 0] == token
        output.append(token)
        cells.append(cell(token, 0))


def start(driver: EngineDriver, new: int = NEW) -> list[str]:
    with_logits(driver.runner)
    return [
        driver.generate(
            prompt,
            sampling_params=msgspec.structs.replace(params, max_new_tokens=new),
            return_logprob=True,
            top_logprobs_num=2 + number,
        )
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


def check_all(driver: EngineDriver, rids: list[str], lengths: int | None = NEW) -> None:
    for rid, prompt, params in zip(rids, PROMPTS, PARAMS, strict=True):
        result = driver.result(rid)
        check(result, prompt, params)
        assert lengths is None or len(tokens_of(result)) == lengths


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_counts_nothing_twice(tiny_model, depth, mode):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        for ticks in (1, 3, 4, 9, 15):
            rids = start(driver)
            driver.tick(ticks)
            driver.pause(mode)
            driver.go_on(torch_empty_cache=False)
            driver.run_until_idle()
            check_all(driver, rids, None if mode == "abort" else NEW)
            driver.flush(torch_empty_cache=False)


def test_preempted_requests_start_their_counters_anew(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, kv_pool_tokens=192) as driver:
        rids = start(driver, 40)
        driver.run_until_idle()
        check_all(driver, rids, 40)
        assert sum(driver.result(rid).num_retractions for rid in rids) > 0, "the pool was meant to run out"


def test_a_lost_step_is_counted_once(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        for number, lost in enumerate((2, 5, 6, 11), 1):
            rids = start(driver)
            with Fault(driver.runner, "on_fetch", MemoryError(), {lost}):
                driver.run_until_idle()
            check_all(driver, rids)
            assert driver.status().step_failures.failed == number
            driver.flush(torch_empty_cache=False)


def test_counters_are_given_back(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth, max_running_requests=4) as driver:
        for _ in range(3):
            rids = start(driver)
            driver.tick(4)
            driver.abort(rids[1])
            driver.run_until_idle()
            check_all(driver, rids, None)
        extras = driver.engine.batcher.table.sampling
        assert sorted(extras._free_counters) == list(range(extras.num_counters))
        assert 1 <= extras.num_counters <= 4


def test_streamed_rows_are_those_of_the_result(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth) as driver:
        with_logits(driver.runner)
        asked = driver.generate(
            PROMPTS[0], sampling_params=PARAMS[1], return_logprob=True, stream=True,
            top_logprobs_num=3, token_ids_logprob=[5, 90], rid="asked",
        )  # fmt: skip
        driver.complete(PROMPTS[1], sampling_params=PARAMS[0], stream=True, rid="plain")
        found: dict[str, bytes] = {"top": b"", "token_ids": b""}
        for _, message in driver.outputs:
            if message.delta is None:
                continue
            ks = {
                name: np.frombuffer(further.ks, "<i4").tolist()
                if further is not None
                else [0] * len(message.delta.rids)
                for name, further in (("top", message.delta.top), ("token_ids", message.delta.token_ids))
            }
            for rid, top_k, ids_k in zip(message.delta.rids, ks["top"], ks["token_ids"], strict=True):
                assert (top_k, ids_k) == ((3, 2) if rid == "asked" else (0, 0))
            if message.delta.top is not None:
                found["top"] += message.delta.top.logprobs
                found["token_ids"] += message.delta.token_ids.logprobs
        result = driver.result(asked)
        # The last token comes with the result alone.
        assert found["top"] == result.output_top_logprobs.logprobs[: -3 * 4]
        assert found["token_ids"] == result.output_token_ids_logprobs.logprobs[: -2 * 4]
        assert result.output_token_ids_logprobs.ids == np.asarray([5, 90], "<i4").tobytes()


def scored_tokens(driver: EngineDriver) -> list[int]:
    """Return a list to which each step will append how many prompt tokens it scores."""
    counts: list[int] = []
    execute = driver.engine.runner.execute

    def counted(batch):
        counts.append(0 if batch.inputs is None else len(batch.inputs.tokens))
        return execute(batch)

    driver.engine.runner.execute = counted
    return counts


def inputs_of(result: GenerateReqOutput) -> list[object]:
    rows = result.input_top_logprobs, result.input_token_ids_logprobs
    return [result.input_logprobs[4:], *(None if row is None else (row.ids, row.logprobs) for row in rows)]


SCORED = {name: value for name, value in EVERY_LOGPROB.items() if name != "return_raw_logprob"}


@pytest.mark.parametrize("chunk", [16, 64])
def test_samples_of_a_prompt_score_it_once(tiny_model, depth, chunk):
    options = {"scripted": False, "chunked_prefill_size": chunk, "pipeline_depth": depth}
    with EngineDriver(str(tiny_model), **options) as driver:
        expected = inputs_of(driver.complete(PROMPT, 4, cache_salt="alone", **SCORED))
        counts = scored_tokens(driver)
        rids = [driver.generate(PROMPT, 4, n=3, **SCORED), driver.generate(PROMPT, 4, **SCORED)]
        driver.run_until_idle()
        driver.generate(PROMPT, 4, **SCORED, rid="later")
        driver.run_until_idle()
        assert sum(counts) == len(PROMPT) - 2
        results = [driver.result(rids[0], index) for index in range(3)]
        results += [driver.result(rids[1]), driver.result("later")]
        assert [inputs_of(result) for result in results] == [expected] * 5
        assert [result.cached_tokens for result in results] == [0, 32, 32, 32, 32]


def test_scores_serve_requests_that_want_less(tiny_model, depth):
    with EngineDriver(str(tiny_model), scripted=False, pipeline_depth=depth) as driver:
        whole = driver.complete(PROMPT, 1, **SCORED)
        counts = scored_tokens(driver)
        less = driver.complete(PROMPT, 1, return_logprob=True, logprob_start_len=9, top_logprobs_num=1)
        assert sum(counts) == 0
        assert less.input_logprobs[4:] == whole.input_logprobs[4 * 9 :]
        found, top = (np.frombuffer(each.input_top_logprobs.ids, "<i4") for each in (less, whole))
        assert found.tolist() == top.reshape(-1, 2)[8:, 0].tolist()
        assert less.input_token_ids_logprobs is None
        for more in ({"logprob_start_len": 0}, {"top_logprobs_num": 3}, {"token_ids_logprob": [5]}):
            counts.clear()
            driver.complete(PROMPT, 1, **{**SCORED, **more})
            assert sum(counts) == len(PROMPT) - 1 - more.get("logprob_start_len", 1)


def test_scores_of_a_prompt_end_with_their_weights(tiny_model, other_model):
    with engine(tiny_model) as driver:
        before = driver.complete(PROMPT, 1, **SCORED)
        commit(driver, other_model)
        after = driver.complete(PROMPT, 1, **SCORED)
        counts = scored_tokens(driver)
        driver.flush()
        flushed = driver.complete(PROMPT, 1, **SCORED)
        driver.complete(PROMPT, 1, **SCORED, cache_salt="another")
    assert inputs_of(before) != inputs_of(after) == inputs_of(flushed)
    assert sum(counts) == 2 * (len(PROMPT) - 2)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_second_prefill_keeps_no_scores_of_old_weights(tiny_model, other_model, mode):
    asked = {"return_logprob": True, "logprob_start_len": 0}
    prompts = [prompt_of(40, 7), prompt_of(40, 1)]
    with EngineDriver(str(tiny_model), scripted=False, kv_pool_tokens=224) as driver:
        params = SamplingParams(max_new_tokens=110, ignore_eos=True)
        rids = [driver.generate(prompt, sampling_params=params, **asked) for prompt in prompts]
        driver.tick(6)
        driver.pause(mode)
        commit(driver, other_model)
        driver.go_on()
        driver.run_until_idle()
        assert any(driver.result(rid).num_retractions for rid in rids), "no prefill was repeated"
        found = [inputs_of(driver.complete(prompt, 1, **asked)) for prompt in prompts]
        driver.flush()
        assert found == [inputs_of(driver.complete(prompt, 1, **asked)) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prompts_of_narrow_dtypes_are_scored(tiny_model, dtype):
    with EngineDriver(str(tiny_model), scripted=False, dtype=dtype) as driver:
        alone = driver.complete(PROMPT, 1, return_logprob=True, logprob_start_len=1, cache_salt="alone")
        beside = driver.complete(PROMPT, 1, **SCORED)
    logprobs = np.frombuffer(alone.input_logprobs, "<f4")
    assert np.isfinite(logprobs[1:]).all() and alone.input_logprobs[4:] == beside.input_logprobs[4:]
    likeliest = np.frombuffer(alone.output_logprobs, "<f4")
    assert likeliest > -np.log(97)


def test_no_scores_are_kept_without_a_prefix_cache(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False, prefix_cache=False) as driver:
        counts = scored_tokens(driver)
        driver.generate(PROMPT, 1, n=2, **SCORED)
        driver.run_until_idle()
        assert sum(counts) == 2 * (len(PROMPT) - 2)


def test_kept_scores_are_bounded(tiny_model, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_BYTES", 3 * (32 * (4 + 4) + prompt_logprobs.ENTRY_BYTES))
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        asked = {"return_logprob": True, "logprob_start_len": 0}
        counts = scored_tokens(driver)
        prompts = [prompt_of(32, seed) for seed in range(4)]
        for prompt in (*prompts, *prompts[1:], prompts[0]):
            driver.complete(prompt, 1, **asked)
        assert sum(counts) == 5 * 31, "the oldest one alone was to be scored again"
        assert driver.engine.cache.prompt_logprobs.nbytes <= prompt_logprobs.MAX_BYTES


def test_kept_scores_take_the_memory_that_is_counted():
    kept, scores = prompt_logprobs.PromptLogprobs(), np.zeros((2, 5), np.float32)
    tracemalloc.start()
    for number in range(200):
        prompt = np.array([number, 4, 5], np.int32)
        asked = GenerateReqInput(
            input_ids=prompt.tolist(), sampling_params=SamplingParams(), return_logprob=True,
            logprob_start_len=0, top_logprobs_num=5,
        )  # fmt: skip
        record = LogprobRecord(asked)
        record.put_inputs(0, scores[:, 0], scores.astype(np.int32), scores, scores[:, :0])
        record.put_output(999, np.zeros(5, np.int32), np.zeros(5), np.zeros(0))
        kept.put("", prompt, record)
    del record
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= kept.nbytes < 200 * 4096


def test_who_waits_for_scores_goes_on_when_they_do_not_come(tiny_model, depth):
    options = {"scripted": False, "chunked_prefill_size": 16, "pipeline_depth": depth}
    with EngineDriver(str(tiny_model), **options) as driver:
        expected = inputs_of(driver.complete(PROMPT, 4, cache_salt="alone", **SCORED))
        first, second = (driver.generate(PROMPT, 4, **SCORED) for _ in range(2))
        driver.tick(2)
        assert driver.engine.batcher.num_prefilling == 1
        driver.abort(first)
        driver.run_until_idle()
        assert inputs_of(driver.result(second)) == expected
