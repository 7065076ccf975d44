"""Layers with a state per sequence: every step goes on from the state of its rows, through all that requests
go through. Layers with a window, which give pages back while requests run: every step finds what it sees.

The scripted model keeps a state beside its KV, and asserts in each step that it is what all KV of the row
says. A step that begins leaves the states of its rows torn until it has been computed.
"""

import random

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.faults import BUG, NO_MEMORY, STAGES, Fault
from support.scripted import EngineDriver, prompt_of, tokens_of

from caesura.io_struct import AbortReq
from caesura.scheduler.cache.layer_ledgers import storage_pages

WINDOW = 37


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {}
    for name, family, fields in (
        ("states", "qwen3.5", {}),
        ("windows", "gemma3", {"tied": True, "sliding_window": WINDOW}),
    ):
        made[name] = [str(tmp_path_factory.mktemp(f"{name}{seed}")) for seed in range(2)]
        for seed, path in enumerate(made[name]):
            make_checkpoint(path, family, seed=seed, **fields)
    return made


def engine(folders, kind, depth, **options):
    options = {"chunked_prefill_size": 32, "max_running_requests": 4, **options}
    return EngineDriver(folders[kind][0], pipeline_depth=depth, **options)


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


@pytest.fixture
def driver(folders, depth):
    with engine(folders, "states", depth) as driver:
        yield driver


@pytest.fixture
def windowed(folders, depth):
    with engine(folders, "windows", depth) as driver:
        yield driver


def check_rest(driver):
    assert driver.engine.cache.states.usage().held == 0
    driver.flush(torch_empty_cache=False)
    usage = driver.engine.cache.states.usage()
    assert usage.free == usage.total == 8


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_samples_share_the_prompt_with_the_next_turn(folders, depth, kind):
    with engine(folders, kind, depth) as driver:
        rid = driver.generate(prompt_of(100), 62, n=4)
        driver.run_until_idle()
        results = [driver.check(rid, index) for index in range(4)]
        assert [result.cached_tokens for result in results] == [0, 96, 96, 96]
        assert driver.complete([*prompt_of(100), *tokens_of(results[3]), 5, 6, 7], 5).cached_tokens == 160
        if kind == "states":
            check_rest(driver)


def test_a_prefix_without_a_state_is_computed_once_more(driver):
    driver.complete(prompt_of(104), 3)
    others = [[*prompt_of(70), 4, 5, seed] for seed in range(3)]
    assert [driver.complete(other, 3).cached_tokens for other in others] == [0, 64, 64]
    check_rest(driver)


def test_prompts_that_end_at_a_border(driver):
    for length in (32, 33, 48):
        assert driver.complete(prompt_of(length), 20).cached_tokens == 0
        assert driver.complete(prompt_of(length), 2).cached_tokens == (length - 1) // 16 * 16
        check_rest(driver)


def test_the_state_used_last_is_kept(folders):
    with EngineDriver(folders["states"][0], max_running_requests=1, chunked_prefill_size=32) as driver:
        assert driver.engine.cache.states.total == 2
        for seed in range(3):
            driver.complete(prompt_of(50, seed), 5)
            assert driver.complete(prompt_of(50, seed), 20).cached_tokens == 48
            assert driver.complete(prompt_of(50, seed), 1).cached_tokens == 0
            assert driver.engine.cache.states.usage() == (1, 1, 0, 2)


def test_a_request_waits_for_a_row(driver):
    rids = [driver.generate(prompt_of(20 + seed, seed), 30) for seed in range(9)]
    driver.tick(6)
    held = driver.engine.cache.states.usage().held
    assert 4 <= held <= 8
    assert driver.status().running_requests + driver.status().prefilling_requests <= 4
    driver.run_until_idle()
    for rid in rids:
        driver.check(rid)
    check_rest(driver)


