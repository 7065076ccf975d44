"""The ROUTER under clients that are slow, silent, gone or send without end, or somebody else's scheduler."""

import contextlib
import os
import re
import socket
import stat

import msgspec
import numpy as np
import pytest
import zmq
from support.raw_client import PATIENCE_MS, RawClient, rows
from support.waiting import eventually

from caesura.io_struct import (
    AbortReqOutput,
    BatchTokenOutput,
    CaesuraError,
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqOutput,
    GetStatusReqInput,
    StreamDelta,
    decode_reply,
    encode,
)
from caesura.io_struct.base import MAX_FRAMES
from caesura.scheduler.messaging import router_socket, send_queues
from caesura.scheduler.messaging.router_socket import Router

MAX_TOKENS = send_queues.MAX_PENDING_DELTA_TOKENS


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s.sock"


@pytest.fixture
def gone():
    return []


@pytest.fixture(autouse=True)
def bounds(request, monkeypatch):
    """Bounds that a test would otherwise need gigabytes or minutes to reach."""
    for name, value in getattr(request, "param", {}).items():
        owner = send_queues if hasattr(send_queues, name) else router_socket
        monkeypatch.setattr(owner, name, value)


def bounded(**bounds):
    return pytest.mark.parametrize("bounds", [bounds], indirect=True, ids=str)


@pytest.fixture
def router(endpoint, gone):
    with contextlib.closing(Router(endpoint, gone.append)) as router:
        yield router


def heard(router: Router) -> list[tuple[bytes, int]]:
    return [(client, len(buffers)) for client, _, buffers in router.receive()]


def hear_from(router: Router, name: bytes) -> tuple[list[tuple[bytes, int]], int]:
    messages: list[tuple[bytes, int]] = []
    calls = 0
    while name not in [client for client, _ in messages]:
        assert router.socket.poll(PATIENCE_MS), "what is not read to its end is still something to read"
        messages += heard(router)
        calls += 1
    return messages, calls


def met(router: Router, name: bytes, **options: int) -> RawClient:
    """Return a client that has been heard. No test uses a name twice: one that is taken is never heard."""
    with contextlib.ExitStack() as cleanup:
        client = cleanup.enter_context(RawClient(router.endpoint, identity=name, **options))
        client.send(GetStatusReqInput())
        assert hear_from(router, name)[0] == [(name, 0)]
        cleanup.pop_all()
    return client


@contextlib.contextmanager
def full(router: Router, name: bytes, receive_hwm: int = 1):
    """A client whose pipe is full, and the number of messages in it."""
    with met(router, name, receive_hwm=receive_hwm) as client:
        sent = 0
        while name not in router.backlogs:
            router.send(name, AbortReqOutput(id=f"filler {sent}" + "." * 1000, aborted=0))
            sent += 1
            assert sent < 100_000
        yield client, sent


def drained(router: Router, client: RawClient, count: int) -> list:
    messages = []
    while len(messages) < count:
        router.retry()
        messages += client.received()
    assert not router.has_backlog
    return messages


def send_frames(client: RawClient, header: bytes, count: int) -> None:
    client.socket.send(header, zmq.SNDMORE)
    for _ in range(count - 1):
        client.socket.send(b"", zmq.SNDMORE)
    client.socket.send(b"")


def delta_of(rid: str, start: int, tokens: list[int]) -> StreamDelta:
    def ints(*values: int) -> bytes:
        return np.asarray(values, "<i4").tobytes()

    return StreamDelta(
        rids=[rid],
        indices=ints(0),
        starts=ints(start),
        counts=ints(len(tokens)),
        tokens=ints(*tokens),
        logprobs=(-np.asarray(tokens, "<f4")).tobytes(),
    )


def result_of(rid: str, tokens: int = 0) -> GenerateReqOutput:
    return GenerateReqOutput(
        rid=rid,
        output_ids=np.arange(tokens, dtype="<i4").tobytes(),
        finish_reason=FinishReason(type="length"),
        weight_versions=[],
        prompt_tokens=1,
        cached_tokens=0,
        seed=0,
    )


def streamed(step: int, count: int = 1) -> BatchTokenOutput:
    start = step * count
    return BatchTokenOutput(step=step, delta=delta_of("r", start, list(range(start, start + count))))


