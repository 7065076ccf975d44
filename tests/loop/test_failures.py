"""After a failed step: nobody is forgotten or answered twice, the ledger is exact, and the engine goes on.

Failures are injected into a real engine over the scripted model, whose tokens depend on every slot of KV:
what is computed again wrongly, or read from a step that was lost, gives other tokens. The same with the real
model is in ``test_failures_of_models.py``, failures of commands are in ``test_guard.py``.

All of it holds for a model with states per sequence, too (``test_states.py`` has what is special about
these): that is long, but for what depends on where its steps write them.
"""

from itertools import pairwise, product
from math import log2

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import (
    BUG,
    NO_MEMORY,
    PROMPTS,
    STAGES,
    Fault,
    another,
    check_everybody,
    check_nothing_is_left,
    results_of,
    submit,
)
from support.lanes import every, quick
from support.properties import examples
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.runtime.engine_config import PAGE_SIZE


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    from support.checkpoints import make_checkpoint  # imports transformers, for seconds

    paths = [tmp_path_factory.mktemp("hybrid") for _ in range(2)]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3.5", seed=seed)
    return paths


MODELS = ["depth0", "depth1", "hybrid-depth0", "hybrid-depth1"]
of_hybrids_too = pytest.mark.parametrize("driver", quick(MODELS[:2] + MODELS[:1:-1], 3), indirect=True)
"""A test that is quick for a hybrid, too."""


@pytest.fixture(params=quick(MODELS, 2))
def driver(request):
    hybrid = request.param.startswith("hybrid")
    path = request.getfixturevalue("hybrids")[0] if hybrid else request.getfixturevalue("tiny_model")
    depth = int(request.param[-1])
    with EngineDriver(str(path), pipeline_depth=depth, chunked_prefill_size=32) as driver:
        yield driver


@pytest.fixture
def new_weights(driver, request):
    if driver.engine.cache.states is not None:
        return request.getfixturevalue("hybrids")[1]
    return request.getfixturevalue("other_model")


REPEATING = ("arrays", "repeat")
"""Stages without states of sequences alone."""
BUILDING = ("schedule", "open", "extend", "bind", "noise", "build", *REPEATING)
COMPUTING = ("execute", "outputs", "fetch")


def never_reached(driver: EngineDriver, stage: str) -> bool:
    return stage in REPEATING and driver.engine.cache.states is not None


@pytest.mark.parametrize(("stage", "error"), every(product(STAGES, [BUG, NO_MEMORY[1]]), 3), ids=str)
def test_a_stage_that_fails_once(driver, stage, error):
    failures = 0
    for number in (0, 1, 2, 4, 7):
        with Fault(*STAGES[stage](driver), error, {number}) as fault:
            results = results_of(driver, submit(driver))
        check_everybody(driver, {})
        assert fault.raised or number > 2 or never_reached(driver, stage), "the stage was not reached"
        failures += fault.raised
        kinds = {result.finish_reason.type for result in results}
        if stage in BUILDING or stage == "send" or (stage in COMPUTING and error is not BUG):
            assert kinds == {"length"}, "what can be tried again ends nobody"
        if stage in COMPUTING and error is BUG and fault.raised:
            assert "error" in kinds
        for result in results:
            if result.finish_reason.type == "error":
                expected = "internal" if error is BUG else "out_of_memory"
                assert result.finish_reason.code == expected
        driver.flush(torch_empty_cache=False)
    counts = driver.status().step_failures
    if stage in (*BUILDING, *COMPUTING, "record"):
        assert counts.failed == failures
    assert counts.splits == (failures if error is not BUG and stage in COMPUTING else 0)


@pytest.mark.parametrize("stage", every([*BUILDING, *COMPUTING, "record", "spans", "ends", "donate"], 3))
def test_a_stage_that_fails_for_some_time(driver, stage):
    with Fault(*STAGES[stage](driver), BUG, range(1000)):
        rids = submit(driver, n=2)
        driver.run_until_idle(max_ticks=500)
        for rid in rids:
            for index in range(2):
                assert driver.result(rid, index).finish_reason.type in ("error", "length")
        ended = driver.result(next(iter(rids)), 0).finish_reason.type
        assert ended == "error" or stage == "donate" or never_reached(driver, stage)
    check_everybody(driver, {})


