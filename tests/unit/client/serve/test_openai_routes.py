"""OpenAI's routes: fields as docs/reference/openai.md lists them, failures, tokens as text and bytes."""

import math
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_scheduler import (
    FakeScheduler,
    VanishError,
    answer,
    delta,
    finished,
    floats,
    results,
    rid_of,
)
from support.http_server import client_of, front_end
from support.tokenizers import make_byte_level, make_sentencepiece

import caesura
from caesura.client import AsyncSchedulerClient, InvalidRequest
from caesura.client.connection.results import TokenDelta, decode_output
from caesura.client.serve.openai import images
from caesura.client.serve.openai.chat import ChatForm, ChatRequest, decode_chat
from caesura.client.serve.openai.common import (
    IGNORED,
    CommonRequest,
    common_fields,
    rids_for,
    sampling_params,
)
from caesura.client.serve.openai.completions import CompletionForm, CompletionRequest, decode_completion
from caesura.client.serve.openai.conversation import Exchange, template_messages
from caesura.client.serve.openai.logprobs import (
    LOWEST,
    Offsets,
    TokenText,
    chat_logprobs,
)
from caesura.client.serve.pages.metrics import Metrics
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import Chunk, Sample, TokenizerManager
from caesura.io_struct import (
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqInput,
    Message,
    Request,
    SamplingParams,
    WeightVersionSpan,
)

REFUSED = ChatRequest.REFUSED | CompletionRequest.REFUSED
DOCS = Path(caesura.__file__).parent / "docs" / "reference" / "openai.md"
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def completion(**fields: object) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"prompt": "x", **fields}))


def chat(**fields: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({**CHAT, **fields}))


def documented() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = {}
    for part in re.split(r"^\| field of ", DOCS.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        table = tables[part.split()[0]] = {}
        for line in part.split("\n\n")[0].splitlines()[2:]:
            names, _, default, _ = (cell.strip() for cell in line.strip("|").split("|"))
            verdict = default if default in ("ignored", "refused") else "honoured"
            table |= dict.fromkeys(re.findall(r"`(\w+)`", names), verdict)
    return tables


def test_the_page_has_every_field_and_says_what_happens():
    common = set(CommonRequest.__struct_fields__)
    structs = {
        "all": common | set(IGNORED),
        "completions": set(CompletionRequest.__struct_fields__) - common,
        "chats": set(ChatRequest.__struct_fields__) - common,
    }
    tables = documented()
    del tables["images"], tables["responses"]  # structs of their own
    del tables["completions"]["max_tokens"]  # stands in the table of both, too
    assert {table: set(rows) for table, rows in tables.items()} == structs
    rows = {name: verdict for table in tables.values() for name, verdict in table.items()}
    no_effect = IGNORED.keys() | {"spaces_between_special_tokens"}
    expected = {
        name: "refused" if name in REFUSED else "ignored" if name in no_effect else "honoured"
        for name in rows
    }
    assert rows == expected
    assert set(REFUSED) <= set(rows)


def test_the_page_has_every_field_of_images():
    rows = documented()["images"]
    assert set(rows) == set(images.ImageRequestBody.__struct_fields__)
    refused = {name for name, verdict in rows.items() if verdict == "refused"}
    assert refused == set(images.REFUSED) | set(images.WITHOUT_EFFECT)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_unless_it_asks_for_nothing(name):
    decode = chat if name in ChatRequest.__struct_fields__ else completion
    for nothing in (None, False, "", [], {}):
        decode(**{name: nothing})
    with pytest.raises(InvalidRequest, match=name) as caught:
        decode(**{name: "something"})
    assert caught.value.detail["field"] == name


def test_unknown_and_ignored_fields_pass():
    assert completion(**dict.fromkeys(IGNORED, "x"), whatever={"a": 1}).prompt == "x"


def test_nulls_are_left_out():
    optional = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"messages"})
    request = chat(**optional)
    assert sampling_params(request, None) == SamplingParams(max_new_tokens=None)
    assert request == chat()


