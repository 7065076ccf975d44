"""Layers with a window give their pages back while requests run, and every step still finds what it sees."""

import random

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import AbortReq
from caesura.scheduler.cache.layer_ledgers import storage_pages

VOCAB, WINDOW = 97, 37


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = [tmp_path_factory.mktemp(f"windows{seed}") for seed in range(2)]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "gemma3", tied=True, seed=seed, sliding_window=WINDOW)
    return [str(path) for path in paths]


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def driver(folders, request):
    options = {"pipeline_depth": request.param, "chunked_prefill_size": 32, "max_running_requests": 4}
    with EngineDriver(folders[0], **options) as driver:
        yield driver


def prompt_of(length, seed=0):
    return [3 + (seed * 31 + i * 7) % 90 for i in range(length)]


def windows_of(driver):
    return driver.engine.cache.windows


def test_a_long_request_holds_the_pages_of_its_window(driver):
    prompt, most = prompt_of(150), []
    driver.runner.before = lambda batch: most.append(np.count_nonzero(windows_of(driver).behind))
    rid = driver.generate(prompt, 90)
    driver.run_until_idle()
    assert len(tokens_of(driver.check(rid))) == 90
    assert max(most) <= storage_pages(WINDOW, 16, rows=1, step_tokens=32) < 240 // 16


def test_samples_share_the_prompt_and_the_next_turn_goes_on_from_it(driver):
    prompt = prompt_of(100)
    rid = driver.generate(prompt, 60, n=4)
    driver.run_until_idle()
    results = [driver.check(rid, index) for index in range(4)]
    assert [result.cached_tokens for result in results] == [0, 96, 96, 96]
    longer = [*prompt, *tokens_of(results[3]), 5, 6, 7]
    again = driver.generate(longer, 5)
    driver.run_until_idle()
    assert driver.check(again).cached_tokens == 144


def test_a_prefix_whose_window_is_gone_is_computed_again(driver):
    prompt = prompt_of(200)
    first = driver.generate(prompt, 3)
    driver.run_until_idle()
    part = [*prompt[:100], 4, 4, 4]
    second = driver.generate(part, 3)
    driver.run_until_idle()
    driver.check(first)
    assert driver.check(second).cached_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_with_pauses_and_updates(folders, seed):
    chance = random.Random(seed)
    options = {"pipeline_depth": seed % 2, "chunked_prefill_size": 32, "max_running_requests": 5}
    with EngineDriver(folders[0], kv_pool_tokens=640, **options) as driver:
        live = {}
        for turn in range(40):
            length, kind = chance.choice([3, 20, 64, 65, 130, 180]), chance.randrange(3)
            prompt = [*prompt_of(length // 2, kind), *prompt_of(length - length // 2, chance.randrange(2))]
            live[driver.generate(prompt, chance.randrange(1, 60))] = prompt
            driver.tick(chance.randrange(12))
            if chance.random() < 0.15:
                gone = chance.choice(list(live))
                driver.send(AbortReq(rid=gone))
            if turn % 8 == 7:
                mode = chance.choice(["retract", "in_place"])
                driver.pause(mode)
                if chance.random() < 0.5:
                    assert driver.update(folders[turn // 8 % 2], flush_cache=mode == "retract").committed
                driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        for rid in live:
            driver.check(rid)
        cache = driver.engine.cache
        cache.check()
        assert cache.usage().held == 0
