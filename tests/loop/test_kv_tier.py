"""KV that leaves the pool goes to the tier, and comes back only to the weights that computed it."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.checkpoints import make_checkpoint
from support.deltas import ROADS, SentDelta, by_tensor, some_changed
from support.faults import full_disk
from support.lora import ALL_LINEAR, make_adapter
from support.properties import examples
from support.scripted import EngineDriver, assert_error, ok, prompt_of, tokens_of

from caesura.io_struct import (
    CaesuraError,
    DeltaBase,
    GenerateReqOutput,
    LoadAdapterReqInput,
    RollbackWeightsReqInput,
)
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.runtime.engine_config import EngineConfig

TIER = 1 << 20
ROW = 6272
"""Bytes of a page of the tiny model in the tier, the scripted model's part included."""
DETERMINISTIC = best("linear", "cpu", torch.float32) != TORCH
same_bits = pytest.mark.skipif(not DETERMINISTIC, reason="torch's products depend on the number of rows")
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate([40, 75, 90])]


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), kv_tier_bytes=TIER) as driver:
        yield driver


def hits(driver: EngineDriver) -> int:
    return driver.status().kv_tier.hit_tokens


def release_and_resume(driver: EngineDriver) -> None:
    ok(driver.release("kv_cache"))
    assert driver.status().kv.free == driver.status().kv.total
    if driver.runner is not None:
        driver.runner.kv[:] = 0
    ok(driver.resume("kv_cache"))


# -- release and resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_retracted_requests_outlive_a_release(tiny_model, depth):
    with EngineDriver(str(tiny_model), kv_tier_bytes=TIER, pipeline_depth=depth) as driver:
        rids = [driver.generate(prompt, 40) for prompt in PROMPTS]
        driver.tick(12)
        ok(driver.pause("retract"))
        release_and_resume(driver)
        computed = driver.engine.batcher.prefilled_tokens
        ok(driver.go_on())
        driver.run_until_idle()
        for rid in rids:
            assert not any(span.stale_kv for span in driver.check(rid).weight_versions)
        known = sum(len(prompt) + 12 for prompt in PROMPTS)
        assert driver.engine.batcher.prefilled_tokens - computed <= 3 * 17
        assert hits(driver) >= known - 3 * 32


def test_a_retracted_request_goes_on_from_the_pool(driver):
    rid = driver.generate(PROMPTS[1], 40)
    driver.tick(12)
    assert ok(driver.pause("retract")).held_tokens == 0
    computed = driver.engine.batcher.prefilled_tokens
    ok(driver.go_on())
    driver.run_until_idle()
    driver.check(rid)
    assert driver.engine.batcher.prefilled_tokens - computed <= 17
    assert driver.status().kv_tier.stored_tokens == 0


def test_prefixes_outlive_a_release(driver):
    first = [driver.complete(prompt).cached_tokens for prompt in PROMPTS]
    release_and_resume(driver)
    again = [driver.complete(prompt).cached_tokens for prompt in PROMPTS]
    assert (first, again) == ([0, 0, 0], [32, 64, 80])
    assert hits(driver) == sum(again)
    release_and_resume(driver)  # what the tier has is not copied again
    stored = driver.status().kv_tier.stored_tokens
    release_and_resume(driver)
    assert driver.status().kv_tier.stored_tokens == stored


def test_a_flush_empties_the_tier(driver):
    driver.complete(PROMPTS[1])
    release_and_resume(driver)
    assert driver.status().kv_tier.host_bytes > 0
    ok(driver.flush())
    assert driver.status().kv_tier.host_bytes == 0
    assert driver.complete(PROMPTS[1]).cached_tokens == 0


# -- evictions -----------------------------------------------------------------------------------------------


def crowd(model: object, **options: object) -> tuple[list[list[int]], EngineDriver]:
    with EngineDriver(str(model), kv_pool_tokens=160, max_running_requests=4, **options) as driver:
        rids = [driver.generate(prompt_of(30, seed), 60) for seed in range(4)]
        driver.run_until_idle()
        tokens = [tokens_of(driver.check(rid)) for rid in rids]
        assert driver.engine.batcher.num_retractions > 0
        return tokens, driver


def test_preempted_requests_take_their_pages_back(tiny_model):
    tokens, without = crowd(tiny_model)
    tokens_with, driver = crowd(tiny_model, kv_tier_bytes=TIER)
    assert tokens == tokens_with
    status = driver.engine.cache.tier.status(16)
    assert status.hit_tokens > 0
    assert driver.engine.batcher.prefilled_tokens < without.engine.batcher.prefilled_tokens


