"""More connections than the engine has descriptors: ZeroMQ by itself aborts (ipc) or takes a core (tcp)."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.lanes import quick
from support.raw_client import RawClient
from support.waiting import eventually

from caesura.io_struct import GetStatusReqInput
from caesura.scheduler.messaging.endpoint import LISTEN_BACKLOG, MAX_RESERVE

pytestmark = pytest.mark.slow  # thousands of connections take seconds

LIMIT = 1024
ENOUGH = 2 * MAX_RESERVE
CHILD = Path(__file__).parents[3] / "support" / "crowded_router.py"


@pytest.fixture(params=quick(["ipc", "tcp"]))
def endpoint(request, tmp_path):
    return f"ipc://{tmp_path}/s.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"


@contextlib.contextmanager
def router(endpoint: str, limit: int, *more: str):
    process = subprocess.Popen(
        [sys.executable, str(CHILD), endpoint, str(limit), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        process.endpoint = process.stdout.readline().strip()
        assert process.endpoint, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def child(endpoint):
    with router(endpoint, LIMIT) as process:
        yield process


def descriptors(process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def cpu_seconds(client: RawClient) -> float:
    client.send(GetStatusReqInput())
    return float(client.receive().id.split()[1])


def connection(endpoint: str) -> socket.socket:
    """Raises OSError when the engine takes none any more."""
    if endpoint.startswith("ipc://"):
        family, address = socket.AF_UNIX, endpoint.removeprefix("ipc://")
    else:
        family, address = socket.AF_INET, ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with contextlib.ExitStack() as cleanup:
        asking = cleanup.enter_context(socket.socket(family))
        # Not Python's own time limit: with that, a unix socket does not wait for room in the backlog.
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 300_000))
        # After a signal Python waits without that limit: the alarms of tests are kept away.
        alarms = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        cleanup.callback(signal.pthread_sigmask, signal.SIG_SETMASK, alarms)
        asking.connect(address)
        cleanup.pop_all()
    signal.pthread_sigmask(signal.SIG_SETMASK, alarms)
    return asking


def test_more_connects_than_descriptors_are_refused(child):
    with RawClient(child.endpoint) as old, contextlib.ExitStack() as crowd:
        cpu_seconds(old)
        fill(child, crowd, pause_s=0.02)
        eventually(lambda: descriptors(child) > LIMIT // 4)
        before, began = cpu_seconds(old), time.monotonic()
        while time.monotonic() < began + 1.5:
            cpu_seconds(old)
            time.sleep(0.05)
        assert child.poll() is None
        assert descriptors(child) < LIMIT
        assert cpu_seconds(old) - before < 1.0, "it does not try again and again"
        with RawClient(child.endpoint) as late:
            late.send(GetStatusReqInput())
            assert not late.socket.poll(300), "the endpoint is shut"
            crowd.close()
            late.receive()
        cpu_seconds(old)
    _, errors = child.communicate("")
    assert child.returncode == 0, errors
    assert "no further connections" in errors
    assert "taken again" in errors
    if child.endpoint.startswith("ipc://"):
        left = os.listdir(Path(child.endpoint.removeprefix("ipc://")).parent)
        assert left == ["s.sock.lock"]


def test_a_burst_that_nobody_looks_at_leaves_descriptors(endpoint):
    with router(endpoint, ENOUGH, "held") as child, contextlib.ExitStack() as crowd:
        before = descriptors(child)
        fill(child, crowd)
        assert child.poll() is None
        accepted = descriptors(child) - before
        assert accepted < MAX_RESERVE - LISTEN_BACKLOG
        child.stdin.write("go on\n")
        child.stdin.flush()
        fill(child, crowd)
        assert child.poll() is None
        assert descriptors(child) < ENOUGH
        crowd.close()
        with RawClient(child.endpoint) as late:
            cpu_seconds(late)
        _, errors = child.communicate("")
        assert child.returncode == 0, errors


def fill(child, crowd, pause_s: float = 0.0) -> None:
    failures = number = 0
    while failures < 8 and child.poll() is None:  # one or two may only mean that the child is behind
        number += 1
        if number % 32 == 0:  # quicker than the engine can look, a crowd wins (docs/howto/security.md)
            time.sleep(pause_s)
        try:
            crowd.enter_context(connection(child.endpoint))
            failures = 0
        except OSError:
            failures += 1