@pytest.mark.parametrize("error", [BUG, NO_MEMORY[1]], ids=["bug", "memory"])
@pytest.mark.parametrize("stage", ["noise", "open", "execute", "outputs", "fetch", "donate"])
def test_torn_states_are_not_reused(driver, stage, error):
    prompts = [prompt_of(75), prompt_of(40), prompt_of(9)]
    for number in (17, 0, 2, 5):
        with Fault(*STAGES[stage](driver), error, {number}) as fault:
            rids = [driver.generate(prompt, 18) for prompt in prompts]
            driver.run_until_idle()
        results = [driver.check(rid) for rid in rids]
        lost = fault.raised and stage in ("execute", "outputs", "fetch")
        if error is not BUG and lost:
            assert {result.finish_reason.type for result in results} == {"length"}
            assert any(result.num_retractions for result in results) == (number == 17)
        driver.engine.cache.check()
        check_rest(driver)


def test_a_request_after_a_lost_step_starts_again(folders):
    with EngineDriver(folders["states"][0], pipeline_depth=1, chunked_prefill_size=32) as driver:
        driver.complete(prompt_of(60), 1)
        guilty = driver.generate(prompt_of(9, 1), 20)
        driver.tick(5)
        with Fault(driver.runner, "on_fetch", BUG):
            driver.tick()  # launches the step that will fail
            result = driver.complete(prompt_of(60), 6)
        assert driver.result(guilty).finish_reason.type == "error"
        assert (result.finish_reason.type, result.cached_tokens, result.num_retractions) == ("length", 48, 1)


def test_a_token_that_never_fits_ends_its_request(driver):
    rid = driver.generate(prompt_of(40), 30)
    driver.tick(8)

    before = len(driver.runner.launches)
    long = {"calls": range(1000), "only": lambda batch: max(batch.kv_lens_host) > 50}
    with Fault(driver.runner, "before", NO_MEMORY[0], **long):
        driver.run_until_idle()
    result = driver.check(rid)
    assert result.finish_reason.code == "out_of_memory"
    assert len(driver.runner.launches) - before < 200
    check_rest(driver)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["states", "windows"])
def test_any_traffic_with_pauses_updates_and_failures(folders, kind, seed):
    chance, live = random.Random(seed), []
    with engine(folders, kind, seed % 2, kv_pool_tokens=640, max_running_requests=5) as driver:
        for turn in range(40):
            length, text = chance.choice([3, 20, 64, 65, 130, 180]), chance.randrange(3)
            prompt = [*prompt_of(length // 2, text), *prompt_of(length - length // 2, chance.randrange(2))]
            live.append(driver.generate(prompt, chance.randrange(1, 60)))
            driver.tick(chance.randrange(12))
            if chance.random() < 0.15:
                driver.send(AbortReq(rid=chance.choice(live)))
            if chance.random() < 0.1:
                driver.runner.fail_on_fetch = True
            if turn % 8 == 7:
                mode = chance.choice(["retract", "in_place"])
                driver.pause(mode)
                if chance.random() < 0.5:
                    path = folders[kind][turn // 8 % 2]
                    assert driver.update(path, flush_cache=mode == "retract").committed
                driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        for rid in live:
            driver.check(rid)
        cache = driver.engine.cache
        cache.check()
        assert cache.usage().held == 0
        if kind == "states":
            assert np.count_nonzero(cache.states.behind) == cache.states.usage().cached


# -- windows -------------------------------------------------------------------------------------------------


def test_a_long_request_holds_the_pages_of_its_window(windowed):
    most = []
    windows = windowed.engine.cache.windows
    windowed.runner.before = lambda batch: most.append(np.count_nonzero(windows.behind))
    assert len(tokens_of(windowed.complete(prompt_of(150), 90))) == 90
    assert max(most) <= storage_pages(WINDOW, 16, rows=1, step_tokens=32) < 240 // 16


def test_a_prefix_whose_window_is_gone_is_computed_again(windowed):
    windowed.complete(prompt_of(200), 3)
    assert windowed.complete([*prompt_of(200)[:100], 4, 4, 4], 3).cached_tokens == 0
