"""Connections that send slowly, nothing, or too many at once: each ends by itself and keeps no other out."""

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator

import httpx
import pytest
from support.fake_scheduler import FakeScheduler, answer, echo
from support.http_server import Listening, listening
from support.waiting import PATIENCE_S, eventually

from caesura.client.serve.server import MAX_PIPELINED, Connections, Deadlines
from caesura.io_struct import GenerateReqInput, Message, Request

SOON = Deadlines(
    first_byte=0.5, head=0.5, body=0.5, body_rate=1 << 20, linger=0.5, keep_alive=0.5, stalled=0.5
)
HEAD = b"POST /pause_generation HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Listening]:
    with listening(api_key="k", connections=Connections(deadlines=SOON)) as server:
        yield server


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


def test_a_wrong_key_is_refused_without_waiting_for_the_body(hasty):
    head = HEAD.replace(b"Bearer k", b"Bearer x") + b"Content-Length: 1000000\r\n\r\n"
    with hasty.connect() as peer:
        peer.sendall(head)
        found = rest_of(peer)
    assert found.startswith(b"HTTP/1.1 401 ")
    assert found.count(b"HTTP/1.1") == 1
    with hasty.connect() as peer:
        peer.sendall(head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert rest_of(peer).startswith(b"HTTP/1.1 401 ")  # without a 100


def test_a_trickle_below_the_rate_is_cut_off_while_others_are_served(hasty):
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
def test_a_whole_request_has_no_deadline(tmp_path, before):
    held: list[GenerateReqInput] = []

    def slow(request: Request) -> Iterable[Message | bytes]:
        if isinstance(request, GenerateReqInput) and request.input_ids == [9]:
            held.append(request)
            return []
        return answer(request)

    def asking(prompt: list[int]) -> bytes:
        body = json.dumps({"input_ids": prompt}).encode()
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        return head + body

    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", slow) as engine,
        listening(
            endpoint=engine.endpoint, connect_timeout=None, connections=Connections(deadlines=SOON)
        ) as server,
        server.connect() as peer,
    ):
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


def test_pipelined_requests_are_bounded(tmp_path):
    def busy(request: Request) -> Iterable[Message | bytes]:
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    connections = Connections()
    body = json.dumps({"input_ids": [1, 2]}).encode()
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", busy) as engine,
        listening(endpoint=engine.endpoint, connect_timeout=None, connections=connections) as server,
    ):
        with server.connect() as peer:
            peer.sendall(request + HEALTH * MAX_PIPELINED)
            engine.push(echo(engine.next_request(GenerateReqInput)))
            found = b""
            while found.count(b"HTTP/1.1 200 ") < 1 + MAX_PIPELINED:
                found += peer.recv(65536)
        with server.connect() as peer:
            peer.sendall(request + HEALTH * (MAX_PIPELINED + 1))
            assert rest_of(peer).startswith(b"HTTP/1.1 400 ")
    assert connections.closed["pipelined"] == 1


def test_busy_connections_leave_room_for_health_and_commands_only(tmp_path):
    def busy(request: Request) -> Iterable[Message | bytes]:
        return [] if isinstance(request, GenerateReqInput) else answer(request)

    connections = Connections(limit=3, reserve=2)
    body = json.dumps({"input_ids": [1, 2]}).encode()
    request = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with (
        FakeScheduler(f"ipc://{tmp_path}/engine", busy) as engine,
        listening(endpoint=engine.endpoint, connect_timeout=None, connections=connections) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(3):
            stack.enter_context(server.connect()).sendall(request)
            engine.next_request(GenerateReqInput)
        for path in ("/health", "/v1/loads"):
            assert httpx.get(server.url + path).status_code == 200, path
        assert httpx.post(f"{server.url}/pause_generation").status_code == 200
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = httpx.post(server.url + path, content=body)
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
