"""Any bytes in a body, query or path are the client's fault, on every route: 4xx or an answer, never 500."""

import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar.testing import TestClient
from support.fake_scheduler import FakeScheduler, answer
from support.http_server import client_of, front_end, routes_served
from support.properties import examples
from support.tokenizers import make_byte_level

from caesura.client import AsyncSchedulerClient
from caesura.client.text.tokenizer import TextTokenizer
from caesura.io_struct import ErrorCode, ErrorReply, Message, Request


def agreeing(request: Request) -> Iterable[Message | bytes]:
    try:
        return answer(request)
    except AssertionError:
        return [ErrorReply(id=request.id, code=ErrorCode.UNSUPPORTED, message="not here")]


@pytest.fixture(scope="module")
def door(tmp_path_factory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("door")
    make_byte_level(folder, vocab_size=400)
    with FakeScheduler(f"ipc://{folder}/engine", agreeing) as engine:
        front = front_end(
            AsyncSchedulerClient(engine.endpoint, connect_timeout=None),
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


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_bad_bodies_are_no_defect(door, method, path):
    for content in BAD:
        response = door.request(method, path, content=content)
        assert response.status_code != 500, (content[:40], response.text)


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/chat/completions", "/pause_generation"]
)
@pytest.mark.parametrize("content", [b'{"\xff": 1}', b'{"a": "\xff"}', b"\xff"])
def test_invalid_utf_8_is_400(door, path, content):
    assert door.post(path, content=content).status_code == 400


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
NAMES = ["after", "since", "timeout", "dp_rank", "include", "format", "torch_empty_cache", "weight_version"]


@pytest.mark.parametrize(("method", "path"), [each for each in ROUTES if each[1] != "/generate"])
def test_extreme_parameters_are_no_defect(door, method, path):
    for name in NAMES:
        for value in EXTREMES:
            response = door.request(method, f"{path}?{name}={value}", content=b"{}")
            assert response.status_code != 500, (name, value[:40], response.text)
    binary = {"content-type": "application/octet-stream"}
    for query in ("%ff=%ff", "&&==&", "a" * 5000, "after=1&after=2", "since=1;since=2"):
        assert door.request(method, f"{path}?{query}", content=b"{}", headers=binary).status_code != 500


@pytest.mark.parametrize("after", ["-9223372036854775809", "9223372036854775808", "x", "1.5", ""])
def test_the_dashboard_takes_numbers_of_events_only(door, after):
    assert door.get(f"/dashboard/data?after={after}").status_code == 400
    assert door.get("/dashboard/data?since=nan").status_code == 400


@pytest.mark.parametrize("name", [b"\xff", b"\x00", b"\x1b[2J", b"a/b", b"\xed\xa0\x80", b"x" * 5000, b".."])
def test_no_path_is_a_defect(door, name):
    for path in ("/v1/models/", "/", "/dashboard/"):
        assert door.get(path + quote_from_bytes(name)).status_code != 500
    assert door.get("/server_info", headers={"host": b"\xff", "origin": b"\xff"}).status_code != 500
    assert door.post("/generate", headers={"content-type": b"\xff"}, content=b"{}").status_code != 500
