"""The ROUTER under clients that send without end or read nothing: what one client costs is bounded."""

import contextlib
import re
import socket

import pytest
import zmq
from support.raw_client import RawClient

from caesura.io_struct import (
    AbortReqOutput,
    BatchTokenOutput,
    ErrorCode,
    ErrorReply,
    FinishReason,
    GenerateReqOutput,
    GetStatusReqInput,
    encode,
)
from caesura.io_struct.base import MAX_FRAMES
from caesura.scheduler.messaging import router_socket, send_queues
from caesura.scheduler.messaging.router_socket import Router


@pytest.fixture
def gone():
    return []


@pytest.fixture
def router(tmp_path, gone):
    with contextlib.closing(Router(f"ipc://{tmp_path}/s.sock", gone.append)) as router:
        yield router


def heard(router: Router) -> list[tuple[bytes, int]]:
    return [(client, len(buffers)) for client, _, buffers in router.receive()]


def hear_from(router: Router, name: bytes) -> tuple[list[tuple[bytes, int]], int]:
    messages: list[tuple[bytes, int]] = []
    calls = 0
    while name not in [client for client, _ in messages]:
        assert router.socket.poll(20_000), "a message that is not read to its end is still something to read"
        messages += heard(router)
        calls += 1
    return messages, calls


def send_frames(client: RawClient, header: bytes, count: int) -> None:
    client.socket.send(header, zmq.SNDMORE)
    for _ in range(count - 1):
        client.socket.send(b"", zmq.SNDMORE)
    client.socket.send(b"")


def result_of(rid: str, tokens: int) -> GenerateReqOutput:
    return GenerateReqOutput(
        rid=rid,
        output_ids=bytes(4 * tokens),
        finish_reason=FinishReason(type="length"),
        weight_versions=[],
        prompt_tokens=1,
        cached_tokens=0,
        seed=0,
    )


def fill(router: Router, name: bytes, client: RawClient) -> int:
    client.send(GetStatusReqInput())
    hear_from(router, name)
    sent = 0
    while name not in router.backlogs:
        router.send(name, AbortReqOutput(id=f"filler {sent}" + "." * 1000, aborted=0))
        sent += 1
        assert sent < 100_000
    return sent


def test_a_message_of_as_many_frames_as_it_may_have_arrives_whole_over_several_calls(router):
    with RawClient(router.endpoint, identity=b"c1") as client:
        send_frames(client, encode(GetStatusReqInput()), MAX_FRAMES - 1)
        messages, calls = hear_from(router, b"c1")
    assert messages == [(b"c1", MAX_FRAMES - 1)]
    assert calls >= MAX_FRAMES // router_socket.FRAMES_PER_DRAIN


def test_many_messages_of_many_frames_share_the_bound_of_a_call(router):
    with RawClient(router.endpoint, identity=b"c1") as client:
        for _ in range(10):
            send_frames(client, encode(GetStatusReqInput()), 3000)
        router.socket.poll(20_000)
        seen = []
        while len(seen) < 10:
            messages = heard(router)
            assert len(messages) <= 2, "a call takes 4,096 frames, and what was begun before"
            seen += messages
    assert seen == [(b"c1", 3000)] * 10


def test_an_overlong_message_is_refused_by_its_id_and_dropped_piece_by_piece(router, gone):
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


def test_a_message_of_too_many_bytes_is_refused(router, monkeypatch):
    monkeypatch.setattr(router_socket, "MAX_MESSAGE_BYTES", 100_000)
    with RawClient(router.endpoint, identity=b"c1") as client:
        client.send(b"no header at all", bytes(60_000), bytes(60_000), bytes(60_000))
        client.send(GetStatusReqInput())
        assert hear_from(router, b"c1")[0] == [(b"c1", 0)]
        reply = client.receive()
    assert isinstance(reply, ErrorReply)
    assert (reply.id, reply.code) == ("", ErrorCode.MALFORMED_MESSAGE)