def test_the_tier_keeps_what_was_used_last(tiny_model):
    with EngineDriver(str(tiny_model), kv_pool_tokens=96, kv_tier_bytes=8 * ROW) as driver:
        for seed in range(4):
            driver.complete(prompt_of(70, seed), 1)
        found = [driver.complete(prompt_of(70, seed), 1).cached_tokens for seed in (3, 2, 0)]
        assert found == [64, 64, 0]


def test_pages_go_on_to_the_file_and_come_back(tiny_model, tmp_path):
    options = {"kv_tier_bytes": 3 * ROW, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": TIER}
    with EngineDriver(str(tiny_model), kv_pool_tokens=96, **options) as driver:
        assert list(tmp_path.iterdir()) == []
        for seed in range(6):
            driver.complete(prompt_of(70, seed), 1)
        assert driver.status().kv_tier.file_bytes > 0
        found = [driver.complete(prompt_of(70, seed), 1).cached_tokens for seed in range(6)]
        assert found == [64] * 6
        release_and_resume(driver)
        assert driver.complete(prompt_of(70, 0), 1).cached_tokens == 64
        assert driver.status().kv_tier.failures == 0


def test_a_full_disk_loses_pages_and_nothing_else(tiny_model, tmp_path, caplog):
    options = {"kv_tier_bytes": 3 * ROW, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": TIER}
    with EngineDriver(str(tiny_model), kv_pool_tokens=96, **options) as driver:
        with full_disk(0):
            for seed in range(6):
                driver.complete(prompt_of(70, seed), 1)
        status = driver.status().kv_tier
        assert (status.file_bytes, status.failures > 1) == (0, True)
        assert sum("the KV tier has lost" in each.getMessage() for each in caplog.records) == 1
        assert driver.complete(prompt_of(70, 0), 1).cached_tokens == 0
        for seed in range(1, 6):
            driver.complete(prompt_of(70, seed), 1)
        assert driver.complete(prompt_of(70, 0), 1).cached_tokens == 64


def test_a_file_that_lost_its_end_is_not_read(tiny_model, tmp_path):
    options = {"kv_tier_bytes": 3 * ROW, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": TIER}
    with EngineDriver(str(tiny_model), kv_pool_tokens=96, **options) as driver:
        for seed in range(6):
            driver.complete(prompt_of(70, seed), 1)
        driver.engine.cache.tier._store._file.truncate(0)
        assert driver.complete(prompt_of(70, 0), 1).cached_tokens == 0
        driver.complete(prompt_of(70, 1), 1)
        assert driver.status().kv_tier.failures > 0


# -- other weights, adapters, salts --------------------------------------------------------------------------


def test_an_update_makes_pages_unknown(driver, other_model):
    for update in (
        lambda: ok(driver.update(other_model)),
        lambda: ok(driver.update(other_model, flush_cache=False)),
        lambda: Sender(driver, other_model).send_all(flush_cache=False),
    ):
        driver.complete(PROMPTS[1])
        release_and_resume(driver)
        update()
        assert driver.status().kv_tier.host_bytes == 0
        assert driver.complete(PROMPTS[1]).cached_tokens == 0
    assert hits(driver) == 0


def test_a_poisoned_update_makes_pages_unknown(driver, other_model):
    driver.complete(PROMPTS[1])
    release_and_resume(driver)
    ok(driver.check_weights("reset_tensors"))
    ok(driver.update(other_model, flush_cache=False))
    assert driver.complete(PROMPTS[1]).cached_tokens == 0


def test_requests_retracted_before_an_update_start_again(driver, other_model):
    rid = driver.generate(PROMPTS[1], 40)
    driver.tick(12)
    ok(driver.pause("retract"))
    ok(driver.release("kv_cache"))
    ok(driver.update(other_model, flush_cache=False))
    ok(driver.resume("kv_cache"))
    ok(driver.go_on())
    driver.run_until_idle()
    assert len(driver.check(rid).weight_versions) == 2
    assert hits(driver) == 0


def test_a_salt_has_its_own_pages(driver):
    driver.complete(PROMPTS[1], cache_salt="a")
    release_and_resume(driver)
    assert driver.complete(PROMPTS[1]).cached_tokens == 0
    assert driver.complete(PROMPTS[1], cache_salt="b").cached_tokens == 0
    assert driver.complete(PROMPTS[1], cache_salt="a").cached_tokens == 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("tier") / name for name in ("base", "other")]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", seed=seed)
    return paths


@pytest.fixture
def base(models):
    return models[0]


@pytest.fixture
def other(models):
    return models[1]


def outcome(result: GenerateReqOutput) -> tuple[object, ...]:
    """Return all of a result that a tier must not change."""
    spans = [(span.start, span.end, span.version, span.stale_kv) for span in result.weight_versions]
    return tokens_of(result), result.output_logprobs, result.finish_reason.type, spans


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-moe"])
def test_latents_and_experts_come_back_as_they_were(tmp_path, family):
    make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    options = {"kv_tier_bytes": TIER, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": TIER}
    with EngineDriver(str(tmp_path / "model"), scripted=False, dtype="auto", **options) as driver:

        def sampled() -> GenerateReqOutput:
            return driver.complete(PROMPTS[1], 20, seed=7, return_logprob=True)

        sampled()
        from_pool = sampled()
        release_and_resume(driver)
        from_tier = sampled()
        assert hits(driver) == from_pool.cached_tokens == from_tier.cached_tokens == 64
        assert outcome(from_pool) == outcome(from_tier)


@same_bits
@pytest.mark.parametrize("road", ["tensor", "disk"])
def test_a_rollback_makes_pages_known_again(base, tmp_path, road):
    old = load_file(base / "model.safetensors")
    sent = SentDelta(old, some_changed(old))
    with EngineDriver(str(base), scripted=False, kv_tier_bytes=TIER) as driver:

        def sampled() -> GenerateReqOutput:
            return driver.complete(PROMPTS[1], 20, seed=7, return_logprob=True)

        first = sampled()
        release_and_resume(driver)
        for epoch in (0, 2):
            ok(ROADS[road](driver, sent, DeltaBase(base_epoch=epoch), tmp_path, weight_version="new"))
            changed = sampled()
            assert (changed.cached_tokens, outcome(changed) == outcome(first)) == (0, False)
            release_and_resume(driver)
            ok(driver.call(RollbackWeightsReqInput()))
            again = sampled()
            assert (again.cached_tokens, outcome(again)) == (64, outcome(first))
        ok(ROADS[road](driver, sent, DeltaBase(base_epoch=4), tmp_path))
        ok(driver.update(base))  # the same bits, but the engine has not compared them
        assert sampled().cached_tokens == 0


@same_bits
def test_a_delta_that_fails_leaves_pages_known(base, tmp_path):
    old = load_file(base / "model.safetensors")
    sent, broken = SentDelta(old, some_changed(old)), some_changed(old)
    broken["lm_head.weight"].view(-1)[7] = torch.nan
    with EngineDriver(str(base), scripted=False, kv_tier_bytes=TIER, check_finite=True) as driver:
        first = driver.complete(PROMPTS[1], 20, seed=7)
        for delta, promise, code in (
            (sent, "0" * 32, "base_mismatch"),  # before the first byte
            (SentDelta(old, broken), None, "weights_not_finite"),  # at the commit, and undone
        ):
            release_and_resume(driver)
            promised = DeltaBase(base_epoch=0, digest=promise)
            assert_error(by_tensor(driver, delta, promised, tmp_path), code)
            again = driver.complete(PROMPTS[1], 20, seed=7)
            assert (again.cached_tokens, outcome(again)) == (64, outcome(first))


def test_an_update_that_was_broken_off_makes_pages_unknown(base, other):
    with EngineDriver(str(base), scripted=False, kv_tier_bytes=TIER) as driver:
        rid = driver.generate(PROMPTS[1], 30, seed=7)
        driver.tick(8)
        ok(driver.pause("retract"))
        release_and_resume(driver)
        session = driver.begin()
        Sender(driver, other, session_id=session).send(0)
        ok(driver.end(session_id=session, commit=False))
        assert driver.status().weights == "poisoned"
        Sender(driver, base).send_all()  # what was there before, all of it
        ok(driver.go_on())
        driver.run_until_idle()
        assert [span.epoch for span in driver.result(rid).weight_versions] == [0, 1]
        assert (hits(driver), driver.status().kv_tier.host_bytes) == (0, 0)


def test_an_adapter_has_pages_of_each_version(base, tmp_path):
    paths = [make_adapter(base, tmp_path / str(seed), ALL_LINEAR, seed=seed) for seed in range(2)]
    with EngineDriver(str(base), scripted=False, enable_lora=True, kv_tier_bytes=TIER) as driver:

        def cached(**fields: str) -> int:
            return driver.complete(PROMPTS[1], 20, seed=7, **fields).cached_tokens

        for path in (*paths, paths[0]):
            ok(driver.call(LoadAdapterReqInput(name="a", path=str(path))))
            assert cached(adapter="a") == 0
            release_and_resume(driver)
            assert cached(adapter="a") == 64
        assert cached() == 0


WAVES = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(20, 90), st.integers(0, 3)), min_size=1, max_size=4
        ),
        st.lists(
            st.tuples(st.integers(0, 15), st.sampled_from(["retract", "release", "in_place", "abort one"])),
            max_size=3,
        ),
        st.sampled_from(["nothing", "nothing", "release", "update", "delta", "rollback", "flush"]),
    ),
    min_size=2,
    max_size=5,
)


