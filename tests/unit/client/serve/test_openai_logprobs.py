"""Tokens as text, bytes and offsets, for byte-level and SentencePiece vocabularies."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_scheduler import finished, floats
from support.tokenizers import make_byte_level, make_sentencepiece

from caesura.client.connection.results import TokenDelta, decode_output
from caesura.client.serve.openai.chat import ChatForm, decode_chat
from caesura.client.serve.openai.completions import CompletionForm, decode_completion
from caesura.client.serve.openai.logprobs import (
    LOWEST,
    Offsets,
    TokenText,
    chat_logprobs,
    completion_logprobs,
)
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import Chunk, Sample, TokenizerManager

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


@pytest.fixture(scope="module")
def manager(tmp_path_factory) -> TokenizerManager:
    folder = make_byte_level(tmp_path_factory.mktemp("tokenizer"))
    return TokenizerManager(None, TextTokenizer.from_folder(folder))  # no form generates


def chunk(text: str, ids: list[int], start: int = 0, index: int = 0) -> Chunk:
    logprobs = [-1.0] * len(ids)
    delta = TokenDelta(index=index, start=start, output_ids=ids, output_logprobs=logprobs)
    return Chunk(
        index=index, rid="r", text=text, delta=delta if ids else None, finished=None, prompt_tokens=2
    )


def completion_form(manager: TokenizerManager, **fields: object) -> CompletionForm:
    request = decode_completion(msgspec.json.encode({"prompt": [5, 6], **fields}))
    return CompletionForm(manager, request, [[5, 6]])


def chat_form(manager: TokenizerManager, **fields: object) -> ChatForm:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return ChatForm(manager, decode_chat(msgspec.json.encode(body)), [5, 6])


@pytest.mark.parametrize("make", [completion_form, chat_form])
def test_prompt_ids_come_with_the_first_chunk_that_is_sent(manager, make):
    form = make(manager, return_prompt_token_ids=True)
    assert form.chunk(0, 0, chunk("", [200])) is None
    first = form.chunk(0, 0, chunk("a", [201], 1))
    assert first["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in form.chunk(0, 0, chunk("b", [202], 2))
    assert form.chunk(1, 0, chunk("a", [201], 0, 1))["prompt_token_ids"] == [5, 6]


def test_the_role_comes_with_the_first_chunk_that_is_sent(manager):
    form = chat_form(manager)
    assert form.chunk(0, 0, chunk("", [200])) is None
    assert form.chunk(0, 0, chunk("a", [201], 1))["delta"]["role"] == "assistant"
    assert "role" not in form.chunk(0, 0, chunk("b", [202], 2))["delta"]


@pytest.mark.parametrize("make", [completion_form, chat_form])
def test_tokens_without_text_are_sent_to_who_asked_for_tokens(manager, make):
    form = make(manager, return_token_ids=True)
    sent = form.chunk(0, 0, chunk("", [200]))
    assert sent["token_ids"] == [200]
    assert form.chunk(0, 0, chunk("text", []))["token_ids"] == []
    assert form.chunk(0, 0, chunk("", [])) is None


def test_echo_of_a_tokenizer_that_writes_a_space_first(tmp_path):
    tokenizer = TextTokenizer.from_folder(make_sentencepiece(tmp_path))
    ids = tokenizer.encode("The pause")
    data = msgspec.json.encode({"prompt": "The pause", "echo": True, "logprobs": 0, "max_tokens": 0})
    form = CompletionForm(TokenizerManager(None, tokenizer), decode_completion(data), ["The pause"])
    choice = form.choice(0, 0, sample(ids, [ids[-1]]))
    texts = [tokenizer.decode(ids[:count]) for count in range(len(ids))]
    assert choice["text"] == "The pause"
    assert choice["logprobs"].tokens[:2] == ["<s>", " The"[: len(choice["logprobs"].tokens[1])]]
    assert choice["logprobs"].text_offset == [len(text) for text in texts]
    assert choice["logprobs"].token_logprobs == [None, *[-1.0] * (len(ids) - 1)]


def sample(prompt_ids: list[int], ids: list[int]) -> Sample:
    wire = finished("r", ids, output_logprobs=floats([-2.0] * len(ids)), prompt_tokens=len(prompt_ids))
    wire = msgspec.structs.replace(
        wire, input_logprobs=floats([float("nan"), *[-1.0] * (len(prompt_ids) - 1)])
    )
    return Sample(index=0, rid="r", prompt_ids=prompt_ids, text="!", output=decode_output(wire), matched=None)


def test_offsets_go_on_from_chunk_to_chunk(manager):
    ids = manager.tokenize("a🦉b")
    form = completion_form(manager, logprobs=0)
    found = [form.chunk(0, 0, chunk("", [id], i))["logprobs"].text_offset[0] for i, id in enumerate(ids)]
    assert found == [0, *[1] * (len(ids) - 2), 2]
    assert form.chunk(1, 0, chunk("", ids[:1], 0, 1))["logprobs"].text_offset == [0]
