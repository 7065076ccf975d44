"""The way to an engine: what a client finds there, the first exchange, an engine that goes or is replaced."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import support.fake_scheduler
import zmq
from support import engine_template
from support.fake_scheduler import FakeScheduler, VanishError, answer, silent, status_reply, welcome
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    AsyncControlClient,
    AsyncSchedulerClient,
    ControlClient,
    EngineDied,
    InvalidRequest,
    SchedulerClient,
    ShuttingDown,
    VersionMismatch,
)
from caesura.client.connection.client_options import ChannelOptions
from caesura.client.connection.link import LATE_S, Link
from caesura.client.connection.shared_socket import MOST_AT_ONCE, SharedSocket, monitored
from caesura.io_struct import (
    WIRE_VERSION,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    GetStatusReqOutput,
    HelloReqInput,
    Keepalive,
    decode_reply,
    decode_request,
    encode,
)
from caesura.process.contract import SHUT_SUFFIX

FOR_EVER = 3600.0
"""A test would fail by its own time limit before a client that waits."""


@pytest.fixture
def patient(monkeypatch):
    """A call that waited for a scheduler would do so for an hour."""
    monkeypatch.setattr("caesura.client.connection.client_options.DEFAULT_CONNECT_TIMEOUT_S", FOR_EVER)


async def ask(endpoint):
    async with AsyncControlClient(endpoint) as client:
        return await client.status()


def refusals(endpoint):
    with ControlClient(endpoint) as client:
        for _ in range(2):
            with pytest.raises(EngineDied) as caught:
                client.status()
            yield caught.value.message
    with pytest.raises(EngineDied) as caught:
        asyncio.run(ask(endpoint))
    yield caught.value.message


def status_at_last(client):
    while True:
        with contextlib.suppress(EngineDied, ShuttingDown):
            return client.status(timeout=PATIENCE)


def stale(path):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as ended:
        ended.bind(str(path))


@pytest.mark.parametrize(
    "prepare,sentence",
    [
        (
            lambda path: None,
            (
                "no scheduler answers at ipc://{0}: there is no such socket file; "
                "`caesura scheduler --endpoint ipc://{0}` starts one"
            ),
        ),
        (stale, "nobody listens at its socket file"),
        (lambda path: path.write_text(""), "the file is not a socket"),
        (lambda path: Path(f"{path}{SHUT_SUFFIX}").write_text(""), "takes no more clients"),
    ],
    ids=["missing", "stale", "no socket", "no room"],
)
@pytest.mark.usefixtures("patient")
def test_a_socket_file_without_scheduler_is_reported(tmp_path, prepare, sentence):
    prepare(tmp_path / "s")
    assert all(sentence.format(tmp_path / "s") in each for each in refusals(f"ipc://{tmp_path}/s"))


@pytest.mark.usefixtures("patient")
def test_a_port_without_a_listener_is_reported_at_once():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there meanwhile
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert all(f"no scheduler answers at {endpoint}: nobody" in each for each in refusals(endpoint))


@pytest.mark.usefixtures("patient")
def test_a_foreign_listener_at_the_port_is_reported_at_once():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:

        def hang_up():
            with contextlib.suppress(OSError):  # it was closed
                while True:
                    other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        try:
            said = f"what listens at {endpoint} broke the connection off: it is no scheduler, one that asks"
            assert all(each.startswith(said) for each in refusals(endpoint))
        finally:
            other.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "endpoint,sentence",
    [
        (None, "endpoint = None must be ipc://PATH or tcp://HOST:PORT"),
        ("", "endpoint = '' must be ipc://PATH or tcp://HOST:PORT"),
        ("/tmp/s", r"must be ipc://PATH or tcp://HOST:PORT \(did you mean ipc:///tmp/s\?\)"),
        ("localhost:5555", r"\(did you mean tcp://localhost:5555\?\)"),
        ("http://localhost:30000", "must be ipc://PATH or tcp://HOST:PORT"),
        ("tcp://localhost", "must be tcp://HOST:PORT with a port from 1 to 65535"),
        ("tcp://localhost:99999", "must be tcp://HOST:PORT with a port from 1 to 65535"),
        ("ipc://" + "x" * 200, "is too long: an ipc:// path has at most 107 bytes"),
        ("tcp://a b:5", "cannot be connected to: Invalid argument"),
    ],
)
def test_an_invalid_address_is_refused_in_a_sentence(endpoint, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        ControlClient(endpoint)
    with pytest.raises(InvalidRequest, match=sentence):
        asyncio.run(ask(endpoint))


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
def test_another_version_fails_every_call(endpoint, greet, connect):
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


def test_each_connection_says_hello_once(endpoint):
    with SchedulerClient(endpoint) as client:
        assert client.incarnation is None
        incarnations = []
        for _ in range(2):
            with FakeScheduler(endpoint) as fake:
                status_at_last(client)  # the end of the one before may not have been noticed yet
                client.generate([[1], [2]], timeout=PATIENCE)
                assert fake.hellos == 1
                assert client.incarnation == fake.incarnation
                incarnations.append(client.incarnation)
        assert incarnations[0] != incarnations[1]


def test_hello_is_retried_after_a_refusal(endpoint):
    refusals = []

    def stopping(hello):
        if len(refusals) < 3:
            refusals.append(hello)
            return [ErrorReply(id=hello.id, code=ErrorCode.SHUTTING_DOWN, message="going")]
        return welcome(hello, "b" * 16)

    with FakeScheduler(endpoint, greet=stopping), SchedulerClient(endpoint) as client:
        assert status_at_last(client).step == 12
        assert client.incarnation == "b" * 16


FAKE = f"import runpy; runpy.run_path({support.fake_scheduler.__file__!r}, run_name='__main__')"
RECONNECTS_S = 0.6
"""Longer than libzmq waits before it would reconnect by itself; nothing here depends on how much longer."""


def unwatched():
    return SharedSocket(lambda socket: None, lambda socket: None)


class Pumped:
    """A link that the test drives, and all that came of it."""

    def __init__(self, endpoint, connect_timeout=PATIENCE, keepalive_timeout=None, shared=None):
        self.received = []
        self.lost = []
        self.unanswered = 0
        self.link = Link(
            endpoint,
            ChannelOptions(connect_timeout, keepalive_timeout),
            shared or unwatched(),
            pending=lambda: self.unanswered > 0,
            receive=lambda frames: self.received.append(decode_reply(frames[0])),
            lost=lambda error, final: self.lost.append(error),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.link.close()

    def send(self, request):
        self.unanswered += 1
        self.link.send((encode(request),))

    def until(self, happened):
        while not happened():
            self.link.pump()
            time.sleep(0.002)


def test_a_new_engine_gets_nothing_meant_for_the_old_one(endpoint):
    with Pumped(endpoint) as old:
        with FakeScheduler(endpoint, silent) as first:
            old.send(GetStatusReqInput(id="before"))
            old.until(lambda: not first.requests.empty())
            greeted = old.link.incarnation
        old.send(GetStatusReqInput(id="a pause from the past"))  # nobody has looked since the engine went
        with FakeScheduler(endpoint) as second:
            time.sleep(RECONNECTS_S)
            old.link.pump()
            lost = f"the connection to {endpoint} was lost [engine_died]"
            assert [str(error) for error in old.lost] == [lost]
            old.send(GetStatusReqInput(id="after"))
            old.until(lambda: old.received)
            assert [message.id for message in old.received] == ["after"]
            assert second.next_request().id == "after"
            assert second.requests.empty()
            assert len(old.lost) == 1
            assert greeted != old.link.incarnation == second.incarnation


def vanish(request):
    raise VanishError


def test_calls_to_an_engine_known_to_be_gone_fail_fast(endpoint):
    with SchedulerClient(endpoint, connect_timeout=PATIENCE) as client:
        with FakeScheduler(endpoint, vanish), pytest.raises(EngineDied, match="lost"):
            client.status(timeout=PATIENCE)
        for _ in range(5):
            with pytest.raises(EngineDied, match="no scheduler answers"):
                client.status(timeout=PATIENCE)
        with FakeScheduler(endpoint):
            assert client.status(timeout=PATIENCE).step == 12


async def test_coroutines_share_the_wait_for_an_engine(endpoint):
    async with AsyncSchedulerClient(endpoint, connect_timeout=PATIENCE) as client:
        with FakeScheduler(endpoint, vanish), pytest.raises(EngineDied, match="lost"):
            await client.status(timeout=PATIENCE)
        for _ in range(3):
            calls = [client.status(timeout=PATIENCE) for _ in range(20)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, EngineDied) for error in failed)
            assert all("no scheduler answers" in str(error) for error in failed)


def test_an_engine_that_comes_back_soon_is_waited_for(endpoint, monkeypatch):
    monkeypatch.setattr("caesura.client.connection.link.RECONNECT_S", PATIENCE)
    with SchedulerClient(endpoint, connect_timeout=PATIENCE) as client:
        with FakeScheduler(endpoint, vanish), pytest.raises(EngineDied, match="lost"):
            client.status(timeout=PATIENCE)
        waiting = client.submit([1])
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        with FakeScheduler(endpoint):
            assert waiting.result(PATIENCE).output_ids == [1, 0]


def test_an_engine_that_says_nothing_counts_as_hung(endpoint, connect):
    with FakeScheduler(endpoint, silent) as fake, connect(endpoint, keepalive_timeout=0.3) as client:
        pending = client.submit([1])
        with pytest.raises(EngineDied, match=r"silent for 0\.3 s"):
            client.status(timeout=PATIENCE)
        with pytest.raises(EngineDied, match="silent"):
            pending.result(PATIENCE)
        assert fake.hellos >= 1


def test_a_stopped_engine_is_waited_for_once(endpoint):
    command = [sys.executable, "-c", FAKE, "--endpoint", endpoint, "--ready-fd", "1", "--lifeline-fd", "0"]
    with engine_template.Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()
            with SchedulerClient(endpoint, connect_timeout=PATIENCE, keepalive_timeout=0.3) as client:
                assert client.status(timeout=PATIENCE).pid == child.pid
                os.kill(child.pid, signal.SIGSTOP)
                os.waitpid(child.pid, os.WUNTRACED)
                for _ in range(3):
                    with pytest.raises(EngineDied):
                        client.status(timeout=PATIENCE)
                os.kill(child.pid, signal.SIGCONT)
                assert status_at_last(client).pid == child.pid
        finally:
            child.kill()


def test_keepalives_are_signs_of_life(endpoint):
    with FakeScheduler(endpoint, silent) as fake, SchedulerClient(endpoint, keepalive_timeout=2.0) as client:
        pending = client.start(GetStatusReqInput(id="s"), GetStatusReqOutput)
        fake.next_request()
        for step in range(15):
            time.sleep(0.2)  # in sum longer than the silence that is allowed
            fake.push(Keepalive(step=step))
        fake.push(status_reply(GetStatusReqInput(id="s")))
        assert pending.result(PATIENCE).step == 12


def test_idle_and_stopped_clients_suspect_no_engine(endpoint):
    with FakeScheduler(endpoint, silent) as fake, Pumped(endpoint, keepalive_timeout=0.1) as client:
        client.until(lambda: client.link.incarnation)
        time.sleep(0.3)
        client.link.pump()
        assert client.link.deadline is None, "nothing is pending, so nothing is due"
        client.send(GetStatusReqInput(id="s"))
        client.until(lambda: not fake.requests.empty())
        time.sleep(LATE_S + 0.3)  # as if this process had been stopped: the silence is long over
        client.link.pump()
        assert client.lost == []
        fake.push(status_reply(GetStatusReqInput(id="s")))
        client.until(lambda: client.received)
        assert client.lost == []


class Flooded:
    """A socket on which the connection ``name`` sends without end, in turn with what others send."""

    def __init__(self, router, name):
        self.router, self.name, self.taken = router, name, 0

    def get(self, option):
        return zmq.POLLIN

    def recv_multipart(self):
        self.taken += 1
        assert self.taken < 100 * MOST_AT_ONCE
        if self.taken % 2 and self.router.get(zmq.EVENTS) & zmq.POLLIN:
            return self.router.recv_multipart()
        return [self.name, encode(Keepalive(step=1))]

    def __getattr__(self, name):
        return getattr(self.router, name)


def test_a_flood_of_messages_leaves_time_for_others(endpoint):
    """One turn takes a number of them, whatever the engines send meanwhile; the loop takes the next turn."""

    async def main():
        async with AsyncControlClient(endpoint) as client:
            await client.status()
            shared = client.channel._shared
            flood = shared._router = Flooded(shared._router, client.channel._link._name)
            taken = []
            for _ in range(3):
                shared.pump()
                taken.append(flood.taken)
                await asyncio.sleep(0)
            assert taken[0] == MOST_AT_ONCE
            assert flood.taken >= 4 * MOST_AT_ONCE  # turns of the loop's own were in between
            shared._router = flood.router

    with FakeScheduler(endpoint):
        asyncio.run(main())


def test_a_loss_is_reported_in_a_flood_of_another_engine(endpoint):
    """Messages of the lost one come first, but its end does not wait for that of the flood."""
    last_words = [Keepalive(step=step) for step in range(3 * MOST_AT_ONCE)]

    def die(request):
        yield from last_words
        raise VanishError

    shared = unwatched()
    with (
        FakeScheduler(f"{endpoint}-other"),
        FakeScheduler(endpoint, die),
        Pumped(f"{endpoint}-other", shared=shared) as other,
        Pumped(endpoint, shared=shared) as client,
    ):
        other.until(lambda: other.link.incarnation)
        client.send(GetStatusReqInput(id="s"))
        flood = shared._router = Flooded(shared._router, other.link._name)
        while not client.lost:
            flood.taken = 0
            client.link.pump()
        assert client.received == last_words
        assert other.lost == []
        shared._router = flood.router


def test_an_engine_that_loads_is_waited_for(endpoint):
    held = []

    def load(hello):
        held.append(hello)
        return []

    with (
        FakeScheduler(endpoint, answer, load) as fake,
        SchedulerClient(endpoint, connect_timeout=0.5, keepalive_timeout=0.1) as client,
    ):
        waiting = client.submit([1])
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        assert fake.requests.empty()
        for message in support.fake_scheduler.welcome(held[0], "0" * 16):
            fake.push(message)
        assert waiting.result(PATIENCE).output_ids == [1, 0]
        assert client.incarnation == "0" * 16


def test_monitor_output_is_not_kept():
    known = len(zmq.Event._value2member_map_)
    for milliseconds in range(1000, 1100):
        report = struct.pack("=Hi", zmq.EVENT_CONNECT_RETRIED, milliseconds)
        assert monitored(report) == (zmq.EVENT_CONNECT_RETRIED, milliseconds)
    assert len(zmq.Event._value2member_map_) == known