def rolled_out(driver: EngineDriver, waves: list, other: Path, sent: SentDelta, folder: Path) -> list[object]:
    """Return the outcome of every request that nobody aborted, wave by wave."""
    found: list[object] = []
    for requests, pauses, then in waves:
        rids = [
            driver.generate(prompt_of(length, text), 25, seed=seed or None, return_logprob=True)
            for text, length, seed in requests
        ]
        aborted = set()
        for ticks, what in pauses:
            driver.tick(ticks)
            if what == "abort one":
                aborted.add(rids[-1])
                ok(driver.abort(rids[-1]))
                continue
            ok(driver.pause("in_place" if what == "in_place" else "retract"))
            if what == "release":
                release_and_resume(driver)
            ok(driver.go_on())
        driver.run_until_idle()
        found += [outcome(driver.result(rid)) for rid in rids if rid not in aborted]
        if then == "release":
            release_and_resume(driver)
        elif then == "update":
            ok(driver.update(other))
        elif then == "delta":
            base = DeltaBase(base_epoch=driver.status().weights_epoch)
            found.append(type(by_tensor(driver, sent, base, folder)))
        elif then == "rollback":
            found.append(type(driver.call(RollbackWeightsReqInput())))
        elif then == "flush":
            ok(driver.flush())
    return found


