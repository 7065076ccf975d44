"""Texts to draft from, given by name: they are found, bounded, and stay until they are removed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import draft_all
from support.scripted import EngineDriver, assert_error, ok, prompt_of, tokens_of

from caesura.io_struct import (
    AddCorpusReqInput,
    CaesuraError,
    GenerateReqOutput,
    ListCorporaReqInput,
    RemoveCorpusReqInput,
    SamplingParams,
)
from caesura.scheduler.scheduling import speculation
from caesura.scheduler.scheduling.corpora import END, Corpora
from caesura.scheduler.scheduling.speculation import Speculation


@pytest.fixture(scope="module")
def driver(tiny_model: Path) -> Iterator[EngineDriver]:
    """Return an engine that drafts all that it finds, of corpora alone."""
    with pytest.MonkeyPatch.context() as patch:
        draft_all(patch)
        patch.setattr(speculation, "_MOST_DRAFTING", float("inf"))
        patch.setattr(Speculation, "ended", lambda self, request: None)
        with EngineDriver(str(tiny_model), scripted=False, speculation="suffix") as driver:
            yield driver


def completed(driver: EngineDriver) -> GenerateReqOutput:
    hot = SamplingParams(max_new_tokens=40, temperature=5.0, seed=3, ignore_eos=True)  # repeats itself little
    return driver.complete(prompt_of(12, 5), sampling_params=hot, return_logprob=True)


def corpora_of(driver: EngineDriver) -> dict[str, int]:
    return ok(driver.call(ListCorporaReqInput())).corpora


def test_a_corpus_is_drafted_from_until_removed(driver, tiny_model, other_model):
    before = completed(driver)
    text = [*prompt_of(12, 5)[-2:], *tokens_of(before)]
    added = AddCorpusReqInput(name="answers", token_ids=[[7, 8, 9], text])
    assert ok(driver.call(added)).num_tokens == len(text) + 3
    assert ok(driver.call(added)).num_tokens == len(text) + 3, "a retry adds nothing"
    within = completed(driver)
    assert (within.output_ids, within.output_logprobs) == (before.output_ids, before.output_logprobs)
    assert within.accepted_tokens > before.accepted_tokens + 20
    driver.update(other_model)
    driver.pause("retract")
    driver.update(tiny_model)
    driver.go_on()
    assert completed(driver).accepted_tokens > before.accepted_tokens + 20
    assert corpora_of(driver) == {"answers": len(text) + 3}
    assert ok(driver.call(RemoveCorpusReqInput(name="answers"))).num_tokens == len(text) + 3
    assert completed(driver).accepted_tokens < within.accepted_tokens - 20
    assert corpora_of(driver) == {}


def test_corpora_that_do_not_fit_are_refused(driver):
    ok(driver.call(AddCorpusReqInput(name="a", token_ids=[[5, 6]])))
    for name, token_ids, said in (
        ("a", [[7]], "remove it first"),
        ("b", [[5, 97]], "the vocabulary ends at 96"),
        ("b", [[], []], "there must be some"),
    ):
        error = assert_error(
            driver.call(AddCorpusReqInput(name=name, token_ids=token_ids)), "invalid_request"
        )
        assert said in error.message
    error = assert_error(driver.call(RemoveCorpusReqInput(name="b")), "invalid_request")
    assert error.message == "there is no corpus 'b', but 'a'"
    assert corpora_of(driver) == {"a": 2}
    ok(driver.call(RemoveCorpusReqInput(name="a")))


def test_an_engine_without_drafts_has_no_corpora(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        error = assert_error(driver.call(ListCorporaReqInput()), "unsupported")
    assert "speculation = 'suffix'" in error.message


def test_all_corpora_share_their_bounds():
    corpora = Corpora(97, most=2, most_tokens=10)
    with pytest.raises(CaesuraError, match="10 more"):
        corpora.add("a", [[5] * 10])
    corpora.add("a", [[5] * 5])
    with pytest.raises(CaesuraError, match="5 more"):
        corpora.add("b", [[5, 6], [7, 8]])
    corpora.add("b", [[5, 6]])
    with pytest.raises(CaesuraError, match="2 corpora"):
        corpora.add("c", [[5]])
    corpora.remove("a")
    assert corpora.add("c", [[5] * 6]) == 6


TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=4)


@given(
    corpora=st.lists(TEXTS, max_size=3),
    known=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    many=st.sampled_from([0, 2, 256]),
)
def test_the_longest_match_is_found_everywhere(corpora, known, many):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caesura.scheduler.scheduling.corpora._MANY", many)
        find_the_longest_match(corpora, known)


def find_the_longest_match(corpora: list[list[list[int]]], known: list[int]) -> None:
    held, expected = Corpora(4), set()
    for name, texts in enumerate(corpora):
        if any(texts):
            held.add(str(name), texts)
            expected |= {(m, tuple(rest)) for text in texts for m, rest in matches(text, known)}
    longest = max((length for length, _ in expected), default=0)
    tokens, ends, length = held.longest(np.asarray(known))
    assert length == longest
    found = {tuple(tokens[end:][: int((tokens[end:] == END).argmax())].tolist()) for end in ends.tolist()}
    assert found <= {rest for length, rest in expected if length == longest}
    assert bool(found) == bool(expected)


def matches(text: list[int], known: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield the length, 2 to 8 tokens, and the rest of ``text`` for each place of an end of ``known``."""
    for end in range(2, len(text)):
        length = next(
            (n for n in range(min(8, end, len(known)), 1, -1) if text[end - n : end] == known[-n:]), 0
        )
        if length:
            yield length, text[end:]
