"""Drafts: results are those without, bit for bit, whatever happens meanwhile, and drafts are accepted."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from loop.test_stateful import EngineMachine
from support.drafting import draft_all
from support.properties import examples
from support.scripted import EngineDriver, ok, prompt_of, tokens_of

from caesura.io_struct import CaesuraError, GenerateReqInput, GenerateReqOutput, SamplingParams
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.scheduling import speculation
from caesura.scheduler.scheduling.speculation import PROMPT_TOKENS, Continuation, Followed, Texts

needs_kernels = pytest.mark.skipif(
    best("linear", "cpu", torch.float32) == TORCH, reason="no compiled kernels on this machine"
)


@pytest.fixture(scope="module", autouse=True)
def always() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        draft_all(patch)
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


@needs_kernels
@settings(max_examples=examples(40))
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


@needs_kernels
def test_samples_of_a_group_draft_from_each_other(drivers: list[EngineDriver]) -> None:
    plain, drafting = drivers
    prompt = prompt_of(20, 5)  # a prompt that no other test has
    params = SamplingParams(max_new_tokens=24, seed=3, temperature=0.8, ignore_eos=True)
    first = plain.complete(prompt, sampling_params=params, return_logprob=True)
    before = [drafting.complete(prompt, sampling_params=params, return_logprob=True) for _ in range(2)]
    assert [of(each) for each in before] == [of(first)] * 2
    assert before[1].accepted_tokens > max(before[0].accepted_tokens, 12)


@needs_kernels
def test_two_ranks_draft_as_one(tiny_model: Path) -> None:
    found = []
    for way in ("none", "suffix"):
        with EngineDriver(str(tiny_model), scripted=False, tp=2, speculation=way) as driver:
            found.append(driver.complete(prompt_of(12), 48, return_logprob=True))
    assert of(found[0]) == of(found[1])
    assert found[1].accepted_tokens > 12


def test_what_a_draft_cannot_carry_is_decoded_alone(drivers: list[EngineDriver]) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.0, frequency_penalty=0.001, ignore_eos=True)
    assert drivers[1].complete(prompt_of(12), sampling_params=params).drafted_tokens == 0


def test_impossible_options_are_refused(tiny_model: Path, hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").touch()
    with pytest.raises(CaesuraError, match="speculation = 'suffix' is for language models"):
        EngineConfig(model_path=str(tmp_path), speculation="suffix")
    with pytest.raises(CaesuraError, match="pipeline_depth = 1 must be 0 with speculation"):
        EngineConfig(model_path=str(tiny_model), speculation="suffix", pipeline_depth=1)
    with pytest.raises(CaesuraError, match="layers keep a state"):
        EngineDriver(str(hybrid), scripted=False, speculation="suffix")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.checkpoints import make_checkpoint

    path = tmp_path_factory.mktemp("models") / "hybrid"
    make_checkpoint(path, "qwen3.5")
    return path


def test_texts_of_prompts_not_used_lately_are_forgotten() -> None:
    texts = Texts(most=24 + 2 * PROMPT_TOKENS)
    for key in (1, 2):
        texts.add(key, "", np.arange(8, dtype=np.int32))
    texts.of(1)
    texts.add(3, "", np.arange(8, dtype=np.int32))
    assert texts.of(1).tolist() == [-1, *range(8), -1]
    assert texts.of(2).tolist() == [-1]
    assert texts.num_tokens == 20 + 2 * PROMPT_TOKENS


def test_texts_hold_no_more_than_they_count() -> None:
    texts = Texts()
    texts.add(1, "", np.arange(speculation._TEXT_TOKENS + 1000, dtype=np.int32))
    assert (len(texts.of(1)), texts.of(1).base) == (speculation._TEXT_TOKENS, None)


def test_recent_texts_are_of_one_salt_and_bounded() -> None:
    texts = Texts(most_recent=12)
    for key, salt in enumerate(("a", "b", "a")):
        texts.add(key, salt, np.arange(4 * key, 4 * key + 4, dtype=np.int32))
    assert texts.recent("a").tolist() == [-1, *range(8, 12), -1], "the first was forgotten"
    assert texts.recent("b").tolist() == [-1, *range(4, 8), -1]
    assert texts.recent("c").tolist() == [-1]
    texts.add(3, "c", np.arange(100, dtype=np.int32))
    assert texts.recent("c").tolist() == [-1, *range(88, 100), -1]
    assert texts.recent("a").tolist() == [-1]


def test_a_continuation_lasts_as_far_as_it_foretold() -> None:
    tokens = [Followed(token, 2, 2) for token in range(4, 10)]
    found = Continuation(3, 2, False, tokens)
    behind = found.behind(np.array([1, 2, 3, 4, 5, 6]))
    assert behind == Continuation(6, 5, False, tokens[3:])
    assert found.behind(np.array([1, 2, 3, 4, 9])) is None
    assert found.behind(np.array([1, 2, 3, 4, 5, 6, 7])) is None, "less than half is left"
    assert found.behind(np.array([1, 2])) is None


def test_no_sequence_of_commands_breaks_drafts(tiny_model: Path, other_model: Path) -> None:
    run_state_machine_as_test(
        partial(EngineMachine, str(tiny_model), str(other_model), 0, speculation="suffix"),
        settings=settings(
            max_examples=examples(20),
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
