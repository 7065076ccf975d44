"""Connections that send slowly, nothing or too much, engines that are silent or gone: each is told soon."""

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from support.fake_scheduler import FakeScheduler, answer, echo, status_reply
from support.http_server import Listening, listening
from support.waiting import PATIENCE_S, eventually

from caesura.client.serve.server import MAX_HEAD_BYTES, MAX_PIPELINED, Connections, Deadlines
from caesura.io_struct import GenerateReqInput, GetStatusReqInput, Message, Request
from caesura.io_struct.control import RankStatus

SOON = Deadlines(
    first_byte=0.5, head=0.5, body=0.5, body_rate=1 << 20, linger=0.5, keep_alive=0.5, stalled=0.5
)
HEAD = b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Listening]:
    with listening(api_key="k", connections=Connections(deadlines=SOON)) as server:
        yield server


def asking(prompt: list[int]) -> bytes:
    body = json.dumps({"input_ids": prompt}).encode()
    return b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def busy(request: Request) -> Iterable[Message | bytes]:
    return [] if isinstance(request, GenerateReqInput) else answer(request)


def rest_of(peer: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := peer.recv(65536):
            found += piece
    return found


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /hea", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nHost: loc", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
        (HEAD + b"Content-Length: 100\r\n\r\n", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"HTTP/1.1 408 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"HTTP/1.1 408 "),
        (HEALTH, b"HTTP/1.1 503 "),  # no engine; then idle
        (HEALTH + b"GET /hea", b"HTTP/1.1 503 "),
    ],
)
def test_missing_members_are_not_waited_for(hasty, sent, answered):
    with hasty.connect() as peer:
        peer.sendall(sent)
        assert rest_of(peer).startswith(answered)


def test_a_wrong_key_is_refused_before_the_body(hasty):
    head = HEAD.replace(b"Bearer k", b"Bearer x") + b"Content-Length: 1000000\r\n\r\n"
    with hasty.connect() as peer:
        peer.sendall(head)
        found = rest_of(peer)
    assert found.startswith(b"HTTP/1.1 401 ")
    assert found.count(b"HTTP/1.1") == 1
    with hasty.connect() as peer:
        peer.sendall(head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert rest_of(peer).startswith(b"HTTP/1.1 401 ")  # without a 100


def test_a_trickle_below_the_rate_is_cut_off(hasty):
    with hasty.connect() as peer:
        peer.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        found = b""
        peer.settimeout(0.05)
        for _ in range(400):
            try:
                peer.sendall(b" ")
                found = peer.recv(1000)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("never cut off")
        assert found == b"" or found.startswith(b"HTTP/1.1 408 ")
    assert httpx.get(f"{hasty.url}/health").status_code == 503


@pytest.mark.parametrize("before", [0, 1])
def test_a_whole_request_has_no_deadline(serve, before):
    held: list[GenerateReqInput] = []

    def slow(request: Request) -> Iterable[Message | bytes]:
        return answer(request) if getattr(request, "input_ids", None) != [9] else held.append(request) or []

    engine, server = serve(slow, connections=Connections(deadlines=SOON))
    with server.connect() as peer:
        peer.sendall(asking([1, 2]) * before + asking([9]))
        eventually(lambda: held)
        peer.settimeout(3 * SOON.keep_alive)
        found = b""
        with pytest.raises(TimeoutError):
            while piece := peer.recv(10_000):
                found += piece
            raise AssertionError("closed")
        assert found.count(b"HTTP/1.1 200 ") == before
        (message,) = answer(held[0])
        engine.push(message)
        peer.settimeout(None)
        assert peer.recv(20).startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_takes_nothing_is_dropped():
    connections = Connections(deadlines=SOON)
    with listening(connections=connections) as server, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(None)
        peer.connect(server.address)
        page = b"GET /dashboard HTTP/1.1\r\nHost: localhost\r\n\r\n"
        state, sent = server.server.server_state, 0
        while not connections.closed["stalled"]:
            peer.sendall(page)  # until the answers fill what lies between
            sent += 1
            eventually(lambda sent=sent: state.total_requests >= sent or connections.closed["stalled"])
        rest_of(peer)


def test_at_the_limit_silent_connections_make_room():
    connections = Connections(limit=4, reserve=2)
    with listening(connections=connections) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(4)]
        for _ in range(8):
            assert httpx.get(f"{server.url}/health").status_code == 503  # there is no engine, but an answer
        assert rest_of(silent[0]) == b""
    assert connections.closed["crowded"] >= 1


def test_at_the_limit_connections_answered_early_make_room():
    connections = Connections(limit=4, reserve=2)
    head = HEAD.replace(b"Bearer k", b"Bearer x") + b"Content-Length: 1000\r\n\r\n{"
    with listening(api_key="k", connections=connections) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            peer = stack.enter_context(server.connect())
            peer.sendall(head)
            assert peer.recv(65536).startswith(b"HTTP/1.1 401 ")
        refused = httpx.post(f"{server.url}/tokenize", headers={"Authorization": "Bearer k"}, content=b"{}")
        assert "too many" not in refused.text
        assert "connections" not in refused.text
    assert connections.closed["crowded"] >= 1