def finished(*rids: str, tokens: int = 1, step: int = 0) -> BatchTokenOutput:
    return BatchTokenOutput(step=step, finished=[result_of(rid, tokens) for rid in rids])


def refusal(endpoint: str) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        Router(endpoint, lambda _: None).close()
    return caught.value


def test_a_second_router_is_refused_and_the_first_goes_on(router, tmp_path):
    assert stat.S_IMODE(os.stat(tmp_path / "s.sock").st_mode) == 0o600, "only its owner may connect"
    for spelling in (router.endpoint, f"ipc://{tmp_path}/./s.sock"):
        assert refusal(spelling).code == ErrorCode.ENDPOINT_IN_USE
    with met(router, b"c1") as client:
        router.send(b"c1", AbortReqOutput(id="a", aborted=3))
        assert client.receive() == AbortReqOutput(id="a", aborted=3)


@pytest.mark.parametrize("left_behind", [False, True])
def test_an_endpoint_is_free_after_a_close_and_after_a_kill(endpoint, left_behind):
    path = endpoint.removeprefix("ipc://")
    Router(endpoint, lambda _: None).close()
    assert not os.path.exists(path)
    if left_behind:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
    with contextlib.closing(Router(endpoint, lambda _: None)) as router:
        met(router, b"c1").close()


def test_no_other_file_is_touched(endpoint):
    path = endpoint.removeprefix("ipc://")
    for name in (path, path + ".lock"):
        with open(name, "w") as file:
            file.write("precious")
    error = refusal(endpoint)
    assert (error.code, error.detail["field"]) == (ErrorCode.INVALID_REQUEST, "endpoint")
    os.remove(path)
    Router(endpoint, lambda _: None).close()
    with open(path + ".lock") as file:
        assert file.read() == "precious"


def test_the_longest_ipc_path(tmp_path):
    directory = tmp_path / "d"
    directory.mkdir()
    fits = f"{directory}/".ljust(107, "x")
    Router(f"ipc://{fits}", lambda _: None).close()
    assert "107 bytes" in refusal(f"ipc://{fits}x").message


IMPOSSIBLE = """
    tcp://0.0.0.0:0 tcp://*:0 tcp://[::]:0 tcp://10.0.0.1:0 tcp://example.com:0 tcp://127.0.0.1
    tcp://127.0.0.1: tcp://127.0.0.1:* tcp://127.0.0.1:65536 tcp://127.0.0.1:99999 tcp://127.0.0.1:-1
    tcp://:5555
    ipc://relative.sock ipc://@abstract ipc://* ipc:///nonexistent/directory/s.sock ipc:/// inproc://x
    udp://127.0.0.1:5 http://127.0.0.1:80
"""


def test_an_impossible_address_is_refused_by_name():
    for address in ("", *IMPOSSIBLE.split()):
        error = refusal(address)
        assert (error.code, error.detail["field"]) == (ErrorCode.INVALID_REQUEST, "endpoint"), address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tcp_on_loopback_with_a_free_port(host):
    with contextlib.closing(Router(f"tcp://{host}:0", lambda _: None)) as router:
        assert router.endpoint.startswith("tcp://127.0.0.1:")
        assert not router.endpoint.endswith(":0")
        met(router, b"c1").close()
        assert refusal(router.endpoint).code == ErrorCode.ENDPOINT_IN_USE


def test_a_client_that_does_not_read_loses_no_result(router):
    rids = [f"r{number}" for number in range(40)]
    with met(router, b"slow", receive_hwm=1) as slow, met(router, b"quick") as quick:
        longest_queue = 0
        for step in range(20_000):
            # Each sample streams 500 tokens, then its terminal message comes.
            number, at = divmod(step, 500)
            done = [result_of(rids[number], 500)] if at == 499 else []
            delta = None if done else delta_of(rids[number], at, [step])
            router.send(b"slow", BatchTokenOutput(step=step, delta=delta, finished=done))
            router.retry()
            if step % 1000 == 0:
                router.send(b"quick", AbortReqOutput(id=str(step), aborted=0))
                assert quick.receive().id == str(step)
            longest_queue = max(longest_queue, sum(len(queue.frames) for _, queue in router.backlogs.items()))
        assert router.has_backlog, "the slow client was meant to be full"
        assert longest_queue <= 2, "token outputs coalesce"

        seen = dict.fromkeys(rids, 0)
        ended: list[str] = []
        last_step = -1
        while len(ended) < len(rids):
            router.retry()
            for message in slow.received():
                assert isinstance(message, BatchTokenOutput)
                assert message.step > last_step
                last_step = message.step
                for rid, _, start, tokens, logprobs in rows(message.delta):
                    assert rid not in ended
                    assert start >= seen[rid], "a token came twice"
                    assert tokens == [500 * rids.index(rid) + start + i for i in range(len(tokens))]
                    assert logprobs == [-float(token) for token in tokens]
                    seen[rid] = start + len(tokens)
                ended += [result.rid for result in message.finished]
        assert sorted(ended) == sorted(rids), "one terminal result each"
        assert not router.has_backlog


