"""Requests that nobody sends by accident: any bytes are the client's fault, bounded before they are read."""

import asyncio
import json
import signal
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote_from_bytes

import httpx
import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Response, get
from litestar.params import FromPath
from litestar.testing import TestClient
from support.fake_scheduler import FakeScheduler, answer, status_reply
from support.http_server import client_of, front_end, listening, routes_served
from support.properties import examples
from support.tokenizers import make_byte_level
from support.waiting import PATIENCE_S, eventually

from caesura.client import AsyncSchedulerClient
from caesura.client.exceptions import InvalidRequest, PromptTooLong, QueueFull
from caesura.client.serve.bodies import MAX_PROMPT_TOKENS, decode_large
from caesura.client.serve.context import MAX_WAITING, THREADS, Workers
from caesura.client.serve.error_responses import printable
from caesura.client.serve.openai.completions import CompletionRequest
from caesura.client.serve.sglang.generate import GenerateBody
from caesura.client.text import chat_template
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import START_SLICE, GenerationRequest, TokenizerManager
from caesura.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    Message,
    Request,
)

NATIVE = msgspec.json.Decoder(GenerateBody)
OPENAI = msgspec.json.Decoder(CompletionRequest, strict=False)
PROMPTS = {"text": b'""', "input_ids": b"[]"}

ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
texts = st.text(max_size=6)
given_fields = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.lists(texts, max_size=4) | st.none(),
        "input_ids": ids | st.lists(ids, max_size=4) | st.none(),
        "sampling_params": st.fixed_dictionaries({}, optional={"stop": texts, "n": st.integers(1, 4)})
        | st.none(),
        "rid": st.text("ab é", max_size=6),
        "stream": st.booleans(),
        "custom_labels": st.dictionaries(texts, texts, max_size=2),
    },
)


@settings(max_examples=examples(200))
@given(given_fields, st.sampled_from([None, 1]), st.booleans())
def test_large_bodies_are_what_small_ones_are(fields, indent, ascii_only):
    raw = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    assert decode_large(raw, NATIVE, PROMPTS, 100) == NATIVE.decode(raw)


def test_an_unknown_key_of_a_large_body_is_refused():
    for decode in (NATIVE.decode, lambda raw: decode_large(raw, NATIVE, PROMPTS, 100)):
        with pytest.raises(msgspec.ValidationError, match="unknown field `no such field`"):
            decode(b'{"text": "a", "no such field": []}')


@settings(max_examples=examples(100))
@given(texts | ids | st.lists(texts, max_size=4) | st.lists(ids, max_size=4), st.integers(1, 3))
def test_completions_logprobs_too(prompt, n):
    raw = json.dumps({"prompt": prompt, "n": n, "model": "m"}).encode()
    assert decode_large(raw, OPENAI, {"prompt": b"[]"}, 100) == OPENAI.decode(raw)


@pytest.fixture(scope="module")
def bare() -> Iterator[httpx.Client]:
    with listening() as server, httpx.Client(base_url=server.url, timeout=None) as http:
        yield http


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids": [' + b"[]," * 5_000_000 + b"[]]}",
        b'{"input_ids": [' + b"1," * 7_000_000 + b"1]}",
        b'{"input_ids": [[' + b"1," * 7_000_000 + b"1]]}",
        b'{"input_ids": [' + b"[1]," * 5000 + b"[1]]}",
        b'{"input_ids": [' + b'"a",' * 50_000 + b"1]}",
        b'{"input_ids": [' + b"1," * 50_000 + b'"a"]}',
        b'{"text": [' + b'"",' * 5_000_000 + b'""]}',
        b'{"text": ["a",' + b"[]," * 5_000_000 + b"[]]}",
        b'{"text": "a", "sampling_params": [' + b"{}," * 5_000_000 + b"{}]}",
        b'{"text": "a", "custom_labels": [' + b"[]," * 5_000_000 + b"[]]}",
        b'{"text": "a", "rid": [' + b'"",' * 5_000_000 + b'""]}',
        b'{"text": "\xff' + b"a" * 50_000 + b'"}',
        b'{"text": ["\xff' + b"a" * 50_000 + b'"]}',
        b'{"text": "' + b"a" * 50_000,
        b'{"input_ids": {' + b'"a": 1,' * 50_000 + b'"a": 1}}',
        b"[" * 1_000_000,
    ],
)
def test_oversized_requests_are_400_before_allocation(bare, body):
    response = bare.post("/generate", content=body)
    assert response.status_code == 400, response.text[:300]
    if b"[]" not in body and b"{}" not in body and b'""' not in body:
        body = body.replace(b"input_ids", b"prompt").replace(b"text", b"prompt")
        assert bare.post("/v1/completions", content=body).status_code == 400