def test_pipelined_requests_are_bounded(serve):
    connections = Connections()
    engine, server = serve(busy, connections=connections)
    with server.connect() as peer:
        peer.sendall(asking([1, 2]) + HEALTH * MAX_PIPELINED)
        engine.push(echo(engine.next_request(GenerateReqInput)))
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 1 + MAX_PIPELINED:
            found += peer.recv(65536)
    with server.connect() as peer:
        peer.sendall(asking([1, 2]) + HEALTH * (MAX_PIPELINED + 1))
        engine.push(echo(engine.next_request(GenerateReqInput)))
        assert b"HTTP/1.1 400 " in rest_of(peer)
    assert connections.closed["pipelined"] == 1


def test_busy_connections_leave_room_for_commands(serve):
    engine, server = serve(busy, connections=Connections(limit=3, reserve=2))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.connect()).sendall(asking([1, 2]))
            engine.next_request(GenerateReqInput)
        for path in ("/health", "/v1/loads"):
            assert httpx.get(server.url + path).status_code == 200, path
        assert httpx.post(f"{server.url}/pause_generation").status_code == 200
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = httpx.post(server.url + path, json={"input_ids": [1, 2]})
            assert refused.status_code == 503, path
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"


def test_server_ends_without_waiting_for_connections(monkeypatch):
    monkeypatch.setattr("caesura.client.serve.server.SHUTDOWN_S", PATIENCE_S)
    with listening(api_key="k") as server, contextlib.ExitStack() as stack:
        for sent in (b"", b"GET /hea", HEAD + b"Content-Length: 100\r\n\r\n{", HEALTH):
            stack.enter_context(server.connect()).sendall(sent)
        assert httpx.get(f"{server.url}/health").status_code == 503
        server.stop()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with listening(api_key="k") as server:
        yield server.address


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
def test_unfinished_headers_are_cut_off(address, first, endless):
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


def test_an_engine_with_work_may_be_silent_for_a_step(serve):
    is_silent = False
    engine, server = serve(lambda request: [] if is_silent else busy(request))
    with ThreadPoolExecutor(1) as thread:
        assert httpx.get(server.url + "/health").status_code == 200
        asked = thread.submit(httpx.post, f"{server.url}/generate", json={"input_ids": [1]}, timeout=None)
        eventually(lambda: 'num_http_reqs{model_name=""} 1.0' in httpx.get(f"{server.url}/metrics").text)
        is_silent = True
        assert httpx.get(server.url + "/health").status_code == 200  # as of a moment ago
        is_silent = False
        engine.push(echo(engine.next_request(GenerateReqInput)))
        assert asked.result().status_code == 200


def test_without_an_engine_everything_fails_at_once(tmp_path):
    generate = {"input_ids": [1, 2]}
    endpoint = f"ipc://{tmp_path}/engine"
    commands = ("pause_generation", "weights_checker", "release_memory_occupation", "begin_weight_update")
    requests = [
        *(("GET", f"/{path}", None) for path in ("health", "ready", "ping", "v1/loads", "server_info")),
        *(("POST", f"/{path}", {}) for path in commands),
        *(("POST", "/generate", {**generate, "stream": stream}) for stream in (False, True)),
        ("POST", "/v1/completions", {"prompt": [1, 2]}),
    ]
    with contextlib.ExitStack() as stack:
        with FakeScheduler(endpoint):
            server = stack.enter_context(
                listening(endpoint=endpoint, connect_timeout=PATIENCE_S, enable_memory_saver=True)
            )
            http = stack.enter_context(httpx.Client(base_url=server.url, timeout=None))
            assert http.post("/generate", json=generate).status_code == 200
        eventually(lambda: http.get("/health").status_code == 503)
        for method, path, body in requests:
            refused = http.request(method, path, json=body)
            assert refused.status_code == 503, path
            assert method == "GET" or refused.headers["retry-after"] == "1", path
        assert http.post("/generate", json=generate).json()["retryable"] is True
        with FakeScheduler(endpoint):
            eventually(lambda: http.get("/health").status_code == 200)
            assert http.post("/generate", json=generate).status_code == 200


def test_server_info_says_how_many_ranks_there_are(serve):
    memory = {"reserved": 1, "allocated": 1, "available": None}
    ranks = [RankStatus(rank=rank, pid=1, host="h", **memory) for rank in (1, 2, 3)]

    def divided(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, GetStatusReqInput):
            return [msgspec.structs.replace(status_reply(request), ranks=ranks)]
        return answer(request)

    _, server = serve(divided)
    found = httpx.get(f"{server.url}/server_info", timeout=None).json()
    names = ("tp_size", "num_gpus", "pp_size", "dp_size", "nnodes")
    assert [found[name] for name in names] == [4, 4, 1, 1, 1]
