"""Health and requests where the engine is silent, slow, gone and back: answered soon, and truly."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.fake_scheduler import FakeScheduler, answer, echo
from support.http_server import Listening, listening
from support.waiting import PATIENCE_S, eventually

from caesura.io_struct import GenerateReqInput, GetStatusReqInput, Message, Request
from caesura.io_struct.control import RankStatus


class Moody:
    """An engine that keeps silent on demand."""

    def __init__(self) -> None:
        self.silent = False

    def __call__(self, request: Request) -> Iterable[Message | bytes]:
        return [] if self.silent or isinstance(request, GenerateReqInput) else answer_idle(request)


def answer_idle(request: Request) -> Iterable[Message | bytes]:
    replies = list(answer(request))
    if isinstance(request, GetStatusReqInput):
        replies[0].running_requests = 0  # type: ignore[union-attr]
    return replies


@contextmanager
def moody(tmp_path) -> Iterator[tuple[Moody, Listening, FakeScheduler]]:
    engine = Moody()
    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", engine) as fake,
        listening(endpoint=fake.endpoint, connect_timeout=None) as server,
    ):
        yield engine, server, fake


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ping", "/ready"])
def test_a_silent_engine_is_told_soon(tmp_path, path):
    with moody(tmp_path) as (engine, server, _):
        assert httpx.get(server.url + "/health").status_code == 200
        engine.silent = True
        assert httpx.get(server.url + path, timeout=None).status_code == 503


def test_server_info_says_how_many_ranks_there_are(tmp_path):
    def divided(request: Request) -> Iterable[Message | bytes]:
        replies = list(answer(request))
        if isinstance(request, GetStatusReqInput):
            memory = {"reserved": 1, "allocated": 1, "available": None}
            replies[0].ranks = [RankStatus(rank=rank, pid=1, host="h", **memory) for rank in (1, 2, 3)]
        return replies

    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", divided) as fake,
        listening(endpoint=fake.endpoint, connect_timeout=None) as server,
    ):
        found = httpx.get(server.url + "/server_info", timeout=None).json()
    assert [found[name] for name in ("tp_size", "num_gpus", "pp_size", "dp_size", "nnodes")] == [
        4,
        4,
        1,
        1,
        1,
    ]


def test_an_engine_with_work_may_be_silent_for_a_step(tmp_path):
    with moody(tmp_path) as (engine, server, fake):
        assert httpx.get(server.url + "/health").status_code == 200
        caller = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/generate", json={"input_ids": [1]}, timeout=None)
        )
        caller.start()
        eventually(lambda: 'num_http_reqs{model_name=""} 1.0' in httpx.get(f"{server.url}/metrics").text)
        engine.silent = True
        assert httpx.get(server.url + "/health").status_code == 200  # as of a moment ago
        engine.silent = False
        fake.push(echo(fake.next_request(GenerateReqInput)))
        caller.join()


def test_without_an_engine_everything_fails_at_once_until_it_is_back(tmp_path):
    body = {"input_ids": [1, 2]}
    with FakeScheduler(f"ipc://{tmp_path}/engine") as first:
        server_context = listening(endpoint=first.endpoint, connect_timeout=PATIENCE_S)
        server = server_context.__enter__()
        assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
    try:
        eventually(lambda: httpx.get(f"{server.url}/health", timeout=None).status_code == 503)
        for path in ("/generate", "/v1/completions", "/pause_generation", "/weights_checker"):
            given = {"prompt": [1, 2]} if "completions" in path else body if path == "/generate" else {}
            refused = httpx.post(server.url + path, json=given, timeout=None)
            assert refused.status_code == 503, path
            assert refused.headers["retry-after"] == "1", path
        assert httpx.post(f"{server.url}/generate", json=body).json()["retryable"] is True
        with FakeScheduler(f"ipc://{tmp_path}/engine"):
            eventually(lambda: httpx.get(f"{server.url}/health", timeout=None).status_code == 200)
            assert httpx.post(f"{server.url}/generate", json=body, timeout=None).status_code == 200
    finally:
        server_context.__exit__(None, None, None)
