"""Requests that nobody sends by accident."""

import asyncio
import json
import logging
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from litestar import Response, get
from litestar.params import FromPath
from litestar.testing import TestClient
from support.fake_scheduler import FakeScheduler, answer
from support.http_server import client_of, front_end, listening
from support.tokenizers import make_byte_level
from support.waiting import PATIENCE_S, eventually

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import create_app
from caesura.client.serve.errors import printable
from caesura.client.serve.server import MAX_HEAD_BYTES
from caesura.client.text import chat_template
from caesura.client.text.tokenizer import TextTokenizer
from caesura.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    GetStatusReqOutput,
    Message,
    Request,
)
from caesura.process.log import TextFormatter

DEEP = b"[" * 200_000
TOOL_CALL = {"role": "assistant", "tool_calls": [{"function": {"arguments": DEEP.decode()}}]}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def door() -> Iterator[TestClient]:
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
    ],
)
def test_the_clients_fault_is_400(door, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = door.post(path, content=content)
    assert response.status_code == 400, response.text


def test_a_safetensors_header_may_not_be_deep_or_its_label_long(door):
    headers = {"content-type": "application/octet-stream"}
    path = "/update_weights_from_tensor"
    assert door.post(path, content=struct.pack("<Q", len(DEEP)) + DEEP, headers=headers).status_code == 400
    empty = struct.pack("<Q", 2) + b"{}"
    assert door.post(f"{path}?weight_version={'x' * 1025}", content=empty, headers=headers).status_code == 400
    assert door.post(f"{path}?weight_version={'x' * 1024}", content=empty, headers=headers).status_code == 503


def relabelled(tmp_path, handler) -> tuple[httpx.Response, list[str]]:
    asked: list[str] = []

    def remembering(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, AbortReq | BeginWeightUpdateReqInput | EndWeightUpdateReqInput):
            asked.append(type(request).__name__)
        return handler(request)

    async def run(endpoint: str) -> httpx.Response:
        async with AsyncSchedulerClient(endpoint, connect_timeout=None) as client:
            transport = httpx.ASGITransport(app=create_app(front_end(client)))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post("/update_weight_version", json={"new_version": "2"}, timeout=None)

    with FakeScheduler(f"ipc://{tmp_path}/engine", remembering) as engine:
        return asyncio.run(run(engine.endpoint)), asked


def test_a_label_aborts_nobody_where_it_is_refused(tmp_path):
    def in_a_session(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, BeginWeightUpdateReqInput):
            return [ErrorReply(id=request.id, code=ErrorCode.SESSION_OPEN, message="open already")]
        return answer(request)

    def poisoned(request: Request) -> Iterable[Message | bytes]:
        replies = list(answer(request))
        if isinstance(request, GetStatusReqInput):
            (status,) = replies
            assert isinstance(status, GetStatusReqOutput)
            status.weights = "poisoned"
        return replies

    response, asked = relabelled(tmp_path, in_a_session)
    assert (response.status_code, response.json()["code"]) == (400, "session_open")
    assert asked == ["BeginWeightUpdateReqInput"]
    response, asked = relabelled(tmp_path, poisoned)
    assert (response.status_code, response.json()["code"]) == (400, "weight_mismatch")
    assert asked == ["BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"]  # the latter without commit
    response, asked = relabelled(tmp_path, answer)
    assert response.status_code == 200, response.text
    assert asked == ["BeginWeightUpdateReqInput", "AbortReq", "EndWeightUpdateReqInput"]


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with listening(api_key="k") as server:
        yield server.address


HEAD = b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "endless"),
    [
        (b"GET /", b"a"),
        (b"GET /health HTTP/1.1\r\nX: ", b"a"),
        (b"GET /health HTTP/1.1\r\n", b"X: " + b"a" * 1000 + b"\r\n"),
        (b"", b"\r\n"),
        (CHUNKED + b"0\r\n", b"X: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\nX: ", b"a"),
        (CHUNKED + b"5;", b"a"),
    ],
)
def test_unfinished_headers_are_cut_off_before_authorization(address, first, endless):
    with socket.create_connection(address) as peer:
        try:
            peer.sendall(first + endless * ((1 << 20) // len(endless)))
            found = peer.recv(1000)
        except ConnectionError:  # closed with what it had not read
            return
    assert found == b"" or found.startswith(b"HTTP/1.1 400 ")


def test_heads_below_the_limit_and_bodies_above_it_pass(address):
    long = b"X: " + b"a" * (MAX_HEAD_BYTES - len(HEAD) - 100) + b"\r\n"
    body = b" " * (4 * MAX_HEAD_BYTES)
    pieces = b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(256)) + b"0\r\n\r\n"
    plain = HEAD + long + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(address) as peer:
        reader = peer.makefile("rb")
        peer.sendall((plain + CHUNKED + pieces) * 2)  # the next head follows the body at once
        for _ in range(4):
            assert reader.readline().startswith(b"HTTP/1.1 503 ")  # read, and no engine
            length = 0
            while (line := reader.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            reader.read(length)


ESCAPES = "\x1b[2J\x07\r\n\x9b31m\u202e"


def test_labels_and_names_have_no_control_characters(door):
    for path, body in (
        ("/update_weight_version", {"new_version": ESCAPES}),
        ("/end_weight_update", {"weight_version": "1\n"}),
        ("/update_weights_from_disk", {"model_path": "/models/tiny", "weight_version": ESCAPES}),
        ("/destroy_weights_update_group", {"group_name": ESCAPES}),
        ("/generate", {"input_ids": [1], "rid": ESCAPES}),
        ("/generate", {"input_ids": [[1]], "rid": ["a\n"]}),
    ):
        assert door.post(path, json=body).status_code == 400, path
    assert door.post("/update_weight_version", json={"new_version": "läuft 2/b"}).status_code == 503


def test_logged_client_text_is_harmless_to_a_terminal():
    formatter = TextFormatter("%(name)s")
    try:
        int(ESCAPES)
    except ValueError as error:
        error.args = (ESCAPES,)
        record = logging.LogRecord("x", logging.ERROR, "", 1, "%s failed", (ESCAPES,), sys.exc_info())
    shown = formatter.format(record)
    assert "\\x1b[2J\\x07\\r\n\t\\x9b31m\\u202e" in shown
    assert shown.count("Traceback") == 1
    assert not set(shown) & set(ESCAPES) - set("[2J31m\n\t")
    assert printable(ESCAPES) == "\\x1b[2J\\x07\\r\\n\\x9b31m\\u202e"
    assert printable("x" * 1000) == "x" * 200 + "… (1000 characters)"


def test_a_defect_is_logged_with_a_printable_path(caplog):
    @get("/broken/{name:str}", opt={"access": "open"})
    async def broken(name: FromPath[str]) -> Response[bytes]:
        raise ValueError("x")

    with client_of(front_end(), [broken], raise_server_exceptions=False) as http:
        assert http.get("/broken/%1b%5b2J%0d%0a").status_code == 500
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("caesura")]
    assert messages == ["GET /broken/\\x1b[2J\\r\\n failed"]


def test_a_template_that_does_not_end_holds_up_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_S", 3600)
    rounds = "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}"
    source = "{% if messages[0].content == 'harm' %}" + rounds + "{% endif %}fine"
    tokenizer = TextTokenizer.from_folder(make_byte_level(tmp_path, chat_template=source))
    endpoint = f"ipc://{tmp_path}/s"

    def chat(content: str) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": messages}, timeout=PATIENCE_S
        )

    with (
        FakeScheduler(endpoint, answer),
        listening(endpoint=endpoint, connect_timeout=10.0, tokenizer=tokenizer) as server,
        ThreadPoolExecutor(1) as thread,
    ):
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
