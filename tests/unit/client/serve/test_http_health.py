"""Health and requests where the engine is silent, slow, gone and back: answered soon, and truly."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.fake_scheduler import FakeScheduler, answer, echo
from support.http_server import Listening, listening
from support.waiting import PATIENCE_S, eventually

from caesura.client.exceptions import InvalidRequest
from caesura.client.serve.context import ServeOptions
from caesura.client.serve.sglang.updates import allowed_path
from caesura.io_struct import GenerateReqInput, GetStatusReqInput, Message, Request
from caesura.io_struct.control import RankStatus
from caesura.process import log


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


NAMES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00002-of-00002.safetensors",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("root/step-1", "root/shared", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    for name in NAMES:
        for folder in ("root/step-1", "root/shared", "outside"):
            (tmp_path / folder / name).write_bytes(b"{}")
    return tmp_path / "root"


def allowed(path: Path | str, root: Path) -> str:
    return allowed_path(str(path), ServeOptions(weights_root=str(root)))


def test_a_folder_and_links_within_the_root_are_taken(root):
    assert allowed(root / "step-1", root) == str(root / "step-1")
    (root / "step-1" / NAMES[1]).unlink()
    (root / "step-1" / NAMES[1]).symlink_to("../shared/model.safetensors")
    (root / "latest").symlink_to("step-1")
    assert allowed(root / "latest", root) == str(root / "step-1")
    assert allowed(root / "not there", root) == str(root / "not there")  # the engine says what is wrong


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_is_a_link_out_of_the_root_is_refused(root, name, deep):
    (root / "step-1" / name).unlink()
    target = root.parent / "outside" / name
    if deep:
        (root / "shared" / "hop").symlink_to(target)
        target = root / "shared" / "hop"
    (root / "step-1" / name).symlink_to(target)
    with pytest.raises(InvalidRequest, match="link out of"):
        allowed(root / "step-1", root)


def test_a_folder_that_leads_out_is_refused(root):
    (root / "away").symlink_to(root.parent / "outside")
    for path in (
        root / "away",
        root / ".." / "outside",
        root.parent / "outside",
        "/",
        os.path.relpath(root.parent),
    ):
        with pytest.raises(InvalidRequest, match="outside"):
            allowed(path, root)
    sibling = root.parent / "rooted"
    sibling.mkdir()
    with pytest.raises(InvalidRequest):
        allowed(sibling, root)


def test_names_in_messages_are_printable(root):
    (root / "step-1" / "\x1b[2J.safetensors").symlink_to(root.parent / "outside" / NAMES[0])
    with pytest.raises(InvalidRequest) as caught:
        allowed(root / "step-1", root)
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/pause_generation", "/metrics"])
def test_every_answer_names_its_request(tmp_path, path):
    with moody(tmp_path) as (_, server, _):
        given = httpx.get(server.url + path, headers={"x-request-id": "job-7"})
        assert given.headers.get_list("x-request-id") == ["job-7"]
        for unusable in ({}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}):
            one, two = (httpx.get(server.url + path, headers=unusable).headers["x-request-id"] for _ in "ab")
            assert one not in (two, unusable.get("x-request-id"))


def test_the_log_names_the_request(tmp_path, caplog):
    with moody(tmp_path) as (_, server, _):
        caplog.handler.setFormatter(log.TextFormatter("%(module_path)s"))
        body = {"model": "default", "prompt": [1], "max_tokens": 1, "max_tokns": 2}
        httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "job-8"}, timeout=None)
        (line,) = [line for line in caplog.text.splitlines() if "max_tokns" in line]
        assert line.endswith("(request job-8)")
