"""Drafts: results are those without, bit for bit, whatever happens meanwhile, and drafts are accepted."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from loop.test_stateful import EngineMachine
from support.properties import examples
from support.scripted import EngineDriver, ok, prompt_of, tokens_of

from caesura.io_struct import CaesuraError, GenerateReqInput, GenerateReqOutput, SamplingParams
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.scheduling.speculation import Speculation, StepTimes, Texts

needs_kernels = pytest.mark.skipif(
    best("linear", "cpu", torch.float32) == TORCH, reason="no compiled kernels on this machine"
)


@pytest.fixture(scope="module", autouse=True)
def always() -> Iterator[None]:
    """Draft all that is found, whatever a step takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_best_count", lambda self, rows, chances: len(chances))
        yield


@pytest.fixture(scope="module")
def drivers(tiny_model: Path) -> Iterator[list[EngineDriver]]:
    """Return an engine without speculation and one with it."""
    options: dict[str, Any] = {"scripted": False, "deterministic": True, "kv_pool_tokens": 512}
    with (
        EngineDriver(str(tiny_model), max_running_requests=12, **options) as plain,
        EngineDriver(str(tiny_model), max_running_requests=12, speculation="suffix", **options) as drafting,
    ):
        yield [plain, drafting]


def of(result: GenerateReqOutput) -> tuple[Any, ...]:
    """Return all of a result but its times and counters."""
    spans = [(span.start, span.end, span.epoch, span.stale_kv) for span in result.weight_versions]
    floats = result.output_logprobs, result.raw_logprobs, result.sampled_logprobs
    rows = result.output_top_logprobs, result.output_token_ids_logprobs, result.sampling_mask
    return tokens_of(result), floats, rows, result.finish_reason, spans


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 70),
    n=st.integers(1, 4),
    seed=st.integers(0, 2),
    temperature=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_new_tokens=st.just(0),
    stop_token_ids=st.lists(st.integers(3, 96), max_size=2),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.05]),
    bad_words_ids=st.sampled_from([None, None, [[9, 12], [3, 4, 5]]]),
    ignore_eos=st.booleans(),
)
ASKS = st.builds(
    GenerateReqInput,
    input_ids=st.builds(prompt_of, st.sampled_from([5, 16, 33]), st.integers(0, 1)),
    sampling_params=PARAMS,
    return_logprob=st.just(True),
    return_raw_logprob=st.booleans(),
    return_sampled_logprob=st.booleans(),
    return_sampling_mask=st.booleans(),
    top_logprobs_num=st.integers(0, 2),
    stream=st.booleans(),
)
PAUSES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["in_place", "retract"])), max_size=3)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asks=st.lists(ASKS, min_size=1, max_size=4), pauses=PAUSES)
def test_results_are_those_without_drafts(
    drivers: list[EngineDriver], asks: list[GenerateReqInput], pauses: list[tuple[int, Any]]
) -> None:
    found = []
    for driver in drivers:
        rids = [driver.generate(**fields(ask)) for ask in asks]
        for ticks, mode in pauses:
            driver.tick(ticks)
            ok(driver.pause(mode))
            ok(driver.go_on())
        driver.run_until_idle()
        counts = [ask.sampling_params.n for ask in asks]
        found.append(
            [of(driver.result(rid, i)) for rid, n in zip(rids, counts, strict=True) for i in range(n)]
        )
    assert found[0] == found[1]


def fields(ask: GenerateReqInput) -> dict[str, Any]:
    names = (
        "sampling_params", "return_logprob", "return_raw_logprob", "return_sampled_logprob",
        "return_sampling_mask", "top_logprobs_num", "stream",
    )  # fmt: skip
    return {"prompt": ask.input_ids, **{name: getattr(ask, name) for name in names}}


def test_a_repeating_text_takes_few_steps(drivers: list[EngineDriver]) -> None:
    steps = []
    for driver in drivers:
        before = driver.status().step
        result = driver.complete(prompt_of(12), 64)
        steps.append(driver.status().step - before)
    assert result.accepted_tokens == 64 - steps[1]
    assert steps[1] < steps[0] / 2


@pytest.mark.parametrize("depth", [0])
def test_no_sequence_of_commands_breaks_drafts(tiny_model, other_model, depth):
    run_state_machine_as_test(
        partial(EngineMachine, str(tiny_model), str(other_model), depth, speculation="suffix"),
        settings=settings(
            max_examples=examples(30),
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