@pytest.mark.parametrize("error", quick(NO_MEMORY), ids=["accelerator", "allocator", "python"])
@pytest.mark.parametrize("stage", COMPUTING)
def test_memory_that_is_short_once_ends_no_request(driver, stage, error):
    numbers = (0, 1, 2, 5, 8, 11)
    for number in numbers:
        rids = submit(driver, new_tokens=10)
        with Fault(*STAGES[stage](driver), error, {number}) as fault:
            results = check_everybody(driver, rids)
        assert fault.raised == 1
        assert {result.finish_reason.type for result in results} == {"length"}
        driver.flush(torch_empty_cache=False)
    failures = driver.status().step_failures
    assert failures.failed == failures.splits == len(numbers)
    lost_beside = driver.config.pipeline_depth == 1 and stage == "fetch"
    assert failures.retried > len(numbers) if lost_beside else failures.retried == len(numbers)


def limited(driver: EngineDriver, tokens: int) -> None:
    def refuse(batch: ForwardBatch) -> None:
        if sum(batch.q_lens_host) > tokens:
            raise another(NO_MEMORY[0])

    driver.runner.before = refuse


@of_hybrids_too
@pytest.mark.parametrize("tokens", every([1, 3, PAGE_SIZE, 31], 2))
def test_a_step_that_does_not_fit_is_divided(driver, tokens):
    rids = submit(driver, new_tokens=30)
    limited(driver, tokens)
    driver.tick(14)
    assert driver.status().step_failures.token_limit <= tokens
    results = check_everybody(driver, rids)
    assert {result.finish_reason.type for result in results} == {"length"}
    assert sum(result.num_retractions for result in results) == 0
    failures = driver.status().step_failures
    assert 0 < failures.splits == failures.failed <= 12


@of_hybrids_too
def test_decoding_rows_take_turns(driver):
    rids = [driver.generate([5, 6, 7 + number], 40) for number in range(8)]
    driver.hear()
    driver.tick(5)
    limited(driver, 3)
    driver.tick(40)
    table = driver.engine.batcher.table
    progress = (table.length - table.prompt_len)[table.live]
    assert len(progress) == 8
    assert progress.max() - progress.min() <= 4, progress
    limited(driver, 1000)
    driver.run_until_idle()
    assert [len(tokens_of(driver.check(rid))) for rid in rids] == [40] * 8


@of_hybrids_too
def test_a_prompt_waits_for_decoding_rows_and_ends_alone(driver):
    small = driver.generate([5, 6, 7], 30)
    driver.tick(3)

    prefills = {"calls": range(1000), "only": lambda batch: batch.num_decode < batch.num_rows}
    with Fault(driver.runner, "before", NO_MEMORY[0], **prefills):
        result = driver.complete(PROMPTS[1], 5)
    assert driver.result(small).finish_reason.type == "length"
    driver.check(small)
    reason = result.finish_reason
    assert (reason.type, reason.code) == ("error", "out_of_memory")
    assert "Tried to allocate" in reason.message
    assert tokens_of(result) == []
    check_everybody(driver, submit(driver))


@of_hybrids_too
def test_without_memory_everybody_is_told_soon(driver):
    rids = submit(driver, new_tokens=30, n=2)
    driver.tick(6)
    running = driver.status().running_requests
    assert running > 2
    before = len(driver.runner.launches)
    limited(driver, 0)
    driver.run_until_idle()
    attempts = driver.runner.launches[before:]
    samples = 2 * len(PROMPTS)
    assert len(attempts) <= 2 * samples + log2(sum(attempts[0][1])) + 2
    sizes = [sum(lengths) for _, lengths in attempts]
    shrinking = sizes[: sizes.index(1) + 1]
    assert all(later < earlier for earlier, later in pairwise(shrinking)), "each attempt is smaller"
    for rid in rids:
        for index in range(2):
            assert driver.result(rid, index).finish_reason.code == "out_of_memory"
    limited(driver, 1000)
    check_everybody(driver, submit(driver))


def test_steps_grow_again(driver):
    limited(driver, 20)
    driver.complete(PROMPTS[1], 100)
    assert driver.status().step_failures.token_limit == 16
    limited(driver, 1000)
    for number in range(12):
        driver.generate([3 + number, *PROMPTS[1]], 1)
    driver.run_until_idle()
    assert driver.status().step_failures.token_limit is None
    driver.flush(torch_empty_cache=False)
    before = len(driver.runner.launches)
    driver.complete(PROMPTS[1], 1)
    assert [lengths for _, lengths in driver.runner.launches[before:]] == [[32], [32], [11]]