@same_bits
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(waves=WAVES, pool=st.sampled_from([176, 240, 1024]), rows=st.sampled_from([3, 12, 200]))
def test_no_result_differs_by_the_tier(base, other, tmp_path_factory, waves, pool, rows):
    folder = tmp_path_factory.mktemp("deltas")
    old = load_file(base / "model.safetensors")
    sent = SentDelta(old, some_changed(old))
    tier = {"kv_tier_bytes": rows * ROW, "kv_tier_folder": str(folder), "kv_tier_folder_bytes": 20 * ROW}
    options = {"kv_pool_tokens": pool, "max_running_requests": 4, "deterministic": DETERMINISTIC}
    found = []
    for more in ({}, tier):
        with EngineDriver(str(base), scripted=False, **options, **more) as driver:
            found.append(rolled_out(driver, waves, other, sent, folder))
    assert found[0] == found[1]


@same_bits
@pytest.mark.slow
def test_every_rank_keeps_its_own_part(base, tmp_path):
    options = {"kv_tier_bytes": 12 * ROW, "kv_tier_folder": str(tmp_path), "kv_tier_folder_bytes": TIER}
    with EngineDriver(str(base), scripted=False, tp=2, deterministic=DETERMINISTIC, **options) as driver:
        prompts = [prompt_of(70, seed) for seed in range(6)]
        before = [outcome(driver.complete(prompt, 20, seed=7, return_logprob=True)) for prompt in prompts]
        release_and_resume(driver)
        after = [driver.complete(prompt, 20, seed=7, return_logprob=True) for prompt in prompts]
        assert [result.cached_tokens for result in after] == [64] * 6
        assert [outcome(result) for result in after] == before
        assert driver.status().kv_tier.file_bytes > 0


# -- what cannot be served -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_tier_bytes": -1}, "at least 0"),
        ({"kv_tier_bytes": TIER, "prefix_cache": False}, "prefix_cache"),
        ({"kv_tier_bytes": TIER, "kv_tier_folder_bytes": TIER}, "needs kv_tier_folder"),
        ({"kv_tier_bytes": TIER, "kv_tier_folder": "/"}, "needs kv_tier_bytes and kv_tier_folder_bytes"),
        ({"kv_tier_folder": "/", "kv_tier_folder_bytes": TIER}, "needs kv_tier_bytes"),
    ],
)
def test_options_that_disagree_are_refused(tiny_model, options, words):
    with pytest.raises(CaesuraError, match=words):
        EngineConfig(model_path=str(tiny_model), **options)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"kv_tier_bytes": 1}, "invalid_request", "less than a page"),
        ({"kv_tier_bytes": 1 << 60}, "out_of_memory", "host memory"),
        (
            {"kv_tier_bytes": TIER, "kv_tier_folder": "/nowhere", "kv_tier_folder_bytes": TIER},
            "invalid_request",
            "takes no file",
        ),
    ],
)
def test_impossible_tiers_are_refused_by_name(tiny_model, options, code, words):
    with pytest.raises(CaesuraError, match=words) as refused:
        EngineDriver(str(tiny_model), **options)
    assert refused.value.code == code


@pytest.mark.parametrize(("family", "words"), [("qwen3-next", "a state"), ("gpt-oss", "a sliding window")])
def test_models_with_other_layers_are_refused(tmp_path, family, words):
    make_checkpoint(tmp_path, family)
    with pytest.raises(CaesuraError, match=words):
        EngineDriver(str(tmp_path), kv_tier_bytes=TIER)
