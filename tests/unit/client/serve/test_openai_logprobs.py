"""Tokens as text, bytes and offsets, for byte-level and SentencePiece vocabularies."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import make_byte_level, make_sentencepiece

from caesura.client.serve.openai.logprobs import (
    LOWEST,
    Offsets,
    TokenText,
    chat_logprobs,
    completion_logprobs,
)
from caesura.client.text.tokenizer import TextTokenizer

TEXTS = st.text(st.sampled_from("aeT .\n你é猫🎉👍🏽\u0301{}")) | st.text(max_size=20)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, TextTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte-level": TextTokenizer.from_folder(make_byte_level(folder / "bytes")),
        "sentencepiece": TextTokenizer.from_folder(make_sentencepiece(folder / "pieces")),
    }


@given(text=TEXTS)
def test_bytes_of_tokens_join_to_the_text(tokenizers, text):
    for kind, tokenizer in tokenizers.items():
        tokens = TokenText(tokenizer)
        ids = [id for id in tokenizer.encode(text) if id not in tokenizer.skipped]
        data = b"".join(tokens.data(id) for id in ids)
        expected = tokenizer.decode(ids, skip_special_tokens=False).encode()
        assert data == (b" " + expected if kind == "sentencepiece" and ids else expected)


def test_special_added_and_unknown_tokens(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = TokenText(tokenizer)
    [start] = tokenizer.encode("<s>")
    [think] = tokenizer.encode("<think>")
    assert (tokens.text(start), tokens.data(start)) == ("<s>", b"<s>")
    assert tokens.data(think) == b"<think>"
    assert (tokens.text(100_000), tokens.data(100_000)) == ("", b"")
    assert start in tokens.skipped
    assert think not in tokens.skipped


def test_half_a_character_is_written_as_such(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = TokenText(tokenizer)
    ids = tokenizer.encode("🦉")
    assert len(ids) > 1
    assert b"".join(map(tokens.data, ids)).decode() == "🦉"
    assert all("\N{REPLACEMENT CHARACTER}" in tokens.text(id) for id in ids)


def test_tokens_as_ids_keep_their_bytes(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = TokenText(tokenizer, as_ids=True)
    [id] = tokenizer.encode("a")
    assert (tokens.text(id), tokens.data(id)) == (f"token_id:{id}", b"a")
    without = TokenText(None)
    assert (without.text(id), without.data(id)) == (f"token_id:{id}", b"")


@given(text=TEXTS)
def test_offsets_count_whole_characters(tokenizers, text):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode(text)
    offsets = Offsets(TokenText(tokenizer), skip_special_tokens=False)
    found = [offsets.advance(id) for id in ids]
    for count, offset in enumerate(found):
        before = tokenizer.decode(ids[:count], skip_special_tokens=False)
        assert (
            text[:offset] == before.rstrip("\N{REPLACEMENT CHARACTER}") or "\N{REPLACEMENT CHARACTER}" in text
        )
    assert all(a <= b for a, b in pairwise(found))


def test_offsets_of_special_tokens(tokenizers):
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("The pause")
    tokens = TokenText(tokenizer)

    def offsets(**options: bool) -> list[int]:
        counted = Offsets(tokens, **options)
        return [counted.advance(id) for id in ids]

    texts = ["" if id in tokenizer.skipped else tokens.data(id).decode() for id in ids]
    starts = [len("".join(texts[:i])) for i in range(len(ids))]
    assert offsets(skip_special_tokens=True) == starts
    assert offsets(skip_special_tokens=False) == [0, *(start + len("<s>") for start in starts[1:])]
    assert offsets(skip_special_tokens=True, leading_space_cut=True) == [
        max(start - 1, 0) for start in starts
    ]


def test_columns_of_completions(tokenizers):
    tokenizer = tokenizers["byte-level"]
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    positions = [
        (a, None, ()),
        (b, -2.0, [(-0.5, c), (-2.0, b)]),
        (c, -3.0, [(-0.5, b)]),
        (a, -math.inf, []),
    ]
    tokens = TokenText(tokenizer)
    found = completion_logprobs(positions, tokens, Offsets(tokens, skip_special_tokens=True))
    assert found.tokens == ["a", "b", "c", "a"]
    assert found.text_offset == [0, 1, 2, 3]
    assert found.token_logprobs == [None, -2.0, -3.0, LOWEST]
    assert found.top_logprobs == [None, {"c": -0.5, "b": -2.0}, {"b": -0.5, "c": -3.0}, {"a": LOWEST}]


def test_likeliest_token_of_one_text_is_kept(tokenizers):
    tokenizer = tokenizers["byte-level"]
    tokens = TokenText(tokenizer)
    first, second = [id for id in range(256) if tokens.text(id) == "\N{REPLACEMENT CHARACTER}"][:2]
    found = completion_logprobs(
        [(second, -4.0, [(-1.0, first), (-4.0, second)])], tokens, Offsets(tokens, skip_special_tokens=True)
    )
    assert found.top_logprobs == [{"\N{REPLACEMENT CHARACTER}": -1.0}]


def test_content_of_chats(tokenizers):
    tokenizer = tokenizers["byte-level"]
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    [entry] = chat_logprobs([(a, -1.0, [(-1.0, a), (-math.inf, b)])], TokenText(tokenizer))["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -1.0, [97])
    assert [(top["token"], top["logprob"], top["bytes"]) for top in entry["top_logprobs"]] == [
        ("a", -1.0, [97]),
        ("b", LOWEST, [98]),
    ]
