"""Outputs that fit a grammar, whatever happens to their samples on the way."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from support.faults import NO_MEMORY, Fault
from support.http_serve import make_text_model
from support.scripted import EngineDriver, compile_grammars_at_once, ok, prompt_of, tokens_of
from support.signals import blocked
from tokenizers import Tokenizer

from caesura.client import grammar
from caesura.io_struct import ErrorCode, ErrorReply, GenerateReqOutput, SamplingParams
from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.scheduling import grammars as engine_grammar

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "bb", None]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ \n]{1,2}"},
}
PATTERN = r"[a-c]{2,6}(\d{1,3};)? é"
WORDS = ["yes", "no", "nowhere", "日本"]
EBNF = 'root ::= item ("," item){1,4}\nitem ::= "(" [0-9] ")" | "x"'
TEXTS = {
    "json": grammar.json_schema(SCHEMA),
    "regex": grammar.regex(PATTERN),
    "choice": grammar.choice(WORDS),
    "ebnf": EBNF,
}
PLAIN = {"return_logprob": True, "return_raw_logprob": True, "return_sampled_logprob": True}
deterministic = best("linear", "cpu", torch.float32) != TORCH


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        found = json.loads(text)
        return (
            list(found) == ["name", "kind", "numbers"]
            and len(found["name"]) <= 5
            and found["kind"] in ("a", "bb", None)
            and len(found["numbers"]) <= 3
            and all(isinstance(each, int) and -9 <= each <= 99 for each in found["numbers"])
        )
    if kind == "choice":
        return text in WORDS
    return re.fullmatch(PATTERN if kind == "regex" else r"(\(\d\)|x)(,(\(\d\)|x)){1,4}", text) is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture
def in_threads() -> None:
    """Compile in threads, as an engine does."""


@pytest.fixture(autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "in_threads" not in request.fixturenames:
        compile_grammars_at_once(monkeypatch)


def engine(model: Path, **options: Any) -> EngineDriver:
    return EngineDriver(str(model), scripted=False, deterministic=deterministic, **options)


def asked(kind: str | None, seed: int, **fields: Any) -> SamplingParams:
    text = None if kind is None else TEXTS[kind]
    return SamplingParams(**{"max_new_tokens": 80, "seed": seed, "grammar": text, **fields})


def outcome(driver: EngineDriver, rid: str) -> dict[str, Any]:
    """Return what must not depend on what happened to a sample."""
    names = (
        "output_ids",
        "output_logprobs",
        "raw_logprobs",
        "sampled_logprobs",
        "sampling_mask",
        "finish_reason",
    )
    result = driver.result(rid)
    return {name: getattr(result, name) for name in names}


WORK = [(kind, seed) for seed in range(3) for kind in (*TEXTS, None)]


def start(driver: EngineDriver, **fields: Any) -> list[str]:
    return [
        driver.generate(
            prompt_of(5 + 3 * number, seed),
            sampling_params=asked(kind, seed, top_p=0.9 if number % 2 else 1.0, **fields),
            return_sampling_mask=bool(number % 2),
            **PLAIN,
        )
        for number, (kind, seed) in enumerate(WORK)
    ]


@pytest.fixture(scope="module")
def expected(model) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched, engine(model) as driver:
        compile_grammars_at_once(patched)
        rids = start(driver)
        driver.run_until_idle()
        return [outcome(driver, rid) for rid in rids]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
def test_every_output_fits(model, tokenizer, depth, temperature):
    with engine(model, pipeline_depth=depth) as driver:
        sent = {
            driver.generate(
                prompt_of(7, seed), sampling_params=asked(kind, seed, temperature=temperature, n=3)
            ): kind
            for kind in TEXTS
            for seed in range(4)
        }
        driver.run_until_idle()
        for rid, kind in sent.items():
            for index in range(3):
                result = driver.result(rid, index)
                text = tokenizer.decode(tokens_of(result))
                assert (result.finish_reason.type, result.finish_reason.matched) == ("stop", EOS)
                assert fits(kind, text), text
        status = driver.status().grammars
        assert (status.compiled, status.failed, status.waiting) == (len(TEXTS), 0, 0)
        assert status.masks > 0


def test_alone_and_beside_others(model, expected):
    with engine(model) as driver:
        for number in (0, 1, 4, 9):
            rids = start(driver)
            others = [rid for at, rid in enumerate(rids) if at != number]
            driver.abort(others)
            driver.run_until_idle()
            assert outcome(driver, rids[number]) == expected[number]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pauses_and_lost_steps_change_nothing(model, depth, expected, mode):
    with engine(model, pipeline_depth=depth, chunked_prefill_size=16) as driver:
        rids = start(driver)
        with Fault(driver.engine.runner, "execute", NO_MEMORY[0], {3, 9}, after=True):
            for ticks in (1, 2, 3, 5, 8):
                driver.tick(ticks)
                driver.pause(mode)
                driver.go_on(torch_empty_cache=False)
            driver.run_until_idle()
        assert [outcome(driver, rid) for rid in rids] == expected


def test_preemption_changes_nothing(model, depth, expected):
    with engine(model, pipeline_depth=depth, kv_pool_tokens=128) as driver:
        rids = start(driver)
        driver.run_until_idle()
        assert driver.status().num_retractions > 0
        assert [outcome(driver, rid) for rid in rids] == expected


def test_an_update_goes_on_in_the_grammar(model, expected):
    with engine(model) as driver:
        rids = start(driver)
        driver.tick(4)
        ok(driver.update(model))
        driver.run_until_idle()
        assert [outcome(driver, rid)["output_ids"] for rid in rids] == [
            each["output_ids"] for each in expected
        ]


def test_replays_have_the_numbers_of_their_samples(model, depth, expected):
    with engine(model, pipeline_depth=depth, chunked_prefill_size=16) as driver:
        rids = [
            driver.generate(
                prompt_of(5 + 3 * number, seed),
                sampling_params=asked(
                    kind,
                    99,
                    top_p=0.9 if number % 2 else 1.0,
                    forced_output_ids=np.frombuffer(expected[number]["output_ids"], "<i4").tolist(),
                ),
                return_sampling_mask=bool(number % 2),
                **PLAIN,
            )
            for number, (kind, seed) in enumerate(WORK)
        ]
        driver.run_until_idle()
        assert [outcome(driver, rid) for rid in rids] == expected


def test_a_replayed_token_that_does_not_fit_is_told(model, tokenizer):
    ids = tokenizer.encode("nope").ids
    with engine(model) as driver:
        rid = driver.generate(
            prompt_of(5), sampling_params=asked("choice", 0, forced_output_ids=ids), **PLAIN
        )
        driver.run_until_idle()
        result = driver.result(rid)
    sampled, plain = (
        np.frombuffer(each, "<f4") for each in (result.sampled_logprobs, result.output_logprobs)
    )
    assert np.isfinite(plain).all()
    lost = int(np.flatnonzero(np.isneginf(sampled))[0])
    assert tokenizer.decode(ids[: lost + 1]).startswith("no")
    np.testing.assert_allclose(sampled[lost + 1 :], plain[lost + 1 :], atol=1e-6)


def test_a_continued_part_goes_on_in_the_grammar(model, expected):
    with engine(model) as driver:
        for number in (0, 5):
            kind, seed = WORK[number]
            ids = np.frombuffer(expected[number]["output_ids"], "<i4").tolist()
            half = len(ids) // 2
            rid = driver.generate(
                prompt_of(5 + 3 * number, seed) + ids[:half],
                sampling_params=asked(kind, seed, top_p=0.9 if number % 2 else 1.0),
                continued_tokens=half,
            )
            driver.run_until_idle()
            assert tokens_of(driver.result(rid)) == ids[half:]


@pytest.mark.slow  # its workers take seconds to start
def test_samples_of_two_ranks_fit_and_say_what_was_kept(model, tokenizer):
    """Rank 0 follows the grammars, and its masks go to all ranks with the step."""
    allowed = LLTokenizer(str(model / "tokenizer.json"), eos_token=[EOS])
    with engine(model, tp=2) as driver:
        sent = {
            kind: driver.generate(
                prompt_of(7), sampling_params=asked(kind, 5, n=3, top_p=0.95), return_sampling_mask=True
            )
            for kind in ("json", "regex", "choice")
        }
        for mode in ("retract", "in_place"):
            driver.tick(3)
            driver.pause(mode)
            driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        for kind, rid in sent.items():
            for index in range(3):
                result, tokens = driver.result(rid, index), tokens_of(driver.result(rid, index))
                assert fits(kind, tokenizer.decode(tokens))
                matcher = LLMatcher(allowed, TEXTS[kind], log_level=0)
                for at, token in enumerate(tokens):
                    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                    fit = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
                    kept = set(result.sampling_mask.at(at))
                    assert token in kept
                    assert kept <= fit | {EOS}, "a filter on top of the grammar"
                    assert token == EOS or matcher.consume_token(token)


# -- where samples end ---------------------------------------------------------------------------------------


def finished(driver: EngineDriver, params: SamplingParams, **fields: Any) -> GenerateReqOutput:
    rid = driver.generate(prompt_of(5), sampling_params=params, **fields)
    driver.run_until_idle()
    return driver.result(rid)


def test_a_complete_grammar_ends_without_a_stop_token(model, tokenizer, depth):
    with engine(model, pipeline_depth=depth) as driver:
        for fields in ({"ignore_eos": True}, {"min_new_tokens": 50}):
            result = finished(driver, asked("choice", 3, **fields))
            assert (result.finish_reason.type, result.finish_reason.matched) == ("stop", None)
            assert tokenizer.decode(tokens_of(result)) in WORDS


def test_stop_tokens_wait_until_the_grammar_may_end(model, tokenizer):
    [stop] = tokenizer.encode("x").ids
    with engine(model) as driver:
        for seed in range(5):
            params = asked("choice", seed, stop_token_ids=[stop], logit_bias={stop: 100.0}, ignore_eos=True)
            result = finished(driver, params)
            assert result.finish_reason.matched == stop
            assert tokenizer.decode(tokens_of(result)[:-1]) in WORDS


def test_an_empty_output_is_complete_at_once(model):
    with engine(model) as driver:
        result = finished(driver, asked(None, 0, ignore_eos=True, grammar='start: ""'))
        assert (result.finish_reason.type, tokens_of(result)) == ("stop", [])


def test_edits_that_leave_nothing_end_with_an_error(model, tokenizer):
    [other] = tokenizer.encode("x").ids
    with engine(model) as driver:
        result = finished(driver, asked("choice", 0, allowed_token_ids=[other]))
        assert result.finish_reason.type == "error"
        assert "no token that the grammar allows" in result.finish_reason.message
        result = finished(driver, asked("choice", 0), continued_tokens=3)
        assert (result.finish_reason.type, result.finish_reason.code) == ("error", ErrorCode.INVALID_REQUEST)


# -- grammars that cannot be used ----------------------------------------------------------------------------

BAD = {
    "unknown rule": "start: nowhere",
    "lark": "start: (((",
    "json": '{"grammars": [',
    "regex": grammar.regex("(a"),
    "look-around": grammar.regex("(?<=a)b"),
    "keyword": grammar.json_schema({"type": "string", "contentMediaType": "x", "not": {"const": "a"}}),
    "reference": grammar.json_schema({"$ref": "http://127.0.0.1:1/schema.json"}),
    "unsatisfiable": grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}),
    "exponential": grammar.regex("(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    "tokens": "start: <|no_such_token|>",
}


def test_a_bad_grammar_ends_its_request_alone(model, tokenizer):
    with engine(model) as driver:
        rids = {
            name: driver.generate(prompt_of(5), sampling_params=asked(None, 0, grammar=text))
            for name, text in BAD.items()
        }
        good = driver.generate(prompt_of(5), sampling_params=asked("choice", 0))
        driver.run_until_idle()
        for name, rid in rids.items():
            reason = driver.result(rid).finish_reason
            assert (name, reason.type, reason.code) == (name, "error", ErrorCode.INVALID_REQUEST), reason
            assert len(reason.message) < 600
        assert tokenizer.decode(tokens_of(driver.result(good))) in WORDS
        status = driver.status().grammars
        assert status.compiled + status.failed == len(BAD) + 1


@pytest.mark.parametrize("text", ["", "x" * (1 << 20), "start: " + 500 * "(" + '"a"' + 500 * ")"])
def test_sizes_are_refused_at_once(model, text):
    with engine(model) as driver:
        rid = driver.generate(prompt_of(5), sampling_params=asked(None, 0, grammar=text))
        driver.tick()
        reply = driver.replies.pop(rid)
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.detail["field"]) == (ErrorCode.INVALID_REQUEST, "sampling_params.grammar")


def test_what_is_missing_is_named(tiny_model, model, monkeypatch):
    with engine(tiny_model) as driver:
        rid = driver.generate(prompt_of(5), sampling_params=asked("choice", 0))
        driver.tick()
        assert "tokenizer.json" in driver.replies.pop(rid).message
        monkeypatch.setattr(engine_grammar.importlib.util, "find_spec", lambda name: None)
        rid = driver.generate(prompt_of(5), sampling_params=asked("choice", 1))
        driver.tick()
        reply = driver.replies.pop(rid)
        assert (reply.code, "caesura[grammar]" in reply.message) == (ErrorCode.UNSUPPORTED, True)


def test_a_small_grammar_passes_slow_ones(model, monkeypatch):
    small, *long = sorted(("json", "choice", "regex"), key=lambda kind: len(TEXTS[kind]))
    work = []
    monkeypatch.setattr(engine_grammar, "in_deep_thread", work.append)
    monkeypatch.setattr(engine_grammar, "SMALL", len(TEXTS[small]))
    with engine(model) as driver:
        slow = [driver.generate(prompt_of(5), sampling_params=asked(kind, 0)) for kind in long]
        driver.tick(3)
        assert len(work) == engine_grammar.THREADS
        third = driver.generate(prompt_of(5), sampling_params=asked(small, 0))
        driver.tick(3)
        work.pop()()
        driver.tick(100)
        assert driver.result(third).finish_reason.type == "stop"
        assert driver.status().grammars.waiting == len(slow)
        for waiting in work:
            waiting()
        driver.tick(100)
        assert not driver.engine.live


def test_others_go_on_while_a_grammar_is_compiled(model, monkeypatch):
    work = []
    monkeypatch.setattr(engine_grammar, "in_deep_thread", work.append)
    monkeypatch.setattr(engine_grammar, "SMALL", 0)
    with engine(model) as driver:
        slow = [
            driver.generate(prompt_of(5), sampling_params=asked(kind, 0))
            for kind in sorted(("json", "choice", "regex"), key=lambda kind: len(TEXTS[kind]))
        ]
        other = driver.generate(prompt_of(5), sampling_params=asked(None, 0, max_new_tokens=4))
        gone = driver.generate(prompt_of(5), sampling_params=asked("json", 1))
        driver.tick(12)
        assert driver.result(other).finish_reason.type == "length"
        assert len(work) == engine_grammar.THREADS
        assert driver.status().grammars.waiting == 4
        assert driver.sleep_s() != 0, "nothing can start"
        driver.abort(gone)
        work.pop(0)()
        driver.tick(100)
        assert driver.result(slow[0]).finish_reason.type == "stop"
        for waiting in work:
            waiting()
        driver.tick(100)
        assert len(work) == 2, "the third had a thread when the first was done"
        assert not driver.engine.live


def test_a_grammar_that_takes_too_long_ends_alone(model, tokenizer, monkeypatch):
    monkeypatch.setattr(engine_grammar, "COMPILE_CPU_S", 1)
    many = {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(10_000)}}
    with engine(model) as driver, blocked(signal.SIGXCPU):
        slow = finished(driver, asked(None, 0, grammar=grammar.json_schema(many)))
        assert slow.finish_reason.code == ErrorCode.INVALID_REQUEST
        assert "takes more than 1 s of CPU time" in slow.finish_reason.message
        assert tokenizer.decode(tokens_of(finished(driver, asked("choice", 0)))) in WORDS


def test_a_grammar_that_would_end_the_process_does_not(model, tokenizer, monkeypatch):
    """Whatever the library does to its process, the engine goes on."""
    with engine(model) as driver:
        with monkeypatch.context() as patch:
            patch.setattr(engine_grammar, "COMPILE_BYTES", 1 << 20)
            killed = finished(driver, asked("json", 0))
        assert "ends the process that compiles it" in killed.finish_reason.message
        assert tokenizer.decode(tokens_of(finished(driver, asked("choice", 0)))) in WORDS


@pytest.mark.usefixtures("in_threads")
def test_long_chains_of_rules_compile_in_a_deep_stack(model):
    chain = "".join(f"r{at}: r{at + 1}\n" for at in range(9000))
    params = asked(None, 0, grammar=f'start: r0\n{chain}r9000: "a"')
    with engine(model) as driver:
        rid = driver.generate(prompt_of(5), sampling_params=params)
        driver.tick()
        while driver.engine.live:
            driver.tick()
        assert driver.result(rid).finish_reason.type == "stop"
