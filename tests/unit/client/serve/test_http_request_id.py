"""Ids of requests: in every answer, and in what is logged for the request."""

from collections.abc import Iterator

import httpx
import pytest
from support.fake_scheduler import FakeScheduler
from support.http_server import Listening, listening

from caesura.process import log


@pytest.fixture
def server(agreeing_engine: FakeScheduler) -> Iterator[Listening]:
    with listening(endpoint=agreeing_engine.endpoint, connect_timeout=None) as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/pause_generation", "/metrics"])
def test_every_answer_names_its_request(server, path):
    given = httpx.get(server.url + path, headers={"x-request-id": "job-7"})
    assert given.headers.get_list("x-request-id") == ["job-7"]
    for unusable in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}):
        one, two = (httpx.get(server.url + path, headers=unusable).headers["x-request-id"] for _ in "ab")
        assert one not in (two, unusable.get("x-request-id"))


@pytest.mark.parametrize("size", [1, 40_000], ids=["at once", "in a worker"])
def test_the_log_names_the_request(server, caplog, size):
    caplog.handler.setFormatter(log.TextFormatter("%(module_path)s"))
    body = {"model": "default", "prompt": [1] * size, "max_tokns": 2}
    httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "job-8"}, timeout=None)
    (line,) = [line for line in caplog.text.splitlines() if "max_tokns" in line]
    assert line.endswith("(request job-8)")
