"""vLLM's pause before an engine that ends no request by itself."""

import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import msgspec
import pytest
from support.fake_scheduler import FakeScheduler, answer, echo, status_reply
from support.http_server import listening
from support.waiting import PATIENCE_S, eventually

from caesura.io_struct import (
    ContinueGenerationReqInput,
    ErrorCode,
    ErrorReply,
    GenerateReqInput,
    GetStatusReqInput,
    Message,
    PauseGenerationReqInput,
    Request,
)

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}


class Engine:
    """Generates nothing before it is told to; status says what it has to do."""

    def __init__(self) -> None:
        self.live: list[GenerateReqInput] = []
        self.mode: str | None = None
        self.asleep = False

    def __call__(self, request: Request) -> Iterable[Message]:
        match request:
            case GenerateReqInput():
                self.live.append(request)
                return []
            case GetStatusReqInput():
                state = {"generation": "paused" if self.mode else "running", "pause_mode": self.mode}
                load = {"running_requests": len(self.live), "waiting_requests": 0}
                return [msgspec.structs.replace(status_reply(request), **state, **load)]
            case PauseGenerationReqInput():
                self.mode = request.mode
            case ContinueGenerationReqInput() if self.asleep:
                return [ErrorReply(id=request.id, code=ErrorCode.MEMORY_RELEASED, message="asleep")]
            case ContinueGenerationReqInput():
                self.mode = None
        return answer(request)

    def end_all(self, fake: FakeScheduler) -> None:
        while self.live:
            fake.push(echo(self.live.pop()))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def fake(engine, tmp_path) -> Iterator[FakeScheduler]:
    with FakeScheduler(f"ipc://{tmp_path}/s", engine) as fake:
        yield fake


@pytest.fixture
def http(fake) -> Iterator[httpx.Client]:
    served = listening(endpoint=fake.endpoint, connect_timeout=10.0)
    with served as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def generating(http, fake, threads) -> Future[httpx.Response]:
    answer = threads.submit(http.post, "/generate", json=BODY)
    fake.next_request(GenerateReqInput)
    return answer


def draining(http, threads) -> Future[httpx.Response]:
    paused = threads.submit(http.post, "/pause", params={"mode": "wait"})
    eventually(lambda: is_paused(http))
    return paused


def is_paused(http) -> bool:
    return bool(http.get("/is_paused").raise_for_status().json()["is_paused"])


def refused(http) -> bool:
    requests = [
        *(("/generate", {**BODY, **more}) for more in ({}, {"stream": True}, {"input_ids": [[5], [6]]})),
        *(("/v1/completions", {"prompt": [5, 6], "stream": stream}) for stream in (False, True)),
        ("/inference/v1/generate", {"token_ids": [5, 6]}),
    ]
    answers = [http.post(path, json=body) for path, body in requests]
    if all(each.status_code == 200 for each in answers):
        return False
    for each in answers:
        error = each.json()["error"]
        assert (each.status_code, error["code"], error["retryable"]) == (503, "paused", True)
        assert "retry-after" in each.headers
    return True


def test_wait_pauses_when_all_requests_have_ended(http, fake, engine, threads):
    answer = generating(http, fake, threads)
    paused = draining(http, threads)
    assert refused(http)
    assert engine.mode is None
    engine.end_all(fake)
    assert answer.result().json()["output_ids"] == [7, 6, 5, 0]
    assert paused.result().json() == {"status": "paused"}
    assert engine.mode == "retract"
    assert refused(http)
    assert http.post("/resume").json() == {"status": "resumed"}
    assert not is_paused(http)
    assert generating(http, fake, threads)
    engine.end_all(fake)


def test_a_resume_ends_the_drain(http, fake, engine, threads):
    answer = generating(http, fake, threads)
    paused = draining(http, threads)
    http.post("/resume").raise_for_status()
    assert (paused.result().status_code, paused.result().json()["error"]["code"]) == (400, "busy")
    assert not is_paused(http)
    engine.end_all(fake)
    assert answer.result().status_code == 200
    assert engine.mode is None


def test_another_pause_ends_the_drain_where_requests_stay(http, fake, engine, threads):
    answer = generating(http, fake, threads)
    paused = draining(http, threads)
    kept = {"mode": "keep", "clear_cache": False}
    assert http.post("/pause", json=kept).json() == {"status": "paused"}
    assert paused.result().json()["error"]["code"] == "busy"
    assert engine.mode == "in_place"
    assert http.post("/pause", params={"mode": "wait"}).json()["error"]["code"] == "not_idle"
    engine.end_all(fake)
    assert answer.result().status_code == 200


def test_a_drain_ends_with_its_client(http, fake, engine, threads):
    answer = generating(http, fake, threads)
    with socket.create_connection((http.base_url.host, http.base_url.port)) as trainer:
        trainer.sendall(b"POST /pause?mode=wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        eventually(lambda: is_paused(http))
    eventually(lambda: not is_paused(http))
    engine.end_all(fake)
    assert answer.result().status_code == 200
    assert engine.mode is None


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_are_taken_again_however_the_pause_ended(http, fake, engine, threads, mode):
    http.post("/pause", json={"mode": mode}).raise_for_status()
    assert refused(http)
    engine.mode = None  # by a client of the socket, or a lease
    assert generating(http, fake, threads)
    engine.end_all(fake)


def test_a_resume_that_fails_admits_nothing(http, engine):
    http.post("/pause").raise_for_status()
    engine.asleep = True
    assert http.post("/resume").json()["error"]["code"] == "memory_released"
    assert refused(http)
    engine.asleep = False
    http.post("/resume").raise_for_status()
    assert not is_paused(http)


def test_keep_queues_new_requests(http, fake, engine, threads):
    http.post("/pause", params={"mode": "keep"}).raise_for_status()
    assert is_paused(http)
    answer = generating(http, fake, threads)
    engine.end_all(fake)
    assert answer.result().status_code == 200


EFFECTS = [
    ("keep", None, ("retract", True)),
    ("keep", True, ("retract", True)),
    ("keep", False, ("in_place", False)),
    ("abort", None, ("abort", True)),
    ("abort", False, ("abort", False)),
    ("wait", None, ("retract", True)),
    ("wait", False, ("retract", False)),
]


@pytest.mark.parametrize("place", ["query", "body"])
def test_effects_on_requests_and_cache(http, fake, place):
    for mode, clear, expected in EFFECTS:
        options = {"mode": mode} | ({} if clear is None else {"clear_cache": clear})
        sent = {"params": {k: str(v) for k, v in options.items()}} if place == "query" else {"json": options}
        assert http.post("/pause", **sent).json() == {"status": "paused"}
        requests = [fake.requests.get() for _ in range(fake.requests.qsize())]
        kinds = [type(each).__name__ for each in requests]
        pause = next(each for each in requests if isinstance(each, PauseGenerationReqInput))
        assert (pause.mode, "FlushCacheReqInput" in kinds) == expected, (mode, clear)
        http.post("/resume").raise_for_status()