def test_deltas_beyond_the_bound_are_lost_and_results_stay(router):
    with full(router, b"slow") as (slow, sent):
        router.send(b"slow", finished("first"))
        for step in range(25):
            router.send(b"slow", streamed(step, MAX_TOKENS // 10))
        router.send(b"slow", finished("last"))
        assert router.backlogs[b"slow"].load.tokens <= MAX_TOKENS
        messages = drained(router, slow, sent + 1)
    assert [m.id[:8] for m in messages[:sent]] == [f"filler {i}"[:8] for i in range(sent)]
    (output,) = messages[sent:]
    assert [result.rid for result in output.finished] == ["first", "last"]
    found = rows(output.delta)
    assert all(row == list(range(start, start + len(row))) for _, _, start, row, _ in found)
    assert 0 < sum(len(row) for _, _, _, row, _ in found) <= MAX_TOKENS


def test_taken_tokens_make_room_for_new_ones(router):
    for name in (b"slow 1", b"slow 2", b"slow 3"):
        with full(router, name) as (slow, sent):
            for step in range(4):
                router.send(name, streamed(step, MAX_TOKENS // 4))
                router.send(name, AbortReqOutput(id="between", aborted=0))
            queue = router.backlogs[name]
            assert queue.load.tokens == MAX_TOKENS
            drained(router, slow, sent + 8)
            assert queue.load.tokens == 0


def test_order_is_kept_around_replies(router):
    with full(router, b"slow") as (slow, sent):
        for step in range(6):
            if step == 3:
                router.send(b"slow", AbortReqOutput(id="reply", aborted=1))
            router.send(b"slow", streamed(step))
        before, reply, after = drained(router, slow, sent + 3)[sent:]
    assert rows(before.delta) == [("r", 0, 0, [0, 1, 2], [-0.0, -1.0, -2.0])]
    assert reply.id == "reply"
    assert rows(after.delta) == [("r", 0, 3, [3, 4, 5], [-3.0, -4.0, -5.0])]


@bounded(LINGER_S=0.0)
def test_waiting_messages_are_encoded_once(router):
    with met(router, b"slow"):
        router.socket = Full(router.socket)
        router.send(b"slow", streamed(0))
        queue = router.backlogs[b"slow"]
        for step in range(1, 50):
            router.send(b"slow", streamed(step))
            router.retry()
            router.retry()
            assert len(queue.frames) == 1, "what is open stays so until the head has left"
        assert queue.load.tokens == 49


def test_a_client_that_left_is_reported_and_forgotten(router, gone):
    with full(router, b"c1") as (client, _):
        client.close()
        # The loop polls before it retries; ZeroMQ buries a full pipe only while its socket is looked at.
        eventually(lambda: router.socket.poll(1) or router.retry() or not router.has_backlog)
    assert gone == [b"c1"], "once, however much was waiting"
    router.send(b"c1", AbortReqOutput(id="x", aborted=0))
    assert not router.has_backlog


def test_keepalive_finds_a_silent_client_that_left(router, gone):
    with met(router, b"stays"):
        met(router, b"leaves").close()
        eventually(lambda: router.keepalive({b"stays", b"leaves"}, step=1) or gone)
        assert set(gone) == {b"leaves"}


@pytest.mark.parametrize(
    ("bounds", "message", "fits"),
    [
        ({"MAX_PENDING_MESSAGES": 50}, AbortReqOutput(id="x", aborted=0), 49),
        ({"MAX_PENDING_MESSAGES": 50}, finished("x"), 49),
        ({"MAX_PENDING_BYTES": 100_000}, finished("x", tokens=5000), 4),
    ],
    ids=["replies", "results", "bytes"],
    indirect=["bounds"],
)
def test_what_a_client_leaves_unread_is_bounded(router, gone, message, fits):
    with full(router, b"slow"):
        for _ in range(fits):
            router.send(b"slow", message)
        assert gone == []
        router.send(b"slow", message)
        assert gone == [b"slow"]
    assert not router.has_backlog
    assert (router.backlogs.load.messages, router.backlogs.load.nbytes) == (0, 0)


@bounded(MAX_ALL_PENDING_BYTES=200_000)
def test_slowest_client_is_dropped_first(router, gone):
    with full(router, b"s1"), full(router, b"s2"):
        router.send(b"s1", finished("small", tokens=1000))
        router.send(b"s2", finished("large", tokens=40_000))
        assert gone == []
        router.send(b"s1", finished("the drop", tokens=10_000))
        assert gone == [b"s2"]
        assert b"s1" in router.backlogs


@bounded(SEAL_BYTES=50_000)
def test_taken_requests_are_no_load(router):
    with full(router, b"slow") as (slow, _):
        for number in range(20):
            router.send(b"slow", finished(str(number), tokens=5000, step=number))
            router.send(b"slow", AbortReqOutput(id=f"reply {number}", aborted=0)) if number == 7 else None
        assert router.backlogs.load.messages == 22
        assert len(router.backlogs[b"slow"].frames) > 3, "merged into messages of bounded size"
        rids: list[str] = []
        while len(rids) < 20:
            router.retry()
            rids += [r.rid for m in slow.received() if isinstance(m, BatchTokenOutput) for r in m.finished]
    assert rids == [str(number) for number in range(20)]
    assert (router.backlogs.load.messages, router.backlogs.load.nbytes) == (0, 0)


@bounded(HIGH_WATER_MARK=2, LINGER_S=60.0)  # how soon the client takes everything is not the question
def test_closing_delivers_what_still_waits(router):
    with full(router, b"slow", receive_hwm=0) as (slow, sent):  # its own thread takes what comes
        for number in range(200):
            router.send(b"slow", AbortReqOutput(id=str(number), aborted=0))
        router.close()
        received = [slow.receive() for _ in range(sent + 200)]
        assert [message.id for message in received[sent:]] == [str(number) for number in range(200)]


@bounded(LINGER_S=0.05)
def test_closing_does_not_wait_for_ever(endpoint):
    router = Router(endpoint, lambda _: None)
    with full(router, b"slow"):
        router.close()


class Full:
    """A socket that takes nothing."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket

    def send_multipart(self, *message: object) -> None:
        raise zmq.Again

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


class ShortOfMemory:
    """A socket whose ``fails``-th frame finds no memory, after it has been taken off the wire."""

    def __init__(self, socket: zmq.Socket, fails: int) -> None:
        self._socket, self._left = socket, fails

    def recv(self, *flags: int, **options: bool) -> object:
        frame = self._socket.recv(*flags, **options)
        self._left -= 1
        if self._left == 0:
            raise MemoryError
        return frame

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


@pytest.mark.parametrize("frame", [1, 2, 3, 4])
def test_a_message_without_memory_is_dropped_as_a_whole(router, frame):
    with met(router, b"C1") as client:
        router.socket = ShortOfMemory(router.socket, frame)
        client.send(b"header", b"one", b"two")
        client.send(b"next")
        assert hear_from(router, b"C1")[0] == [(b"C1", 0)], "the next one"
        if frame > 1:  # else nobody knows whose it was
            reply = client.receive()
            assert (reply.code, reply.id) == ("out_of_memory", "")


def test_text_that_utf8_cannot_hold_waits_like_any_other():
    waiting = send_queues.Backlogs()
    waiting.begin(b"client", [b"first"])
    reason = FinishReason(type="error", message="no \udc80")
    result = msgspec.structs.replace(result_of("r"), finish_reason=reason)
    waiting.append(b"client", BatchTokenOutput(step=1, finished=[result]))
    waiting[b"client"].pop()
    (frame,) = waiting[b"client"].head()
    assert decode_reply(frame).finished[0].finish_reason.message == "no \\udc80"


def test_frames_share_the_bound_of_a_call(router):
    with RawClient(router.endpoint, identity=b"c1") as client:
        send_frames(client, encode(GetStatusReqInput()), MAX_FRAMES - 1)
        messages, calls = hear_from(router, b"c1")
        assert messages == [(b"c1", MAX_FRAMES - 1)], "as many as a message may have"
        assert calls >= MAX_FRAMES // router_socket.FRAMES_PER_DRAIN
        for _ in range(10):
            send_frames(client, encode(GetStatusReqInput()), 3000)
        router.socket.poll(20_000)
        seen = []
        while len(seen) < 10:
            messages = heard(router)
            assert len(messages) <= 2, "a call takes 4,096 frames, and what was begun before"
            seen += messages
    assert seen == [(b"c1", 3000)] * 10


def test_an_overlong_message_is_refused_by_its_id(router, gone):
    count = 4 * router_socket.DISCARDED_PER_DRAIN + MAX_FRAMES
    with (
        RawClient(router.endpoint, identity=b"long") as long,
        RawClient(router.endpoint, identity=b"other") as other,
    ):
        send_frames(long, encode(GetStatusReqInput(id="too long")), count)
        assert router.socket.poll(20_000)
        heard(router)
        other.send(GetStatusReqInput())
        messages, calls = hear_from(router, b"other")
        assert messages == [(b"other", 0)], "nothing of it reaches the handlers"
        assert calls >= 5, "no call reads it to the end"
        reply = long.receive()
        assert isinstance(reply, ErrorReply)
        assert (reply.id, reply.code) == ("too long", ErrorCode.MALFORMED_MESSAGE)
        assert str(MAX_FRAMES) in reply.message
        long.send(GetStatusReqInput())
        assert hear_from(router, b"long")[0] == [(b"long", 0)], "one such message is forgiven"
    assert gone == []


@bounded(MAX_MESSAGE_BYTES=100_000)
def test_a_message_of_too_many_bytes_is_refused(router):
    with RawClient(router.endpoint, identity=b"c1") as client:
        client.send(b"no header at all", bytes(60_000), bytes(60_000), bytes(60_000))
        client.send(GetStatusReqInput())
        assert hear_from(router, b"c1")[0] == [(b"c1", 0)]
        reply = client.receive()
    assert isinstance(reply, ErrorReply)
    assert (reply.id, reply.code) == ("", ErrorCode.MALFORMED_MESSAGE)


@bounded(MAX_FRAMES=10)
def test_a_client_of_many_overlong_messages_is_dropped(router, gone):
    with (
        RawClient(router.endpoint, identity=b"long") as long,
        RawClient(router.endpoint, identity=b"other") as other,
    ):
        for number in range(8):
            send_frames(long, encode(GetStatusReqInput(id=str(number))), 100)
        long.send(GetStatusReqInput())
        while not gone:
            heard(router)
        other.send(GetStatusReqInput())
        messages, _ = hear_from(router, b"other")
        assert messages == [(b"other", 0)], "of the dropped client nothing is heard any more"
        answers = [long.receive(), *long.received()]
    assert {type(answer) for answer in answers} == {ErrorReply}
    assert len(answers) <= router_socket.OVERLONG_MESSAGES + 1
    assert set(gone) == {b"long"}


def test_frames_without_end_reach_nobody(router, gone):
    path = router.endpoint.removeprefix("ipc://")

    def command(name: bytes, body: bytes) -> bytes:
        return b"\x04" + bytes([1 + len(name) + len(body), len(name)]) + name + body

    with socket.socket(socket.AF_UNIX) as peer, RawClient(router.endpoint, identity=b"other") as other:
        peer.connect(path)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        peer.sendall(command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER"))
        answer = b""
        while b"READY" not in answer:  # before its own, ZeroMQ takes no message
            answer += peer.recv(1024)
        for _ in range(1000):
            peer.sendall(b"\x01\x04more")
        other.send(GetStatusReqInput())
        assert hear_from(router, b"other")[0] == [(b"other", 0)]
        peer.sendall(b"\x00\x03end")
        assert router.socket.poll(20_000)
        ((client, buffers),) = heard(router)
        assert re.match(rb"\x00.{4}$", client, re.DOTALL)
        assert buffers == 1000
    assert gone == []