def test_numbers_in_strings_are_numbers_but_prompts_stay():
    request = completion(prompt=["12", "a"], max_tokens="7", temperature="0.5", echo=1)
    assert (request.prompt, request.max_tokens) == (["12", "a"], 7)
    assert (request.temperature, request.echo) == (0.5, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", [[-1]]),
        ("prompt", None),
        ("max_tokens", -1),
        ("logit_bias", {"5": "high"}),
        ("stream_options", {"include_usage": "perhaps"}),
        ("seed", 2**64),
        ("rid", ""),
    ],
)
def test_malformed_fields_are_named(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        completion(**{field: value})
    assert caught.value.detail["field"] == field


def test_every_sampling_field_arrives():
    same = {
        "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5,
        "frequency_penalty": 0.2, "presence_penalty": -0.3, "min_new_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [9],
    }  # fmt: skip
    params = sampling_params(completion(**same, logit_bias={"5": -1}, seed=-1), 11)
    assert params == SamplingParams(max_new_tokens=11, **same, logit_bias={5: -1.0}, seed=2**63 - 1)
    assert params.problems() == []
    assert sampling_params(completion(min_tokens=3), 11).min_new_tokens == 3


def test_common_fields():
    same = {
        "skip_special_tokens": False,
        "return_routed_experts": True,
        "routed_experts_start_len": 3,
        "min_weights_epoch": 4,
    }
    given = {"stop": "a", "include_stop_str_in_output": True, "extra_key": "k", "lora_path": "a"}
    fields = common_fields(completion(**same, **given))
    assert fields == same | {
        "stop": ("a",), "no_stop_trim": True, "spaces_between_special_tokens": True, "cache_salt": "\nk",
        "adapter": "a", "return_sampling_mask": False, "return_sampled_logprob": False,
    }  # fmt: skip


def test_rids():
    assert rids_for(completion(rid="r"), 1, "cmpl") == ["r"]
    assert rids_for(completion(rid="r"), 2, "cmpl") == ["r_0", "r_1"]
    assert rids_for(completion(rid=["a", "b"]), 2, "cmpl") == ["a", "b"]
    first, second = rids_for(completion(), 2, "cmpl")
    assert first.startswith("cmpl-")
    assert first != second
    assert rids_for(completion(), 1, "cmpl") != rids_for(completion(), 1, "cmpl")


def test_messages_are_converted_for_templates():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": None, "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call, {**call, "function": {"name": "g", "arguments": ""}}]},
        {"role": "assistant", "content": "c", "tool_calls": None, "reasoning_content": "r"},
    ]
    first, second, third, fourth = template_messages(messages)
    assert first == {"role": "developer", "content": "", "name": "n"}
    assert second == {"role": "user", "content": "a\nb"}
    assert [each["function"]["arguments"] for each in third["tool_calls"]] == [{"a": 1}, {}]
    assert fourth == {"role": "assistant", "content": "c", "reasoning_content": "r"}
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "input_audio", "text": "x"}]},
        {"role": "assistant", "tool_calls": {}},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
    ],
)
def test_messages_that_are_not_text_are_refused(message):
    with pytest.raises(InvalidRequest, match=r"messages\[1\]") as caught:
        template_messages([CHAT["messages"][0], message])
    assert caught.value.detail["field"] == "messages"


PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True}


class CountingMetrics(Metrics):
    def forget(self):
        self.begun, self.ended, self.codes = 0, [], []

    def request_started(self):
        self.begun += 1

    def request_finished(self, tokens, seconds, first_token_s, finish_type):
        self.ended.append((tokens, finish_type))

    def error(self, code):
        self.codes.append(code)


