"""What is new of a sample as a choice of a chunk: nothing is lost where nothing can be shown yet."""

import msgspec
import pytest
from support.fake_scheduler import finished, floats
from support.tokenizers import make_byte_level, make_sentencepiece

from caesura.client.connection.results import TokenDelta, decode_output
from caesura.client.serve.openai.chat import ChatForm, decode_chat
from caesura.client.serve.openai.completions import CompletionForm, decode_completion
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import Chunk, Sample, TokenizerManager


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