def test_the_step_after_a_lost_one_ends_no_request(tiny_model):
    with EngineDriver(str(tiny_model), pipeline_depth=1, chunked_prefill_size=32) as driver:
        guilty = driver.generate(PROMPTS[0], 20)
        driver.tick(5)
        with Fault(driver.runner, "on_fetch", BUG):
            driver.tick()  # launches the step that will fail
            innocent = driver.generate(PROMPTS[1], 6)
            driver.run_until_idle()
        assert driver.result(guilty).finish_reason.type == "error"
        result = driver.check(innocent)
        assert result.finish_reason.type == "length"
        assert driver.status().step_failures.retried == 1
        check_nothing_is_left(driver)


def test_a_device_that_cannot_be_told_the_last_tokens(driver):
    rids = submit(driver)
    driver.tick(6)
    with Fault(driver.runner, "after", NO_MEMORY[0]), Fault(driver.runner, "set_last_tokens", BUG) as fault:
        results = check_everybody(driver, rids)
    assert fault.raised == (driver.engine.cache.states is None)
    assert {result.finish_reason.type for result in results} == {"length"}
    assert sum(result.num_retractions for result in results) > 0


@pytest.mark.parametrize("failures", [2, 3, 4, 5])
def test_results_that_make_no_message(driver, failures):
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    message = GenerateReqInput(input_ids=PROMPTS[0], sampling_params=params)
    driver.send(message)
    other = driver.generate(PROMPTS[0], 1, client="other")
    driver.hear()
    results = driver.engine.outbox
    identity = driver.engine.live.samples(message.id)[0].client
    with Fault(results, "_send", BUG, range(failures), only=lambda client, _: client == identity) as fault:
        driver.tick(2)
        driver.client("other").poll(1000)
        driver.collect()
        assert (other, 0) in driver.results
        driver.run_until_idle()
        driver.tick(3)
    assert fault.raised == failures
    assert not results.has_undelivered
    sent = [result.finish_reason.type for result in driver.results.get((message.id, 0), [])]
    assert sent == {2: ["length"], 3: ["length"], 4: ["error"], 5: []}[failures]
    if failures == 4:
        (empty,) = driver.results[message.id, 0]
        figures = (empty.prompt_tokens, empty.cached_tokens, empty.seed)
        assert (figures, empty.output_ids, empty.weight_versions) == ((0, 0, 0), b"", [])
    if failures > 3:
        driver.results.clear()
        driver.send(message)
        driver.run_until_idle()
    driver.check(message.id)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_after_a_lost_step(driver, new_weights, mode):
    for ticks in (1, 3, 6):
        rids = submit(driver)
        driver.tick(ticks)
        with Fault(driver.runner, "on_fetch", NO_MEMORY[0]) as fault:
            driver.tick()
            reply = driver.pause(mode)
        assert fault.raised == 1
        assert not driver.engine.batcher.in_flight
        assert reply.held_tokens == driver.status().kv.held
        assert driver.update(new_weights, flush_cache=mode != "in_place").committed
        assert driver.go_on(torch_empty_cache=False).was_paused
        results = check_everybody(driver, rids)
        assert {result.finish_reason.type for result in results} <= {"length", "abort"}


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    asks=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=7),
    room=st.lists(st.sampled_from([1000, 1000, 40, 33, 16, 5, 1]), min_size=1, max_size=60),
    where=st.sampled_from(["before", "after", "on_fetch"]),
    data=st.data(),
)
def test_memory_that_comes_and_goes(driver, asks, room, where, data):
    steps = iter(room)

    def refuse(batch: ForwardBatch) -> None:
        if sum(batch.q_lens_host) > next(steps, 1000):
            raise another(NO_MEMORY[0])

    rids = {}
    for number, (length, new_tokens) in enumerate(asks):
        prompt = [3 + (i * 5 + number) % 90 for i in range(length)]
        rids[driver.generate(prompt, new_tokens)] = prompt
    setattr(driver.runner, where, refuse)
    results = check_everybody(driver, rids)
    setattr(driver.runner, where, lambda batch: None)
    assert {result.finish_reason.type for result in results} == {"length"}
    driver.flush(torch_empty_cache=False)
