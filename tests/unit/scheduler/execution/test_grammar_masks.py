"""Rows with a grammar against their definition: llguidance's own mask on the logits, in plain torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.edited_logits import bound, logits_of
from support.properties import examples
from support.tokenizers import make_byte_level

from caesura.client import grammar
from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.execution.logit_edits import SpecialSampler, _unpacked
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.scheduling.grammars import Grammars, GrammarState, deepest
from caesura.scheduler.scheduling.sampling import sampling_batch

VOCAB, EOS = 401, 1
TEXTS = [
    grammar.json_schema({"type": "array", "items": {"type": "string"}}),
    grammar.regex(r"[a-z ]{1,30}\."),
    grammar.choice(["The caesura", "The line", "日本"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_byte_level(tmp_path_factory.mktemp("text"), vocab_size=400)


@pytest.fixture(scope="module")
def tokenizer(folder) -> LLTokenizer:
    return LLTokenizer(str(folder / "tokenizer.json"), n_vocab=VOCAB, eos_token=[EOS])


def allowed(tokenizer: LLTokenizer, text: str, tokens: list[int]) -> torch.Tensor:
    matcher = LLMatcher(tokenizer, text)
    assert matcher.consume_tokens(tokens) or not tokens
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:VOCAB].astype(bool))


@settings(max_examples=examples(30))
@given(data=st.data())
def test_rows_are_sampled_by_their_definition(folder, tokenizer, data):
    grammars = Grammars(str(folder), VOCAB, (EOS,), wake=lambda: None, finish=lambda *_: None)
    rows = data.draw(st.lists(st.none() | st.sampled_from(TEXTS), min_size=1, max_size=4), label="grammars")
    fields: list[dict[str, Any]] = [
        {
            "temperature": data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            "top_k": data.draw(st.sampled_from([-1, 3, 20])),
            "top_p": data.draw(st.sampled_from([1.0, 0.6])),
        }
        for _ in rows
    ]
    sent = [
        GenerateReqInput(
            input_ids=[5, 6],
            sampling_params=SamplingParams(grammar=text, seed=n, max_new_tokens=40, **each),
            return_logprob=True,
            return_sampled_logprob=True,
            return_sampling_mask=data.draw(st.booleans()),
            top_logprobs_num=3,
        )
        for n, (text, each) in enumerate(zip(rows, fields, strict=True))
    ]
    table, requests = bound(sent, VOCAB, (EOS,))
    for request, text in zip(requests, rows, strict=True):
        if text is not None:
            request.grammar = GrammarState(grammars, text, request.stop_ids, forced=False)
            request.grammar.compiled = grammars._compile(text)
        table.sampling.bind(request.slot, request)
    ordinary = Sampler(VOCAB, 4, "cpu", torch.float32)
    sampler = SpecialSampler(ordinary, VOCAB, torch.device("cpu"))
    sampler.chunk_rows = 2
    outputs: list[list[int]] = [[] for _ in rows]
    slots = np.asarray([request.slot for request in requests])
    for step in range(data.draw(st.integers(1, 6), label="steps")):
        logits = torch.tensor(np.stack([logits_of(n, step, vocab_size=VOCAB) for n in range(len(rows))]))
        batch = sampling_batch(table, slots, np.full(len(rows), 2 + step))
        assert batch.special is not None
        out = sampler.sample(logits, batch, batch.special)
        assert out.sampled_logprobs is not None
        for n, (text, each) in enumerate(zip(rows, fields, strict=True)):
            temperature, token = each["temperature"] or 1.0, int(out.token_ids[n])
            scaled = logits[n].double() / temperature
            plain = torch.log_softmax(scaled, 0)
            mask = (
                torch.ones(VOCAB, dtype=torch.bool) if text is None else allowed(tokenizer, text, outputs[n])
            )
            assert mask[token]
            assert float(out.logprobs[n]) == pytest.approx(float(plain[token]), abs=1e-4)
            assert out.further is not None
            np.testing.assert_allclose(out.further.top[n][:3], plain.topk(3).values, atol=1e-4)
            kept = filtered(scaled.where(mask, -torch.inf), each)
            if each["temperature"] == 0.0:
                assert token == int(scaled.where(mask, -torch.inf).argmax())
            else:
                assert kept[token] > -torch.inf
                ours = float(out.sampled_logprobs[n])
                assert ours == pytest.approx(float(torch.log_softmax(kept, 0)[token]), abs=1e-4)
                if sent[n].return_sampling_mask:
                    assert out.further.kept is not None
                    assert torch.equal(out.further.kept[n], kept > -torch.inf)
            outputs[n].append(token)
            table.tokens[slots[n], 2 + step] = token
            table.length[slots[n]] += 1
        if any(outputs[n][-1] == EOS for n in range(len(rows))):
            return


def filtered(scaled: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    order = scaled.argsort(descending=True, stable=True)
    if fields["top_k"] > 0:
        order = order[: fields["top_k"]]
    order = order[scaled[order] > -torch.inf]
    probabilities = torch.softmax(scaled[order], 0)
    before = probabilities.cumsum(0) - probabilities
    kept = order[before < fields["top_p"]] if fields["top_p"] < 1.0 else order
    return torch.full_like(scaled, -torch.inf).scatter(0, kept, scaled[kept])


@pytest.mark.parametrize("count", [1, 31, 32, 33, 401])
def test_bits_are_unpacked_lowest_first(count):
    words = torch.randint(-(2**31), 2**31 - 1, (3, -(-count // 32)), dtype=torch.int32)
    expected = [[bool(row[at // 32] >> (at % 32) & 1) for at in range(count)] for row in words.tolist()]
    assert _unpacked(words, count).tolist() == expected


@pytest.mark.parametrize(
    ("text", "depth"), [("", 0), ("a", 0), ("([{}])", 3), (")))((", 2), ("()" * 9, 1), ("}{{}", 2)]
)
def test_depth_of_brackets(text, depth):
    assert deepest(text) == depth
