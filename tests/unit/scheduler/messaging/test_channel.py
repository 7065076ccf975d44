"""The ROUTER under clients that are slow, silent, gone, or somebody else's scheduler."""

import contextlib
import os
import socket
import stat

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.raw_client import PATIENCE_MS, RawClient, rows
from support.waiting import eventually

from caesura.io_struct import (
    AbortReqOutput,
    BatchTokenOutput,
    CaesuraError,
    ErrorCode,
    FinishReason,
    GenerateReqOutput,
    GetStatusReqInput,
    StreamDelta,
    decode_reply,
)
from caesura.scheduler.messaging import router_socket, send_queues
from caesura.scheduler.messaging.router_socket import Router
from caesura.scheduler.messaging.send_queues import merge


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/s.sock"


@pytest.fixture
def gone():
    return []


@pytest.fixture
def router(endpoint, gone):
    with contextlib.closing(Router(endpoint, gone.append)) as router:
        yield router


def met(router: Router, name: bytes, **options: int) -> RawClient:
    with contextlib.ExitStack() as cleanup:
        client = cleanup.enter_context(RawClient(router.endpoint, identity=name, **options))
        client.send(GetStatusReqInput())
        assert router.socket.poll(PATIENCE_MS), "a name that is taken is never heard: no test uses one twice"
        assert [who for who, *_ in router.receive()] == [name]
        cleanup.pop_all()
    return client


def delta_of(*table: tuple[str, int, int, list[int]]) -> StreamDelta:
    tokens = [token for row in table for token in row[3]]
    return StreamDelta(
        rids=[row[0] for row in table],
        indices=np.asarray([row[1] for row in table], "<i4").tobytes(),
        starts=np.asarray([row[2] for row in table], "<i4").tobytes(),
        counts=np.asarray([len(row[3]) for row in table], "<i4").tobytes(),
        tokens=np.asarray(tokens, "<i4").tobytes(),
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


def refusal(endpoint: str) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        Router(endpoint, lambda _: None).close()
    return caught.value


def fill(router: Router, name: bytes) -> int:
    sent = 0
    while not router.has_backlog:
        router.send(name, AbortReqOutput(id=f"filler {sent}" + "." * 1000, aborted=0))
        sent += 1
        assert sent < 100_000
    return sent


def test_a_second_router_is_refused_and_the_first_keeps_its_traffic(router, tmp_path):
    for spelling in (router.endpoint, f"ipc://{tmp_path}/./s.sock"):
        assert refusal(spelling).code == ErrorCode.ENDPOINT_IN_USE
    with met(router, b"c1") as client:
        router.send(b"c1", AbortReqOutput(id="a", aborted=3))
        assert client.receive() == AbortReqOutput(id="a", aborted=3)


def test_an_endpoint_is_free_again_after_close(endpoint):
    for _ in range(2):
        Router(endpoint, lambda _: None).close()
    assert not os.path.exists(endpoint.removeprefix("ipc://"))


def test_a_socket_left_by_a_killed_scheduler_is_replaced(endpoint):
    left = socket.socket(socket.AF_UNIX)
    left.bind(endpoint.removeprefix("ipc://"))
    left.close()
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


def test_only_the_owner_may_connect(router, tmp_path):
    assert stat.S_IMODE(os.stat(tmp_path / "s.sock").st_mode) == 0o600


def test_the_longest_ipc_path(tmp_path):
    directory = tmp_path / "d"
    directory.mkdir()
    fits = f"{directory}/".ljust(107, "x")
    Router(f"ipc://{fits}", lambda _: None).close()
    assert "107 bytes" in refusal(f"ipc://{fits}x").message


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://[::]:0",
        "tcp://10.0.0.1:0",
        "tcp://example.com:0",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:-1",
        "tcp://:5555",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc://*",
        "ipc:///nonexistent/directory/s.sock",
        "ipc:///",
        "inproc://x",
        "udp://127.0.0.1:5",
        "http://127.0.0.1:80",
        "",
    ],
)
def test_an_impossible_address_is_refused_by_name(address):
    error = refusal(address)
    assert (error.code, error.detail["field"]) == (ErrorCode.INVALID_REQUEST, "endpoint")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tcp_on_loopback_with_a_free_port(host):
    with contextlib.closing(Router(f"tcp://{host}:0", lambda _: None)) as router:
        assert router.endpoint.startswith("tcp://127.0.0.1:")
        assert not router.endpoint.endswith(":0")
        met(router, b"c1").close()
        assert refusal(router.endpoint).code == ErrorCode.ENDPOINT_IN_USE