def test_bodies_of_other_routes_are_small(bare):
    five_million = b'{"tokens": [' + b"12345," * 5_000_000 + b"1]}"
    for path in ("/detokenize", "/tokenize", "/v1/chat/completions"):
        assert bare.post(path, content=five_million).status_code == 413, path
    command = b'{"mode": "' + b"x" * (1 << 20) + b'"}'
    assert bare.post("/pause_generation", content=command).status_code == 413


def test_many_rows_of_text_are_400(tmp_path):
    make_byte_level(tmp_path, vocab_size=400)
    tokenizer = TextTokenizer.from_folder(tmp_path)
    with listening(tokenizer=tokenizer, context_length=512, max_batch=100) as server:
        for path, name, value in (("/tokenize", "prompt", ""), ("/detokenize", "tokens", [])):
            for count, status in ((100, 200), (101, 400)):
                body = {name: [value] * count}
                assert httpx.post(server.url + path, json=body).status_code == status, (path, count)
        long = httpx.post(f"{server.url}/detokenize", json={"tokens": [65] * 10_000}).json()["text"]
        assert long == tokenizer.decode([65]) * 10_000


async def test_a_batch_is_started_in_slices(tmp_path):
    """Between two slices everybody else has had a turn."""
    turns, started = 0, Counter()

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with FakeScheduler(f"ipc://{tmp_path}/engine") as engine:
        async with AsyncSchedulerClient(engine.endpoint, connect_timeout=None) as client:
            start = client.channel.start_generation

            def counted(*args):
                started[turns] += 1
                return start(*args)

            client.channel.start_generation = counted
            requests = [GenerationRequest(prompt=[i], detokenize=False) for i in range(1000)]
            other = asyncio.ensure_future(take_turns())
            results = await TokenizerManager(client, None).generate_batch(requests)
            other.cancel()
    assert [result[0].prompt_ids for result in results] == [[i] for i in range(1000)]
    assert sum(started.values()) == 1000
    assert max(started.values()) <= 2 * START_SLICE


def test_a_large_batch_is_answered_in_order(serve):
    _, server = serve()
    for count in (4096, 40):
        prompts = [[i, 7, 7] for i in range(count)]
        answers = httpx.post(f"{server.url}/generate", json={"input_ids": prompts}, timeout=None).json()
        assert [answer["output_ids"] for answer in answers] == [[7, 7, i, 0] for i in range(count)]


