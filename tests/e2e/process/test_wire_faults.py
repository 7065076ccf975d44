"""Processes that die, clients that vanish, frames that are noise: what the others notice of it is nothing."""

import contextlib
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import zmq
from support.checkpoints import make_checkpoint
from support.raw_client import RawClient, rows
from support.scripted import EngineDriver, assert_error, expected_tokens, tokens_of
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import EndpointInUse, SamplingParams, SchedulerClient, VersionMismatch, launch_scheduler
from caesura.client.launch.launcher import LaunchedScheduler
from caesura.io_struct import (
    WIRE_VERSION,
    AbortReqOutput,
    BatchTokenOutput,
    ErrorReply,
    GenerateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    encode,
)

LONG = SamplingParams(max_new_tokens=3000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "long"
    make_checkpoint(path, "qwen3", tied=True, seed=3, num_hidden_layers=1, max_position_embeddings=32768)
    return path


def launch(model: Path, log: Path, **options: object) -> LaunchedScheduler:
    settings = {"num_threads": 1, "kv_pool_tokens": 16384, "check_ledger": True, **options}
    return launch_scheduler(model, log_path=log, **settings)


@pytest.fixture(scope="module")
def launched(long_model, tmp_path_factory):
    """Launch one engine for everything that it must survive."""
    launched = launch(long_model, tmp_path_factory.mktemp("log") / "engine.log")
    with launched:
        yield launched


@pytest.fixture
def client(launched):
    yield launched.client
    assert launched.returncode is None
    launched.client.abort(abort_all=True, timeout=PATIENCE)
    launched.client.continue_generation(timeout=PATIENCE)
    eventually(lambda: launched.client.status(timeout=PATIENCE).kv.held == 0)


GARBAGE = {
    "empty frame": [b""],
    "noise": [bytes(range(256))],
    "http": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "pickle": [b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."],
    "nested": [b"\x91" * 100_000],
    "nested maps": [b"\x81\xa1a" * 100_000],
    "huge array": [b"\xdd\xff\xff\xff\xff"],
    "huge map": [b"\x82\xa4type\xdf\xff\xff\xff\xff"],
    "a reply": [encode(AbortReqOutput(id="x", aborted=1))],
    "a delimiter": [b"", encode(GetStatusReqInput())],
    "a buffer too many": [encode(GetStatusReqInput()), b"\x00" * 1000],
    "many frames": [b"x"] * 200,
    "a header of 65 MB": [b"\x00" * (65 << 20)],
}
"""Other bytes that are no message: tests/unit/io_struct/test_codec.py."""


def test_garbage_is_answered_and_disturbs_no_client(client, launched):
    running = client.submit([5, 6, 7], SHORT)
    with RawClient(launched.endpoint) as raw:
        for kind, frames in GARBAGE.items():
            assert assert_error(raw.call(*frames), "malformed_message").message, kind
            assert isinstance(raw.call(GetStatusReqInput()), GetStatusReqOutput), "the socket is still served"
    assert len(running.result(timeout=PATIENCE).output_ids) == 40


def test_sockets_of_other_kinds_disturb_no_client(client, launched):
    with zmq.Context() as context, contextlib.ExitStack() as sockets:
        for kind in (zmq.REQ, zmq.ROUTER, zmq.PUSH, zmq.SUB, zmq.PAIR):
            socket = sockets.enter_context(context.socket(kind))
            socket.linger = 0
            socket.connect(launched.endpoint)
            if kind == zmq.REQ:
                socket.send(encode(GetStatusReqInput()))
            assert client.status(timeout=PATIENCE).generation == "running"
        with RawClient(launched.endpoint) as raw:
            assert isinstance(raw.call(GetStatusReqInput()), GetStatusReqOutput)


VANISHING = """
    import sys
    from caesura.client import SamplingParams, SchedulerClient
    params = SamplingParams(max_new_tokens=3000, temperature=0.0, ignore_eos=True, n=3)
    handle = SchedulerClient(sys.argv[1]).submit([9, 8, 7], params, stream=True)
    for delta in handle:
        print(handle.rid, flush=True)
"""


@contextlib.contextmanager
def vanishing_client(endpoint: str):
    program = [sys.executable, "-c", textwrap.dedent(VANISHING), endpoint]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()
            yield child
        finally:
            child.kill()


def test_a_client_killed_in_mid_stream(client, launched):
    with vanishing_client(launched.endpoint) as child:
        other = client.submit(
            [5, 6, 7], SamplingParams(max_new_tokens=1500, temperature=0.0, ignore_eos=True)
        )
        assert client.status(timeout=PATIENCE).running_requests >= 3
        child.kill()
        eventually(lambda: client.status(timeout=PATIENCE).running_requests <= 1)
        assert len(other.result(timeout=PATIENCE).output_ids) == 1500
    status = client.status(timeout=PATIENCE)
    assert (status.running_requests, status.waiting_requests, status.kv.held) == (0, 0, 0)


def test_a_silent_client_is_missed_during_a_pause(client, launched):
    mine = client.submit([5, 6, 7], LONG)
    with vanishing_client(launched.endpoint) as child:
        eventually(lambda: client.status(timeout=PATIENCE).running_requests == 4)
        client.pause("in_place", timeout=PATIENCE)
        held = client.status(timeout=PATIENCE).kv.held
        child.kill()
        eventually(lambda: client.status(timeout=PATIENCE).running_requests == 1)
    status = client.status(timeout=PATIENCE)
    assert status.generation == "paused"
    assert 0 < status.kv.held < held, "the other frozen request keeps its KV"
    client.continue_generation(timeout=PATIENCE)
    assert not mine.done()


def test_an_idle_and_a_paused_engine_sleep(client, launched):
    client.generate([5], SHORT, timeout=PATIENCE)
    assert cpu_share(launched.pid) < 0.05
    handles = [client.submit([5, 6, 7 + i], LONG) for i in range(4)]
    eventually(lambda: client.status(timeout=PATIENCE).running_requests == 4)
    client.pause("in_place", timeout=PATIENCE)
    assert cpu_share(launched.pid) < 0.05
    assert client.status(timeout=PATIENCE).running_requests == 4
    assert not any(handle.done() for handle in handles)


def cpu_share(pid: int, seconds: float = 1.5) -> float:
    """Measure the CPU seconds per second, over a while (a rate: nothing is waited for)."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def test_a_second_scheduler_at_an_endpoint_is_refused(client, launched, long_model, tmp_path):
    with pytest.raises(EndpointInUse) as caught:
        launch(long_model, tmp_path / "log", endpoint=launched.endpoint)
    assert caught.value.detail["endpoint"] == launched.endpoint
    fresh = SchedulerClient(launched.endpoint)
    try:
        assert fresh.status(timeout=PATIENCE).pid == launched.pid
    finally:
        fresh.close()
    assert len(client.generate([5, 6], SHORT, timeout=PATIENCE).output_ids) == 40


def test_a_client_that_does_not_read_costs_others_nothing(tiny_model):
    params = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
    prompts = {f"s{i}": [5, 6, 7 + i] for i in range(50)}
    with (
        EngineDriver(str(tiny_model), kv_pool_tokens=64 * 256, max_running_requests=64) as driver,
        RawClient(driver.config.endpoint, identity=b"slow", receive_hwm=1) as slow,
    ):
        slow.send(GetStatusReqInput())
        router = driver.engine.router
        eventually(lambda: driver.tick() or slow.socket.poll(0))
        while not router.has_backlog:
            router.send(b"slow", AbortReqOutput(id="." * 100, aborted=0))
        for rid, prompt in prompts.items():
            slow.send(GenerateReqInput(rid=rid, input_ids=prompt, sampling_params=params, stream=True))
        while len(driver.engine.live) < len(prompts):
            driver.hear()
        quick = 0
        largest = 0
        while driver.engine.live or quick == 0:
            rid = driver.generate([3, 4], 5)
            while (rid, 0) not in driver.results:
                driver.tick()
            assert len(tokens_of(driver.result(rid))) == 5
            quick += 1
            largest = max([largest, *(len(queue.frames) for _, queue in router.backlogs.items())])
        assert router.has_backlog, "the slow client was meant to be full"
        assert quick >= 20
        assert largest <= 3, "what fills its pipe, a delta and results"
        assert driver.status().kv.held == 0, "a slow reader holds no KV"

        ended = {}
        delivered = dict.fromkeys(prompts, 0)
        while len(ended) < len(prompts):
            driver.tick()
            for message in slow.received():
                assert not isinstance(message, ErrorReply), message
                if not isinstance(message, BatchTokenOutput):
                    continue
                for name, _, start, tokens, _ in rows(message.delta):
                    assert start >= delivered[name], "a token came twice"
                    delivered[name] = start + len(tokens)
                for result in message.finished:
                    assert result.rid not in ended
                    ended[result.rid] = result
    for name, prompt in prompts.items():
        assert tokens_of(ended[name]) == expected_tokens(prompt, ended[name], 97)
        assert len(tokens_of(ended[name])) == 200
    assert max(delivered.values()) <= 200


def test_a_reconnecting_client_gets_its_result(tiny_model):
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    request = GenerateReqInput(id="g", input_ids=[5, 6], sampling_params=params)
    with EngineDriver(str(tiny_model)) as driver:

        def owners() -> set[bytes]:
            driver.engine.housekeeping.next_keepalive = 0.0
            driver.tick()
            return {request.client for request in driver.engine.live}

        driver.pause("retract")
        first = RawClient(driver.config.endpoint, identity=b"trainer-1")
        first.send(request)
        eventually(lambda: owners() == {b"trainer-1"})
        with RawClient(driver.config.endpoint, identity=b"trainer-2") as second:
            second.send(request)
            exchange = driver.engine.answers.get("g")
            eventually(lambda: driver.tick() or len(exchange.clients) == 2)
            first.close()
            eventually(lambda: owners() == {b"trainer-2"})
            driver.go_on()
            driver.run_until_idle()
            assert len(tokens_of(second.result("g"))) == 9
        assert driver.status().generated_tokens == 9


def test_a_client_of_another_major_version_is_told_both(client, launched, monkeypatch):
    assert client.incarnation == client.status(timeout=PATIENCE).incarnation
    monkeypatch.setattr("caesura.client.connection.link.WIRE_VERSION", (WIRE_VERSION[0] + 1, 0))
    ours = ".".join(map(str, WIRE_VERSION))
    with SchedulerClient(launched.endpoint) as other:
        for call in (other.status, other.pause):
            with pytest.raises(
                VersionMismatch, match=rf"speaks wire 2\.0, the engine at .* speaks wire {ours} "
            ):
                call(timeout=PATIENCE)
    assert client.status(timeout=PATIENCE).generation == "running"
