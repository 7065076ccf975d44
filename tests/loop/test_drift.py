"""Drift checks inside a real engine, tick by tick."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lora import make_adapter
from support.scripted import EngineDriver, prompt_of, tokens_of

from caesura.io_struct import (
    CheckDriftReqInput,
    CheckDriftReqOutput,
    DriftReport,
    DriftSample,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerateReqOutput,
    LoadAdapterReqInput,
    SamplingParams,
    ShutdownReqInput,
    UnloadAdapterReqInput,
)
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.scheduling.request import Phase
from caesura.scheduler.scoring import drift_checks
from caesura.scheduler.scoring.drift_checks import Check

needs_kernels = pytest.mark.skipif(
    best("linear", "cpu", torch.float32) == TORCH, reason="no compiled kernels on this machine"
)
NEW = 24
PROMPTS = [prompt_of(20 + number, number) for number in range(8)]


def checked(model: Path, **options: Any) -> EngineDriver:
    given = {"enable_drift_check": True, "drift_share": 1.0, "deterministic": True, **options}
    return EngineDriver(str(model), scripted=False, **given)


def roll_out(driver: EngineDriver, **fields: Any) -> list[GenerateReqOutput]:
    rids = []
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=number, **fields)
        rids.append(driver.generate(prompt, sampling_params=params, return_logprob=True))
    driver.run_until_idle()
    return [driver.result(rid) for rid in rids]


def report_of(driver: EngineDriver, samples: list[DriftSample] | None = None) -> DriftReport:
    message = CheckDriftReqInput(samples=samples)
    driver.send(message)
    driver.run_until_idle()
    reply = driver.replies.pop(message.id)
    assert isinstance(reply, CheckDriftReqOutput), reply
    return reply.report


def samples_of(outputs: list[GenerateReqOutput], **fields: Any) -> list[DriftSample]:
    return [
        DriftSample(
            token_ids=[*prompt, *tokens_of(output)],
            prompt_len=len(prompt),
            logprobs=output.output_logprobs,
            **fields,
        )
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]


def parts(report: DriftReport, by: str) -> dict[str, int]:
    return {part.name: part.tokens for part in report.parts if part.by == by}


FIELDS = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0},
    {"frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "min_new_tokens": 9},
]


@needs_kernels
@pytest.mark.parametrize("fields", FIELDS)
def test_a_deterministic_engine_has_no_drift_at_all(tiny_model, depth, fields):
    with checked(tiny_model, pipeline_depth=depth) as driver:
        roll_out(driver, **fields)
        report = report_of(driver)
        assert (report.samples, report.tokens, report.state) == (8, 8 * NEW, "ok")
        assert (report.mean_abs, report.p99, report.max_abs, report.k1, report.k3) == (0, 0, 0, 0, 0)
        assert (report.ess, report.clip_share, report.worst) == (1.0, 0.0, [])
        assert parts(report, "span") == {"clean": 8 * NEW}
        assert driver.status().drift == report


def test_checks_are_seen_by_no_client_and_in_no_figure(tiny_model):
    def figures(driver: EngineDriver) -> tuple[Any, ...]:
        roll_out(driver)
        status = driver.status()
        totals = status.totals
        counts = totals.finished_requests, totals.prompt_tokens, totals.cached_tokens, totals.latency_s.counts
        return *map(sum, counts[3:]), *counts[:3], status.generated_tokens, status.waiting_requests

    with checked(tiny_model, enable_drift_check=False) as plain, checked(tiny_model) as driver:
        assert figures(driver) == figures(plain)
        assert len(driver.results) == len(PROMPTS), "results of checks were sent"
        assert report_of(driver).samples == 8
        assert plain.status().drift is None


def test_a_share_of_the_tokens_is_checked(tiny_model):
    with checked(tiny_model, drift_share=0.25, drift_samples=0, prefix_cache=False) as driver:
        for _ in range(4):
            roll_out(driver)
        assert report_of(driver).samples == 8, "of 32 that have ended"


def test_the_first_samples_of_new_weights_are_checked(tiny_model, other_model):
    with checked(tiny_model, drift_share=0.0, drift_samples=3) as driver:
        for epoch, model in enumerate((None, other_model, tiny_model)):
            if model is not None:
                driver.update(model)
            roll_out(driver)
            report = report_of(driver)
            assert (report.weights_epoch, parts(report, "span")) == (epoch, {"clean": 3 * NEW})


def test_an_update_is_measured_by_the_same_tokens(tiny_model, other_model):
    with checked(tiny_model, drift_samples=4) as driver:
        outputs = roll_out(driver)
        driver.update(other_model)
        driver.run_until_idle()
        report = report_of(driver)
        assert report.update is not None
        assert (report.update.tokens, report.tokens, report.state) == (4 * NEW, 0, "ok")
        assert report.update.max_abs > 1e-3
        # A trainer that still has the weights before sees the same.
        last = samples_of(outputs)[-4:]
        theirs = report_of(driver, last)
        assert theirs.mean_abs == pytest.approx(report.update.mean_abs)
        assert theirs.k3 == pytest.approx(report.update.k3)


def test_an_update_that_changes_nothing_is_noticed(tiny_model, caplog):
    with checked(tiny_model) as driver:
        roll_out(driver)
        driver.update(tiny_model)
        driver.run_until_idle()
        report = report_of(driver)
        assert report.update is not None
        assert (report.update.max_abs, report.state) == (0.0, "warn")
        assert "the update to weights epoch 1 has changed no log-probability" in caplog.text


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_spans_of_an_update_within_a_sample_are_apart(tiny_model, other_model, mode):
    with checked(tiny_model, drift_samples=0) as driver:
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        rid = driver.generate(PROMPTS[0], sampling_params=params)
        driver.tick(10)
        driver.pause(mode)
        driver.update(other_model, flush_cache=False)
        driver.go_on()
        driver.run_until_idle()
        spans = driver.result(rid).weight_versions
        report = report_of(driver)
        name = "stale_kv" if mode == "in_place" else "across_update"
        assert parts(report, "span") == {name: spans[1].end - spans[1].start}
        assert (report.tokens == 0) == (mode == "in_place")
        if mode == "in_place":
            (stale,) = report.parts
            assert stale.max_abs > 0.0, "tokens over stale KV are others"
        else:
            assert report.max_abs == 0.0


def broken(driver: EngineDriver) -> None:
    """Let decode steps compute hidden states with one bit more, apart from head and sampler."""
    model = driver.engine.model
    forward = model.forward
    model.sample = lambda *of: None

    def with_a_bit(batch: Any, backend: Any) -> torch.Tensor:
        hidden = forward(batch, backend)
        if batch.num_decode == len(batch.q_lens_host):
            hidden.view(torch.int32).bitwise_xor_(1 << 12)
        return hidden

    model.forward = with_a_bit


def test_a_bit_of_a_kernel_is_noticed(tiny_model, caplog):
    with checked(tiny_model) as driver:
        broken(driver)
        roll_out(driver)
        report = report_of(driver)
        assert (report.state, report.worst[0].position >= 20) == ("limit", True)
        assert 0.0 < report.mean_abs <= report.p99 <= report.max_abs < 1e-2
        assert report.max_abs == pytest.approx(abs(report.worst[0].scored - report.worst[0].given))
        assert "drift (limit): scored again," in caplog.text


@pytest.mark.parametrize(("limit", "state"), [(0.0, "limit"), (1.0, "warn")])
def test_thresholds_are_those_that_were_given(tiny_model, limit, state):
    with checked(tiny_model, deterministic=False, drift_warn=0.0, drift_limit=limit) as driver:
        broken(driver)
        roll_out(driver)
        assert report_of(driver).state == state


def test_an_engine_over_its_limit_pauses_once(tiny_model):
    with checked(tiny_model, drift_action="pause") as driver:
        broken(driver)
        roll_out(driver)
        assert driver.status().generation == "paused"
        driver.go_on()
        roll_out(driver)
        status = driver.status()
        assert (status.generation, status.drift.state) == ("running", "limit")


def test_a_flush_does_not_wait_for_checks(tiny_model):
    with checked(tiny_model) as driver:
        rid = driver.generate(PROMPTS[0], sampling_params=SamplingParams(max_new_tokens=4, ignore_eos=True))
        while not driver.engine.live.samples(""):
            driver.tick(1)
        flush = FlushCacheReqInput()
        driver.send(flush)
        driver.run_until_idle()
        assert isinstance(driver.replies.pop(flush.id), FlushCacheReqOutput)
        driver.result(rid)
        assert (report_of(driver).dropped, report_of(driver).samples) == (1, 0)


def test_a_check_reads_no_kv_of_decode_steps(tiny_model):
    with checked(tiny_model, drift_share=0.0, drift_samples=0) as driver:
        outputs = roll_out(driver)
        computed = driver.engine.batcher.prefilled_tokens
        report_of(driver, samples_of(outputs))
        whole = sum(len(prompt) + NEW - 1 for prompt in PROMPTS)
        assert driver.engine.batcher.prefilled_tokens - computed == whole


def test_samples_of_a_trainer_are_scored_as_they_were(tiny_model):
    with checked(tiny_model, enable_drift_check=False) as driver:
        outputs = roll_out(driver, temperature=0.7)
        same = report_of(driver, samples_of(outputs, temperature=0.7))
        assert (same.samples, same.tokens, same.max_abs, same.state) == (8, 8 * NEW, 0.0, "ok")
        other = report_of(driver, samples_of(outputs, rid="hot"))
        assert (other.max_abs > 0.0, other.worst[0].rid) == (True, "hot")
        assert parts(same, "position") == {"0-255": 8 * NEW}


def test_figures_are_those_of_their_definitions(tiny_model):
    with checked(tiny_model, enable_drift_check=False) as driver:
        samples = samples_of(roll_out(driver))
        noise = np.random.default_rng(5).normal(0.0, 0.5, (8, NEW)).astype("<f4")
        moved = [
            DriftSample(
                token_ids=each.token_ids,
                prompt_len=each.prompt_len,
                logprobs=(np.frombuffer(each.logprobs, "<f4") - row).tobytes(),
            )
            for each, row in zip(samples, noise, strict=True)
        ]
        report = report_of(driver, moved)
        gaps, ratios = noise.ravel().astype(float), np.exp(noise.ravel().astype(float))
        assert report.mean_abs == pytest.approx(np.abs(gaps).mean(), rel=1e-4)
        assert report.p99 == pytest.approx(
            np.sort(np.abs(gaps))[int(np.ceil(0.99 * (len(gaps) - 1)))], rel=1e-4
        )
        assert report.max_abs == pytest.approx(np.abs(gaps).max(), rel=1e-4)
        assert report.k1 == pytest.approx(-gaps.mean(), rel=1e-3)
        assert report.k3 == pytest.approx((ratios - 1 - gaps).mean(), rel=1e-4)
        assert report.ess == pytest.approx(ratios.sum() ** 2 / (len(gaps) * (ratios**2).sum()), rel=1e-4)
        assert report.clip_share == pytest.approx(np.mean(np.abs(gaps) > np.log(2)), abs=1e-6)
        assert report.state == "limit"
        assert len(report.worst) == 8
        assert abs(report.worst[0].scored - report.worst[0].given) == pytest.approx(report.max_abs)


def test_no_token_makes_a_figure_infinite(tiny_model):
    with checked(tiny_model, enable_drift_check=False) as driver:
        for value in (-1e30, 1e30):
            logprobs = np.zeros(NEW, "<f4")
            logprobs[7] = value
            token_ids = [*PROMPTS[0], *range(5, 5 + NEW)]
            report = report_of(
                driver, [DriftSample(token_ids=token_ids, prompt_len=20, logprobs=logprobs.tobytes())]
            )
            assert (report.max_abs, report.k3 > 1.0, report.worst[0].position) == (60.0, True, 27)


def test_a_token_forbidden_on_both_sides_is_none(tiny_model):
    tokens = [5, 6, 7] * 30
    params = SamplingParams(forced_output_ids=tokens, allowed_token_ids=[5, 7])
    with checked(tiny_model, deterministic=False) as driver:
        rid = driver.generate(PROMPTS[0], sampling_params=params, return_logprob=True)
        driver.run_until_idle()
        logprobs = np.frombuffer(driver.result(rid).output_logprobs, "<f4")
        spans = ((driver.engine.state.stamp, False, 0),)
        prompt, ids = np.asarray(PROMPTS[0], np.int32), np.asarray(tokens, np.int32)
        check = Check(rid, 0, prompt, params, 0, None, ids, logprobs, spans)
        drift = driver.engine.drift
        drift._start([check])
        driver.run_until_idle()
        report = report_of(driver)
        assert (report.tokens, report.k3 < 1e-6, report.state) == (60, True, "ok")
        drift._start([replace(check, logprobs=np.maximum(logprobs, -5.0))])
        driver.run_until_idle()
        report = report_of(driver)
        assert (report.tokens, report.max_abs, report.state) == (150, 60.0, "limit")


def test_a_client_aborts_no_check_of_others(tiny_model):
    with checked(tiny_model) as driver:
        message = CheckDriftReqInput(samples=samples_of(roll_out(driver)))
        driver.pause("in_place")
        driver.send(message)
        driver.tick(2)
        assert driver.abort("").aborted == 0
        driver.go_on()
        driver.run_until_idle()
        assert driver.replies.pop(message.id).report.samples == 8


@pytest.mark.parametrize("adapter", [None, "a"])
def test_a_state_ends_with_its_weights_not_by_few_tokens(tiny_model, other_model, tmp_path, adapter):
    path = str(make_adapter(tiny_model, tmp_path / "a", ["q_proj"]))
    options = {"enable_lora": True, "drift_samples": 0, "drift_action": "unhealthy"}
    with checked(tiny_model, deterministic=False, drift_limit=0.0, drift_warn=0.0, **options) as driver:
        driver.call(LoadAdapterReqInput(name="a", path=path))
        broken(driver)
        params = SamplingParams(max_new_tokens=80, ignore_eos=True)
        driver.generate(PROMPTS[0], sampling_params=params, adapter=adapter)
        driver.run_until_idle()
        assert report_of(driver).state == "unhealthy"
        if adapter is None:
            driver.update(other_model)
            report = report_of(driver)
            assert (report.state, report.tokens, report.weights_epoch) == ("ok", 80, 0)
        else:
            driver.call(LoadAdapterReqInput(name="a", path=path))
            params = SamplingParams(max_new_tokens=2, ignore_eos=True)
            driver.generate(PROMPTS[0], sampling_params=params)
            driver.run_until_idle()
            assert (report_of(driver).tokens, report_of(driver).state) == (2, "unhealthy")


def test_certain_tokens_say_nothing_about_an_update(tiny_model, other_model):
    with checked(tiny_model) as driver:
        roll_out(driver, allowed_token_ids=[7])
        driver.update(other_model)
        driver.run_until_idle()
        report = report_of(driver)
        assert (report.update.tokens, report.update.max_abs, report.state) == (4 * NEW, 0.0, "ok")


def test_checks_count_in_no_limit_and_no_pause(tiny_model):
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    with checked(tiny_model, max_running_requests=1, max_waiting_requests=1) as driver:
        first = driver.generate(PROMPTS[0], sampling_params=params)
        driver.tick(2)
        second = driver.generate(PROMPTS[1], sampling_params=params)
        while not driver.engine.live.samples(""):
            driver.tick()
        while driver.engine.live.samples(second)[0].phase is not Phase.DECODE:
            driver.tick()
        third = driver.generate(PROMPTS[2], sampling_params=params)
        paused = driver.pause("in_place")
        assert len(driver.engine.live.samples("")) == 1
        assert (paused.held_requests, paused.waiting_requests) == (1, 1)
        driver.go_on()
        driver.run_until_idle()
        for rid in (first, second, third):
            assert driver.result(rid).finish_reason.type == "length"


def test_a_shutdown_waits_for_no_check(tiny_model):
    options = {"shutdown_mode": "drain", "drain_timeout_s": 3600.0, "max_running_requests": 1}
    with checked(tiny_model, **options) as driver:
        rids = [driver.generate(prompt, max_new_tokens=4) for prompt in PROMPTS[:2]]
        while not driver.engine.live.samples(""):
            driver.tick()
        driver.send(ShutdownReqInput())
        driver.engine.scheduler.run()
        driver.collect()
        assert [driver.result(rid).finish_reason.type for rid in rids] == ["length"] * 2
        report = driver.engine.drift.report()
        assert (report.samples, report.dropped) == (0, 1)


def test_the_window_keeps_few_samples_and_no_prompt(tiny_model, monkeypatch):
    monkeypatch.setattr(drift_checks, "WINDOW_SAMPLES", 5)
    with checked(tiny_model, drift_samples=0) as driver:
        roll_out(driver)
        report = report_of(driver)
        assert (report.samples, report.tokens, parts(report, "position")) == (5, 5 * NEW, {"0-255": 5 * NEW})
        assert not any(len(each.check.prompt) for each in driver.engine.drift._window)


def test_adapters_are_told_apart(tiny_model, tmp_path):
    paths = [make_adapter(tiny_model, tmp_path / str(seed), ["q_proj"], seed=seed) for seed in range(2)]
    with checked(tiny_model, deterministic=False, enable_lora=True) as driver:
        driver.call(LoadAdapterReqInput(name="a", path=str(paths[0])))
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        for adapter in ("a", None):
            driver.generate(PROMPTS[0], sampling_params=params, adapter=adapter)
        driver.run_until_idle()
        assert parts(report_of(driver), "adapter") == {"a": NEW}
        assert parts(report_of(driver), "span") == {"clean": 2 * NEW}
        driver.call(LoadAdapterReqInput(name="a", path=str(paths[1])))
        driver.run_until_idle()
        report = report_of(driver)
        assert (report.update.tokens, report.update.max_abs > 0.0) == (NEW, True)
        assert (report.tokens, parts(report, "adapter")) == (NEW, {}), "the model itself is the same"
        driver.call(UnloadAdapterReqInput(name="a"))
        driver.update(tiny_model)
        driver.run_until_idle()
        report = report_of(driver)
        assert (report.update.tokens, report.dropped, report.state) == (NEW, 1, "warn")


MISTAKES = [
    ({"prompt_len": 4}, "prompt_len"),
    ({"logprobs": b"1234"}, "logprobs"),
    ({"logprobs": np.full(2, np.nan, "<f4").tobytes()}, "logprobs"),
    ({"token_ids": [5, 6, 7, 97]}, "outside the vocabulary"),
    ({"adapter": "none"}, "enable_lora"),
]


def test_a_sample_that_cannot_be_scored_is_named(tiny_model):
    with checked(tiny_model) as driver:
        for fields, named in MISTAKES:
            given = {"token_ids": [5, 6, 7, 8], "prompt_len": 2, "logprobs": bytes(8), **fields}
            message = CheckDriftReqInput(samples=[DriftSample(**given)])
            driver.send(message)
            driver.run_until_idle()
            error = driver.replies.pop(message.id)
            assert error.message.startswith("samples[0]: ")
            assert named in error.message
            assert not driver.engine.live