async def test_workers_refuse_what_would_wait_too_long():
    crew, release = Workers(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    tasks = [asyncio.ensure_future(crew.run(wait)) for _ in range(THREADS + MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await crew.run(wait)
    release.set()
    await asyncio.gather(*tasks)
    assert await crew.run(lambda: 7) == 7


def test_a_prompt_has_so_many_ids():
    many = MAX_PROMPT_TOKENS + 1
    with pytest.raises(PromptTooLong, match=rf"input_ids\[1\]: {many} ids are over the limit of {many - 1}"):
        decode_large(b'{"input_ids": [[1], [1' + b",1" * (many - 1) + b"]]}", NATIVE, PROMPTS, 5)
    with pytest.raises(InvalidRequest, match="3 prompts are over the limit of 2"):
        decode_large(b'{"input_ids": [[1], [2], [3]]}', NATIVE, PROMPTS, 2)


@pytest.fixture(scope="module")
def door(tmp_path_factory, agreeing_engine) -> Iterator[TestClient]:
    folder = make_byte_level(tmp_path_factory.mktemp("door"), vocab_size=400)
    front = front_end(
        AsyncSchedulerClient(agreeing_engine.endpoint, connect_timeout=None),
        tokenizer=TextTokenizer.from_folder(folder),
        context_length=512,
        allow_pickled_tensors=True,
        model_path=str(folder),
    )
    with client_of(front, raise_server_exceptions=False) as http:
        yield http


ROUTES = sorted((method, path) for method, path, _ in routes_served())

BAD = [
    b"\xff",
    b'"\xff"',
    b'{"\xff": 1}',
    b'{"prompt": "\xc3"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"prompt": "\\ud800"}',
    b'{"text": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "\\ud800", "prompt": "a"}',
    b'{"tokens": [18446744073709551615]}',
    b'{"tokens": [-1]}',
    b'{"tokens": []}',
    b'{"tokens": [1e999]}',
    b'{"max_tokens": 1e999}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x00",
    b"nul",
    b"\xef\xbb\xbf{}",
    b"{}".decode().encode("utf-16"),
    b'{"model_path": "\\u0000"}',
    b'{"new_version": "\\ud83d"}',
    b'{"mode": "\xff"}',
    b"9" * 100_000,
    b'{"lease_s": 1e308, "deadline_s": 1e308}',
]


@pytest.mark.parametrize(("method", "path"), [each for each in ROUTES if each[0] != "GET"])
def test_bad_bodies_are_no_defect(door, method, path):
    for content in BAD:
        response = door.request(method, path, content=content)
        assert response.status_code != 500, (content[:40], response.text)


names = st.sampled_from(
    [
        "text", "input_ids", "prompt", "messages", "tokens", "sampling_params", "rid", "model", "stop", "n",
        "model_path", "names", "shapes", "dtypes", "mode", "tags", "zmq_handles", "logit_bias", "max_tokens",
    ]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(
    raw=st.binary(max_size=60)
    | st.dictionaries(names, values, max_size=3).map(
        lambda d: json.dumps(d).encode("utf-8", "surrogatepass")
    ),
    route=st.sampled_from([each for each in ROUTES if each[0] != "GET"]),
)
def test_no_bytes_are_a_defect(door, raw, route):
    response = door.request(*route, content=raw)
    assert response.status_code != 500, response.text


EXTREMES = [
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616", "9" * 400,
    "9" * 5000, "-9223372036854775809", "-1", "1e309", "nan", "inf", "-inf", "", "x", "%00", "%ff",
    "%ed%a0%80",
    "null", "[]", "{}", "true", "1_0", "%D9%A1", " 1", "0x1",
]  # fmt: skip
QUERIES = {
    "/dashboard/data": ["after", "since", "image"],
    "/flush_cache": ["timeout", "torch_empty_cache"],
    "/get_world_size": ["include_dp"],
    "/pause": ["mode", "clear_cache", "lease_s"],
    "/reset_prefix_cache": ["reset_running_requests"],
    "/server_info": ["config_format"],
    "/sleep": ["level", "tags"],
    "/update_weights_from_tensor": ["weight_version", "base_epoch"],
    "/v1/loads": ["dp_rank", "include", "format"],
    "/wake_up": ["tags"],
}
"""Parameters of the routes that read some; the others refuse or ignore any."""


@pytest.mark.parametrize(("method", "path"), [each for each in ROUTES if each[1] != "/generate"])
def test_extreme_parameters_are_no_defect(door, method, path):
    for name in QUERIES.get(path, ["timeout"]):
        for value in EXTREMES if path in QUERIES else EXTREMES[::8]:
            response = door.request(method, f"{path}?{name}={value}", content=b"{}")
            assert response.status_code != 500, (name, value[:40], response.text)
    binary = {"content-type": "application/octet-stream"}
    for query in ("%ff=%ff", "&&==&", "a" * 5000, "after=1&after=2", "since=1;since=2"):
        assert door.request(method, f"{path}?{query}", content=b"{}", headers=binary).status_code != 500


@pytest.mark.parametrize("name", [b"\xff", b"\x00", b"\x1b[2J", b"a/b", b"\xed\xa0\x80", b"x" * 5000, b".."])
def test_no_path_is_a_defect(door, name):
    for path in ("/v1/models/", "/", "/dashboard/"):
        assert door.get(path + quote_from_bytes(name)).status_code != 500
    assert door.get("/server_info", headers={"host": b"\xff", "origin": b"\xff"}).status_code != 500
    assert door.post("/generate", headers={"content-type": b"\xff"}, content=b"{}").status_code != 500


ESCAPES = "\x1b[2J\x07\r\n\x9b31m\u202e"
DEEP = b"[" * 200_000
TOOL_CALL = {"role": "assistant", "tool_calls": [{"function": {"arguments": DEEP.decode()}}]}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def alone() -> Iterator[TestClient]:
    front = front_end(allow_pickled_tensors=True, model_path="/models/tiny")
    with client_of(front, raise_server_exceptions=False) as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", DEEP),
        ("/v1/completions", b'{"regex": ' + DEEP),
        ("/v1/chat/completions", b'{"messages": [{"a": ' + DEEP),
        ("/v1/chat/completions", {"messages": [TOOL_CALL]}),
        ("/v1/completions", b'{"prompt": [1], "\xff": 1}'),
        ("/v1/completions", b'{"prompt": [1], "\xff": 1}' + b" " * 40_000),
        ("/v1/completions", b'{"prompt": [1], "a": 1, "\xff": 1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "\xff": 1}'),
        ("/inference/v1/generate", b'{"token_ids": [1], "\xff": 1}'),
        ("/generate", b'{"input_ids": [1], "\xff": 1}'),
        ("/pause_generation", b'{"\xff": 1}'),
        ("/v1/chat/completions", {"messages": [{"role": []}]}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"self": 1}}),
        ("/update_weights_from_disk", {"model_path": "/models/\0"}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["é"]}),
        ("/update_weight_version", {"new_version": "x" * 1025}),
        ("/end_weight_update", {"weight_version": "x" * 1025}),
        ("/update_weights_from_disk", {"model_path": "/models/tiny", "weight_version": "x" * 1025}),
        ("/flush_cache?timeout=inf", {}),
        ("/flush_cache?timeout=3601", {}),
        ("/update_weight_version", {"new_version": ESCAPES}),
        ("/end_weight_update", {"weight_version": "1\n"}),
        ("/update_weights_from_disk", {"model_path": "/models/tiny", "weight_version": ESCAPES}),
        ("/destroy_weights_update_group", {"group_name": ESCAPES}),
        ("/generate", {"input_ids": [1], "rid": ESCAPES}),
        ("/generate", {"input_ids": [[1]], "rid": ["a\n"]}),
    ],
)
def test_the_clients_fault_is_400(alone, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = alone.post(path, content=content)
    assert response.status_code == 400, response.text


def test_a_safetensors_header_is_bounded(alone):
    headers = {"content-type": "application/octet-stream"}
    path = "/update_weights_from_tensor"
    assert alone.post(path, content=struct.pack("<Q", len(DEEP)) + DEEP, headers=headers).status_code == 400
    empty = struct.pack("<Q", 2) + b"{}"
    for length, status in ((1025, 400), (1024, 503)):
        url = f"{path}?weight_version={'x' * length}"
        assert alone.post(url, content=empty, headers=headers).status_code == status
    assert alone.post("/update_weight_version", json={"new_version": "läuft 2/b"}).status_code == 503


def relabelled(tmp_path, handler) -> tuple[httpx.Response, list[type]]:
    asked: list[type] = []

    def remembering(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, AbortReq | BeginWeightUpdateReqInput | EndWeightUpdateReqInput):
            asked.append(type(request))
        return handler(request)

    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", remembering) as engine,
        client_of(front_end(AsyncSchedulerClient(engine.endpoint, connect_timeout=None))) as http,
    ):
        return http.post("/update_weight_version", json={"new_version": "2"}), asked