def test_twenty_thousand_messages_to_a_client_that_does_not_read(router):
    rids = [f"r{number}" for number in range(40)]
    with met(router, b"slow", receive_hwm=1) as slow, met(router, b"quick") as quick:
        longest_queue = 0
        for step in range(20_000):
            # Each sample streams 500 tokens, then its terminal message comes.
            number, at = divmod(step, 500)
            done = [result_of(rids[number], 500)] if at == 499 else []
            delta = None if done else delta_of((rids[number], 0, at, [step]))
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


def test_deltas_beyond_the_bound_leave_a_gap_and_results_stay(router, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_PENDING_DELTA_TOKENS", 10)
    with met(router, b"slow", receive_hwm=1) as slow:
        sent = fill(router, b"slow")
        router.send(b"slow", BatchTokenOutput(step=0, finished=[result_of("first")]))
        for step in range(25):
            router.send(b"slow", BatchTokenOutput(step=step, delta=delta_of(("r", 0, step, [step]))))
        router.send(b"slow", BatchTokenOutput(step=99, finished=[result_of("last")]))
        assert router.backlogs[b"slow"].load.tokens <= 10
        messages = []
        while len(messages) <= sent:
            router.retry()
            messages += slow.received()
    assert [m.id[:8] for m in messages[:sent]] == [f"filler {i}"[:8] for i in range(sent)]
    (output,) = messages[sent:]
    assert [result.rid for result in output.finished] == ["first", "last"]
    assert all(
        start + i == token for _, _, start, row, _ in rows(output.delta) for i, token in enumerate(row)
    )
    assert sum(len(row[3]) for row in rows(output.delta)) < 25


def test_taken_tokens_make_room_for_new_ones(router, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_PENDING_DELTA_TOKENS", 4)
    for name in (b"slow 1", b"slow 2", b"slow 3"):
        with met(router, name, receive_hwm=1) as slow:
            fill(router, name)
            for step in range(4):
                router.send(name, BatchTokenOutput(step=step, delta=delta_of(("r", 0, step, [step]))))
                router.send(name, AbortReqOutput(id="between", aborted=0))
            queue = router.backlogs[name]
            assert queue.load.tokens == 4
            while router.has_backlog:
                slow.received()
                router.retry()
            assert queue.load.tokens == 0


def test_order_is_kept_around_replies(router):
    with met(router, b"slow", receive_hwm=1) as slow:
        sent = fill(router, b"slow")
        for step in range(3):
            router.send(b"slow", BatchTokenOutput(step=step, delta=delta_of(("r", 0, step, [step]))))
        router.send(b"slow", AbortReqOutput(id="reply", aborted=1))
        for step in range(3, 6):
            router.send(b"slow", BatchTokenOutput(step=step, delta=delta_of(("r", 0, step, [step]))))
        messages = []
        while len(messages) < sent + 3:
            router.retry()
            messages += slow.received()
    before, reply, after = messages[sent:]
    assert rows(before.delta) == [("r", 0, 0, [0, 1, 2], [-0.0, -1.0, -2.0])]
    assert reply.id == "reply"
    assert rows(after.delta) == [("r", 0, 3, [3, 4, 5], [-3.0, -4.0, -5.0])]


def test_waiting_messages_are_encoded_once(router, monkeypatch):
    with met(router, b"slow"):
        monkeypatch.setattr(router, "socket", Full(router.socket))
        fill(router, b"slow")
        encoded = []
        monkeypatch.setattr(send_queues, "encode_reply", lambda message: encoded.append(message) or b"\x80")
        for step in range(50):
            router.send(b"slow", BatchTokenOutput(step=step, delta=delta_of(("r", 0, step, [step]))))
            router.retry()
        assert len(encoded) <= 1


def test_a_client_that_left_is_reported_and_forgotten(router, gone):
    client = met(router, b"c1", receive_hwm=1)
    fill(router, b"c1")
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


def test_a_client_that_never_reads_its_replies_counts_as_gone(router, gone, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_PENDING_MESSAGES", 50)
    with met(router, b"slow", receive_hwm=1):
        fill(router, b"slow")
        for number in range(49):
            router.send(b"slow", AbortReqOutput(id=str(number), aborted=0))
        assert not gone
        router.send(b"slow", AbortReqOutput(id="one too many", aborted=0))
        assert gone == [b"slow"]
        assert not router.has_backlog


def test_closing_delivers_what_still_waits(endpoint, monkeypatch):
    monkeypatch.setattr(router_socket, "HIGH_WATER_MARK", 2)
    monkeypatch.setattr(
        router_socket, "LINGER_S", 60.0
    )  # the client takes everything: how soon is not the question
    router = Router(endpoint, lambda _: None)
    with met(router, b"slow") as slow:
        sent = fill(router, b"slow")
        for number in range(200):
            router.send(b"slow", AbortReqOutput(id=str(number), aborted=0))
        router.close()
        received = [slow.receive() for _ in range(sent + 200)]
        assert [message.id for message in received[sent:]] == [str(number) for number in range(200)]


def test_closing_does_not_wait_for_ever(endpoint, monkeypatch):
    monkeypatch.setattr(router_socket, "LINGER_S", 0.05)
    router = Router(endpoint, lambda _: None)
    with met(router, b"slow", receive_hwm=1):
        fill(router, b"slow")
        router.close()


SAMPLES = st.tuples(st.sampled_from("ab"), st.integers(0, 1))
STEPS = st.lists(
    st.lists(st.tuples(SAMPLES, st.integers(0, 3), st.booleans()), max_size=4), min_size=1, max_size=8
)


@settings(max_examples=examples(150))
@given(STEPS, st.sets(SAMPLES))
def test_merging_keeps_every_token_of_what_goes_on(steps, ended):
    position: dict[tuple[str, int], int] = {}
    expected: dict[tuple[str, int], dict[int, int]] = {}
    deltas = []
    for step in steps:
        table = []
        for (rid, index), count, lost in step:
            start = position.get((rid, index), 0)
            position[rid, index] = start + count
            tokens = [100 * start + i for i in range(count)]
            if lost:
                continue
            table.append((rid, index, start, tokens))
            if (rid, index) not in ended:
                expected.setdefault((rid, index), {}).update({start + i: t for i, t in enumerate(tokens)})
        deltas.append(delta_of(*table))
    merged: dict[tuple[str, int], dict[int, int]] = {}
    keys = []
    for rid, index, start, tokens, logprobs in rows(merge(deltas, ended)):
        assert logprobs == [-float(token) for token in tokens]
        keys.append((rid, index, start))
        merged.setdefault((rid, index), {}).update({start + i: t for i, t in enumerate(tokens)})
    assert {key: found for key, found in merged.items() if found} == {
        key: wanted for key, wanted in expected.items() if wanted
    }
    for rid, index in {key[:2] for key in keys}:
        starts = [key[2] for key in keys if key[:2] == (rid, index)]
        assert starts == sorted(starts), "a sample's rows come in order"


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
def test_a_message_that_there_is_no_memory_for_is_dropped_as_a_whole(router, monkeypatch, frame):
    with met(router, b"C1") as client:
        monkeypatch.setattr(router, "socket", ShortOfMemory(router.socket, frame))
        client.send(b"header", b"one", b"two")
        client.send(b"next")
        heard: list[tuple[bytes, bytes, int]] = []

        def both_are_read() -> bool:
            heard.extend((who, header, len(buffers)) for who, header, buffers in router.receive())
            return bool(heard)

        eventually(both_are_read)
        assert heard == [(b"C1", b"next", 0)]
        if frame > 1:  # else nobody knows whose it was
            reply = client.receive()
            assert (reply.code, reply.id) == ("out_of_memory", "")


def test_text_that_utf8_cannot_hold_waits_for_a_slow_client_like_any_other(router):
    waiting = send_queues.Backlogs()
    waiting.begin(b"client", [b"first"])
    reason = FinishReason(type="error", message="no \udc80")
    result = msgspec.structs.replace(result_of("r"), finish_reason=reason)
    waiting.append(b"client", BatchTokenOutput(step=1, finished=[result]))
    waiting[b"client"].pop()
    (frame,) = waiting[b"client"].head()
    assert decode_reply(frame).finished[0].finish_reason.message == "no \\udc80"