@contextmanager
def posting(folder: Path):
    """Yield a function that returns the answer where a handler answers generations, and the metrics of it."""
    handlers: list[Callable[[GenerateReqInput], Iterable[Message]]] = []

    def engine(request: Request) -> Iterable[Message]:
        return handlers[-1](request) if isinstance(request, GenerateReqInput) else answer(request)

    endpoint, metrics = f"ipc://{folder}/engine", CountingMetrics()
    front = front_end(
        AsyncSchedulerClient(endpoint, connect_timeout=None), metrics=metrics, model_path="/models/tiny"
    )
    with FakeScheduler(endpoint, engine), client_of(front) as http:

        def post(handler, body: dict[str, object], path: str = "/v1/completions"):
            handlers.append(handler)
            metrics.forget()
            return http.post(path, content=msgspec.json.encode(body)), metrics

        yield post


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    with posting(tmp_path_factory.mktemp("engine")) as post:
        yield post


def refusing(code: ErrorCode, **detail: object):
    return lambda request: [ErrorReply(id=request.id, code=code, message="because", detail=detail)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID_REQUEST, 400, "invalid_request_error"),
        (ErrorCode.QUEUE_FULL, 503, "server_error"),
        (ErrorCode.WEIGHTS_POISONED, 503, "server_error"),
        (ErrorCode.INTERNAL, 500, "server_error"),
    ],
)
def test_a_refusal_has_its_status(post, code, status, kind, stream):
    response, metrics = post(
        refusing(code, field="sampling_params.max_new_tokens"), {**PROMPT, "stream": stream}
    )
    assert response.status_code == status
    retryable = {"retryable": True} if status == 503 else {}
    assert ("retry-after" in response.headers) == bool(retryable)
    assert response.json() == {
        "error": {"message": "because", "type": kind, "param": "max_tokens", "code": str(code), **retryable}
    }
    assert (metrics.begun, metrics.ended, metrics.codes) == (1, [(0, "error")], [code])


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        (ErrorCode.QUEUE_FULL, True),
        (ErrorCode.WEIGHTS_INVALID, True),
        (ErrorCode.OUT_OF_MEMORY, False),
        (ErrorCode.VERSION_MISMATCH, False),
    ],
)
def test_a_native_refusal_says_whether_it_passes(post, code, retryable):
    response, _ = post(refusing(code), {"input_ids": [5]}, "/generate")
    body = response.json()
    assert response.status_code == 503
    assert (body.get("retryable", False), body["error"].get("retryable", False)) == (retryable, retryable)


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_all(post, stream):
    refuse = refusing(ErrorCode.PROMPT_TOO_LONG)
    body = {**PROMPT, "prompt": [[1], [2], [3]], "stream": stream}
    response, metrics = post(lambda each: refuse(each) if each.input_ids == [2] else [], body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (metrics.begun, len(metrics.ended)) == (3, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_unavailable(tmp_path, stream):
    def vanish(request: Request) -> Iterable[Message]:
        raise VanishError

    with posting(tmp_path) as post:
        response, metrics = post(vanish, {**PROMPT, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_died"
    assert metrics.ended == [(0, "error")]


def events(response: httpx.Response) -> list[bytes]:
    parts = response.content.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [part[len(b"data: ") :] for part in parts]


def failing(code: str):
    reason = FinishReason(type="error", code=code, message="no room")

    def handler(request: GenerateReqInput) -> Iterable[Message]:
        rid = rid_of(request)
        return [delta((rid, 0, 0, [8, 9])), results(finished(rid, [8, 9, 10], finish_reason=reason))]

    return handler


def test_a_stream_that_cannot_go_on_ends_with_the_error(post):
    response, metrics = post(failing("out_of_memory"), {**PROMPT, "stream": True})
    assert response.status_code == 200
    *chunks, error, done = events(response)
    tokens = [token for chunk in chunks for token in msgspec.json.decode(chunk)["choices"][0]["token_ids"]]
    assert tokens[:2] == [8, 9]
    assert msgspec.json.decode(error)["error"] == {
        "message": "no room", "type": "server_error", "param": None, "code": "out_of_memory",
    }  # fmt: skip
    assert done == b"[DONE]"
    assert (metrics.ended, metrics.codes) == ([(0, "error")], ["out_of_memory"])


@pytest.mark.parametrize(
    ("code", "retryable"), [("out_of_memory", False), ("deadline_exceeded", False), ("shutting_down", True)]
)
def test_a_failed_native_stream_says_if_it_passes(post, code, retryable):
    response, _ = post(failing(code), {"input_ids": [5], "stream": True}, "/generate")
    *_, error, _ = events(response)
    assert msgspec.json.decode(error)["error"]["retryable"] is retryable


def test_without_a_tokenizer_ids_are_taken_and_given(post):
    def handler(request: GenerateReqInput) -> Iterable[Message]:
        assert request.return_logprob
        logprobs = floats([-0.5, float("-inf")])
        return [results(finished(rid_of(request), [8, 9], output_logprobs=logprobs))]

    response, metrics = post(handler, {**PROMPT, "logprobs": 0})
    [choice] = response.json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [8, 9], [5, 6, 7])
    assert choice["logprobs"]["tokens"] == ["token_id:8", "token_id:9"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -9999.0]
    assert choice["finish_reason"] == "length"
    assert response.json()["model"] == "/models/tiny"
    assert metrics.ended == [(2, "length")]
    refused, _ = post(handler, {"prompt": "text"})
    assert refused.status_code == 400
    chat, _ = post(handler, {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
    assert chat.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_never_ran_has_the_engines_version(post, stream):
    aborted = FinishReason(type="abort", message="Aborted")
    response, metrics = post(
        lambda request: [results(finished(rid_of(request), [], finish_reason=aborted))],
        {**PROMPT, "stream": stream},
    )
    body = msgspec.json.decode(events(response)[0]) if stream else response.json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["matched_stop"], choice["weight_versions"]) == ("abort", None, [])
    assert body["metadata"] == {"weight_version": "v0"}
    assert metrics.ended == [(0, "abort")]


def test_versions_of_several_choices(post):
    def handler(request: GenerateReqInput) -> Iterable[Message]:
        spans = [WeightVersionSpan(version=f"v{epoch}", epoch=epoch, start=0, end=4) for epoch in (3, 2)]
        rid = rid_of(request)
        return [results(*(finished(rid, [8] * 4, i, weight_versions=[span]) for i, span in enumerate(spans)))]

    body = post(handler, {**PROMPT, "n": 2})[0].json()
    assert body["metadata"] == {"weight_version": "v3"}
    assert [each["weight_versions"][0]["version"] for each in body["choices"]] == ["v3", "v2"]
    body = post(handler, {**PROMPT, "n": 2, "return_meta_info": True})[0].json()
    versions = [[span["version"] for span in spans] for spans in body["metadata"]["weight_versions"]]
    assert (body["metadata"]["weight_version"], versions) == ("v3", [["v3"], ["v2"]])
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


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
    request = decode_chat(msgspec.json.encode(body))
    return ChatForm(Exchange(front_end(tokenizer=manager.tokenizer), request, [5, 6]))


@pytest.mark.parametrize("make", [completion_form, chat_form])
def test_prompt_ids_and_role_come_with_the_first_chunk(manager, make):
    form = make(manager, return_prompt_token_ids=True)
    assert form.chunk(0, 0, chunk("", [200])) is None
    first, second = (form.chunk(0, 0, chunk(text, [201], at)) for at, text in enumerate("ab", 1))
    assert (first["prompt_token_ids"], "prompt_token_ids" in second) == ([5, 6], False)
    if make is chat_form:
        assert (first["delta"]["role"], "role" in second["delta"]) == ("assistant", False)
    assert form.chunk(1, 0, chunk("a", [201], 0, 1))["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize("make", [completion_form, chat_form])
def test_tokens_without_text_are_sent_if_asked_for(manager, make):
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