def test_a_label_aborts_nobody_where_it_is_refused(tmp_path):
    def in_a_session(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, BeginWeightUpdateReqInput):
            return [ErrorReply(id=request.id, code=ErrorCode.SESSION_OPEN, message="open already")]
        return answer(request)

    def poisoned(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, GetStatusReqInput):
            return [msgspec.structs.replace(status_reply(request), weights="poisoned")]
        return answer(request)

    response, asked = relabelled(tmp_path, in_a_session)
    assert (response.status_code, response.json()["code"]) == (400, "session_open")
    assert asked == [BeginWeightUpdateReqInput]
    response, asked = relabelled(tmp_path, poisoned)
    assert (response.status_code, response.json()["code"]) == (400, "weight_mismatch")
    assert asked == [BeginWeightUpdateReqInput, EndWeightUpdateReqInput]  # the latter without commit
    response, asked = relabelled(tmp_path, answer)
    assert response.status_code == 200, response.text
    assert asked == [BeginWeightUpdateReqInput, AbortReq, EndWeightUpdateReqInput]


def test_text_of_a_client_is_shown_printable_and_short():
    assert printable(ESCAPES) == "\\x1b[2J\\x07\\r\\n\\x9b31m\\u202e"
    assert printable("x" * 1000) == "x" * 200 + "… (1000 characters)"


def test_a_defect_is_logged_and_tells_nothing(caplog):
    @get("/broken/{name:str}", opt={"access": "open"})
    async def broken(name: FromPath[str]) -> Response[bytes]:
        raise ValueError("inner-detail")

    with client_of(front_end(), [broken], raise_server_exceptions=False) as http:
        response = http.get("/broken/%1b%5b2J%0d%0a")
    assert response.status_code == 500
    assert "inner-detail" not in response.text
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("caesura")]
    assert messages == ["GET /broken/\\x1b[2J\\r\\n failed"]
    assert "inner-detail" in caplog.text


def test_a_template_that_does_not_end_holds_up_nobody_else(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_S", 3600)
    rounds = "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}"
    source = "{% if messages[0].content == 'harm' %}" + rounds + "{% endif %}fine"
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path, chat_template=source))
    _, server = serve(tokenizer=tokenizer)

    def chat(content: str) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": messages}, timeout=PATIENCE_S
        )

    with ThreadPoolExecutor(1) as thread:
        before = psutil.Process().children()
        harmful = thread.submit(chat, "harm")
        (busy,) = eventually(lambda: [each for each in psutil.Process().children() if each not in before])
        eventually(lambda: busy.cpu_times().user > 0.3)
        assert [chat("hello").status_code for _ in range(3)] == [200, 200, 200]
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 5000}).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert not harmful.done()
        busy.send_signal(signal.SIGXCPU)  # as the kernel does when the time is over
        refused = harmful.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    assert "CPU time" in refused.json()["error"]["message"]
