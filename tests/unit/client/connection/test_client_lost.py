"""An engine that goes, is replaced or hangs, whatever the client was doing meanwhile."""

import asyncio
import ctypes
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time

import pytest
import support.fake_scheduler
import zmq
from support.fake_scheduler import FakeScheduler, VanishError, answer, silent, status_reply
from support.waiting import PATIENCE_S as PATIENCE

import caesura.client.connection.link
from caesura.client import AsyncSchedulerClient, EngineDied, SchedulerClient
from caesura.client.connection.link import Link, monitored
from caesura.client.connection.options import ChannelOptions
from caesura.io_struct import (
    GenerateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    Keepalive,
    decode_reply,
    encode,
)

FAKE = support.fake_scheduler.__file__
RECONNECTS_S = 0.6
"""Longer than libzmq waits before it would reconnect by itself; nothing here depends on how much longer."""


class Pumped:
    """A link that the test drives, and all that came of it."""

    def __init__(self, endpoint, connect_timeout=PATIENCE, keepalive_timeout=None):
        self.received = []
        self.lost = []
        self.unanswered = 0
        self.link = Link(
            endpoint,
            ChannelOptions(connect_timeout, keepalive_timeout),
            pending=lambda: self.unanswered > 0,
            receive=lambda frames: self.received.append(decode_reply(frames[0])),
            lost=lambda error, final: self.lost.append(error),
            watch=lambda socket: None,
            unwatch=lambda socket: None,
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


def test_an_engine_replaced_between_two_looks_is_noticed(endpoint):
    with Pumped(endpoint) as old:
        with FakeScheduler(endpoint, silent) as first:
            old.send(GetStatusReqInput(id="before"))
            old.until(lambda: not first.requests.empty())
            greeted = old.link.incarnation
        with FakeScheduler(endpoint) as second:
            time.sleep(RECONNECTS_S)
            old.link.pump()
            assert [str(error) for error in old.lost] == [
                f"the connection to {endpoint} was lost [engine_died]"
            ]
            old.send(GetStatusReqInput(id="after"))
            old.until(lambda: old.received)
            assert [message.id for message in old.received] == ["after"]
            assert [second.next_request().id] == ["after"]
            assert second.requests.empty()
            assert len(old.lost) == 1
            assert greeted != old.link.incarnation == second.incarnation


def test_messages_sent_before_noticing_the_loss_are_dropped(endpoint):
    with Pumped(endpoint) as old:
        with FakeScheduler(endpoint, silent) as first:
            old.send(GetStatusReqInput())
            old.until(lambda: not first.requests.empty())
        old.send(GetStatusReqInput(id="a pause from the past"))  # nobody has looked since the engine went
        with FakeScheduler(endpoint) as second:
            time.sleep(RECONNECTS_S)
            old.until(lambda: old.lost)
            old.send(GetStatusReqInput(id="after"))
            old.until(lambda: old.received)
            assert second.next_request().id == "after"
            assert second.requests.empty()


def test_an_engine_replaced_while_the_loop_was_busy(endpoint):
    async def main():
        async with AsyncSchedulerClient(endpoint) as client:
            with FakeScheduler(endpoint, silent) as first:
                lost = await client.submit([1])
                await asyncio.to_thread(first.next_request)
            with FakeScheduler(endpoint) as second:
                time.sleep(RECONNECTS_S)  # noqa: ASYNC251  the loop is busy
                fresh = client.start(GetStatusReqInput(id="fresh"), GetStatusReqOutput)
                with pytest.raises(EngineDied, match="lost"):
                    await lost.result(PATIENCE)
                assert (await asyncio.wait_for(fresh, PATIENCE)).id == "fresh"
                assert second.next_request().id == "fresh"
                assert second.requests.empty()
                assert client.incarnation == second.incarnation

    asyncio.run(main(), debug=True)


RESTARTER = """
    import os, subprocess, sys, time
    def start(behave):
        ready, write = os.pipe()
        lifeline, held = os.pipe()
        options = ["--ready-fd", str(write), "--lifeline-fd", str(lifeline), "--behave", behave]
        child = subprocess.Popen([sys.executable, *sys.argv[2:], *options], pass_fds=(write, lifeline))
        os.close(write)
        os.read(ready, 1000)
        return child
    first = start("silent")
    print("first", flush=True)
    sys.stdin.readline()
    first.kill(), first.wait()
    second = start("well")
    time.sleep(float(sys.argv[1]))
    print("second", flush=True)
    sys.stdin.readline()
    second.kill(), second.wait()
"""


def test_an_engine_replaced_while_another_thread_held_the_interpreter(endpoint):
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(RESTARTER),
        str(RECONNECTS_S),
        FAKE,
        "--endpoint",
        endpoint,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as restarter:
        assert restarter.stdin is not None
        assert restarter.stdout is not None
        try:
            assert restarter.stdout.readline() == b"first\n"
            with SchedulerClient(endpoint) as client:
                lost = client.submit([1])
                pid = client.status(timeout=PATIENCE).pid  # so the submission before it has been sent
                line = ctypes.create_string_buffer(16)
                restarter.stdin.write(b"restart\n")
                # PyDLL keeps the interpreter's lock: no other thread of this process runs before the line is
                # there.
                ctypes.PyDLL(None).read(restarter.stdout.fileno(), line, 16)
                assert line.value.startswith(b"second")
                assert client.status(timeout=PATIENCE).pid != pid
                with pytest.raises(EngineDied, match="lost"):
                    lost.result(PATIENCE)
        finally:
            restarter.stdin.write(b"end\n")


STOPPED = {
    "blocking": """
        import sys
        from caesura.client import EngineDied, SchedulerClient
        client = SchedulerClient(sys.argv[1])
        lost = client.submit([1])
        print("pending", flush=True)
        try:
            lost.result()
        except EngineDied as error:
            print(error.code)
        print(client.generate([2]).output_ids)
    """,
    "asyncio": """
        import asyncio, sys
        from caesura.client import AsyncSchedulerClient, EngineDied
        async def main():
            client = AsyncSchedulerClient(sys.argv[1])
            lost = await client.submit([1])
            print("pending", flush=True)
            try:
                await lost.result()
            except EngineDied as error:
                print(error.code)
            print((await client.generate([2])).output_ids)
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("kind", STOPPED)
def test_an_engine_replaced_while_the_clients_process_was_stopped(endpoint, kind):
    first = FakeScheduler(endpoint, silent)
    command = [sys.executable, "-c", textwrap.dedent(STOPPED[kind]), endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            first.next_request()
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            first.close()
            with FakeScheduler(endpoint) as second:
                os.kill(child.pid, signal.SIGCONT)
                assert child.communicate(timeout=PATIENCE)[0] == "pending\nengine_died\n[2, 0]\n"
                assert second.next_request(GenerateReqInput).input_ids == [2]
                assert second.requests.empty()
        finally:
            child.kill()


def vanish(request):
    raise VanishError


def test_calls_to_an_engine_that_is_known_to_be_gone_fail_fast(endpoint):
    with SchedulerClient(endpoint, connect_timeout=PATIENCE) as client:
        with FakeScheduler(endpoint, vanish), pytest.raises(EngineDied, match="lost"):
            client.status(timeout=PATIENCE)
        for _ in range(5):
            with pytest.raises(EngineDied, match="no scheduler answers"):
                client.status(timeout=PATIENCE)
        with FakeScheduler(endpoint):
            assert client.status(timeout=PATIENCE).step == 12


def test_coroutines_share_the_wait_for_an_engine_that_is_gone(endpoint):
    async def main():
        async with AsyncSchedulerClient(endpoint, connect_timeout=PATIENCE) as client:
            with FakeScheduler(endpoint, vanish), pytest.raises(EngineDied, match="lost"):
                await client.status(timeout=PATIENCE)
            for _ in range(3):
                calls = [client.status(timeout=PATIENCE) for _ in range(20)]
                failed = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(error, EngineDied) for error in failed)
                assert all("no scheduler answers" in str(error) for error in failed)

    asyncio.run(main(), debug=True)


def test_an_engine_that_comes_back_soon_is_waited_for(endpoint, monkeypatch):
    monkeypatch.setattr(caesura.client.connection.link, "RECONNECT_S", PATIENCE)
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


def test_an_engine_that_is_stopped_is_not_waited_for_again_until_it_goes_on(endpoint):
    first = [sys.executable, FAKE, "--endpoint", endpoint, "--ready-fd", "1", "--lifeline-fd", "0"]
    with subprocess.Popen(first, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
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
                while True:
                    try:
                        assert client.status(timeout=PATIENCE).pid == child.pid
                        break
                    except EngineDied:
                        pass
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


def test_an_idle_client_and_one_that_was_stopped_do_not_suspect_the_engine(endpoint, monkeypatch):
    monkeypatch.setattr(caesura.client.connection.link, "LATE_S", 0.05)
    with (
        FakeScheduler(endpoint, lambda request: []) as fake,
        Pumped(endpoint, keepalive_timeout=0.1) as client,
    ):
        client.until(lambda: client.link.incarnation)
        time.sleep(0.3)
        client.link.pump()
        assert client.link.deadline is None, "nothing is pending, so nothing is due"
        client.send(GetStatusReqInput(id="s"))
        client.until(lambda: not fake.requests.empty())
        time.sleep(0.3)  # as if this process had been stopped: the silence is long over
        client.link.pump()
        assert client.lost == []
        fake.push(status_reply(GetStatusReqInput(id="s")))
        client.until(lambda: client.received)
        assert client.lost == []


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