def test_a_client_that_goes_on_with_overlong_messages_is_dropped(router, gone, monkeypatch):
    monkeypatch.setattr(router_socket, "MAX_FRAMES", 10)
    with (
        RawClient(router.endpoint, identity=b"long") as long,
        RawClient(router.endpoint, identity=b"other") as other,
    ):
        for number in range(8):
            send_frames(long, encode(GetStatusReqInput(id=str(number))), 100)
        long.send(GetStatusReqInput())
        assert isinstance(long_reply(router, long), ErrorReply)
        answered = 1
        while not gone:
            heard(router)
        other.send(GetStatusReqInput())
        messages, _ = hear_from(router, b"other")
        assert messages == [(b"other", 0)], "of the dropped client nothing is heard any more"
        answered += len([message for message in long.received() if isinstance(message, ErrorReply)])
    assert set(gone) == {b"long"}
    assert answered <= router_socket.OVERLONG_MESSAGES + 1


def long_reply(router: Router, client: RawClient) -> object:
    while not client.socket.poll(0):
        heard(router)
    return client.receive()


def test_results_that_a_slow_client_leaves_unread_are_bounded_in_number(router, gone, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_PENDING_MESSAGES", 50)
    with RawClient(router.endpoint, identity=b"slow", receive_hwm=1) as slow:
        fill(router, b"slow", slow)
        for number in range(49):
            router.send(b"slow", BatchTokenOutput(step=number, finished=[result_of(str(number), 1)]))
        assert gone == []
        router.send(b"slow", BatchTokenOutput(step=50, finished=[result_of("one too many", 1)]))
        assert gone == [b"slow"]
    assert not router.has_backlog
    assert (router.backlogs.load.messages, router.backlogs.load.nbytes) == (0, 0)


def test_results_that_a_slow_client_leaves_unread_are_bounded_in_bytes(router, gone, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_PENDING_BYTES", 100_000)
    with RawClient(router.endpoint, identity=b"slow", receive_hwm=1) as slow:
        fill(router, b"slow", slow)
        for number in range(5):
            router.send(b"slow", BatchTokenOutput(step=number, finished=[result_of(str(number), 5000)]))
        assert gone == [b"slow"]


def test_slowest_client_is_dropped_first(router, gone, monkeypatch):
    monkeypatch.setattr(send_queues, "MAX_ALL_PENDING_BYTES", 200_000)
    with (
        RawClient(router.endpoint, identity=b"s1", receive_hwm=1) as first,
        RawClient(router.endpoint, identity=b"s2", receive_hwm=1) as second,
    ):
        fill(router, b"s1", first)
        fill(router, b"s2", second)
        router.send(b"s1", BatchTokenOutput(step=0, finished=[result_of("small", 1000)]))
        router.send(b"s2", BatchTokenOutput(step=0, finished=[result_of("large", 40_000)]))
        assert gone == []
        router.send(b"s1", BatchTokenOutput(step=1, finished=[result_of("the drop", 10_000)]))
        assert gone == [b"s2"]
        assert b"s1" in router.backlogs


def test_taken_requests_are_no_load(router, monkeypatch):
    monkeypatch.setattr(send_queues, "SEAL_BYTES", 50_000)
    with RawClient(router.endpoint, identity=b"slow", receive_hwm=1) as slow:
        sent = fill(router, b"slow", slow)
        for number in range(20):
            router.send(b"slow", BatchTokenOutput(step=number, finished=[result_of(str(number), 5000)]))
            router.send(b"slow", AbortReqOutput(id=f"reply {number}", aborted=0)) if number == 7 else None
        assert router.backlogs.load.messages == 22
        assert len(router.backlogs[b"slow"].frames) > 3, "merged into messages of bounded size"
        messages = []
        while router.has_backlog:
            router.retry()
            messages += slow.received()
        while len([m for m in messages if isinstance(m, BatchTokenOutput)]) < 4:
            messages.append(slow.receive())
        rids = [r.rid for m in messages if isinstance(m, BatchTokenOutput) for r in m.finished]
        while len(rids) < 20:
            rids += [r.rid for r in slow.receive().finished]
    assert rids == [str(number) for number in range(20)]
    assert len(messages) >= sent
    assert (router.backlogs.load.messages, router.backlogs.load.nbytes) == (0, 0)


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
