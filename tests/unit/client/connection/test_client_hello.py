"""The first exchange on a connection."""

import msgspec
import pytest
import zmq
from support.fake_scheduler import FakeScheduler, status_reply, welcome
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import EngineDied, SchedulerClient, ShuttingDown, VersionMismatch
from caesura.io_struct import (
    WIRE_VERSION,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    GetStatusReqOutput,
    HelloReqInput,
    decode_request,
    encode,
)

OURS = ".".join(map(str, WIRE_VERSION))


def refuse(hello):
    detail = {"engine": "2.7", "client": OURS}
    return [ErrorReply(id=hello.id, code=ErrorCode.VERSION_MISMATCH, message="another wire", detail=detail)]


def accept(hello):
    (answer,) = welcome(hello, "0" * 16)
    answer.wire_major, answer.wire_minor = 2, 7
    return [answer]


def know_nothing(hello):
    return [ErrorReply(id=hello.id, code=ErrorCode.MALFORMED_MESSAGE, message="not a Caesura message")]


OTHERS = {refuse: "2.7", accept: "2.7", know_nothing: r"0 \(it knows no hello\)"}


@pytest.mark.parametrize("greet", OTHERS, ids=lambda greet: greet.__name__)
def test_another_version_fails_every_call_with_both_versions(endpoint, greet, connect):
    sentence = (
        rf"^this client \(caesura .*\) speaks wire {OURS}, "
        rf"the engine at {endpoint} speaks wire {OTHERS[greet]} "
    )
    with FakeScheduler(endpoint, greet=greet) as fake, connect(endpoint) as client:
        for call in (client.status, client.pause, lambda **_: client.generate([1], timeout=PATIENCE)):
            with pytest.raises(VersionMismatch, match=sentence):
                call(timeout=PATIENCE)
        assert fake.requests.empty(), "nothing but hellos has been sent"
        assert client.incarnation is None


def test_a_newer_minor_version_is_welcome(endpoint):
    def greet(hello):
        (answer,) = welcome(hello, "f" * 16)
        fields = msgspec.to_builtins(answer) | {"wire_minor": WIRE_VERSION[1] + 5, "mood": "good"}
        return [msgspec.msgpack.encode(fields)]

    with FakeScheduler(endpoint, greet=greet), SchedulerClient(endpoint) as client:
        assert client.status(timeout=PATIENCE).step == 12
        assert client.incarnation == "f" * 16


def test_the_hello_goes_first_and_alone(endpoint):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(endpoint)
        status = GetStatusReqInput(id="s")
        with SchedulerClient(endpoint) as client:
            waiting = client.start(status, GetStatusReqOutput)
            assert router.poll(10_000)
            peer, frame = router.recv_multipart()
            hello = decode_request(frame)
            assert isinstance(hello, HelloReqInput)
            assert (hello.wire_major, hello.wire_minor) == WIRE_VERSION
            assert "caesura" in hello.client
            assert not router.poll(200), "the rest waits for the answer"
            router.send_multipart([peer, encode(*welcome(hello, "a" * 16))])
            assert router.poll(10_000)
            assert decode_request(router.recv_multipart()[1]) == status
            router.send_multipart([peer, encode(status_reply(status))])
            assert waiting.result(PATIENCE).step == 12


def test_one_hello_for_a_connection_and_a_new_incarnation_after_it(endpoint):
    with SchedulerClient(endpoint) as client:
        assert client.incarnation is None
        incarnations = []
        for _ in range(2):
            with FakeScheduler(endpoint) as fake:
                while True:
                    try:
                        client.status(timeout=PATIENCE)
                        break
                    except EngineDied:  # the end of the one before had not been noticed yet
                        continue
                client.generate([[1], [2]], timeout=PATIENCE)
                assert fake.hellos == 1
                assert client.incarnation == fake.incarnation
                incarnations.append(client.incarnation)
        assert incarnations[0] != incarnations[1]


def test_hello_is_retried_after_a_stopping_engine_refused_it(endpoint):
    refusals = []

    def stopping(hello):
        if len(refusals) < 3:
            refusals.append(hello)
            return [ErrorReply(id=hello.id, code=ErrorCode.SHUTTING_DOWN, message="going")]
        return welcome(hello, "b" * 16)

    with FakeScheduler(endpoint, greet=stopping), SchedulerClient(endpoint) as client:
        for _ in range(20):
            try:
                assert client.status(timeout=PATIENCE).step == 12
                break
            except (ShuttingDown, EngineDied):
                continue
        assert client.incarnation == "b" * 16
