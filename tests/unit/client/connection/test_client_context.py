"""Connections of a process share its ZeroMQ context."""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack

import zmq
from support.fake_scheduler import FakeScheduler
from support.waiting import eventually

from caesura.client import SchedulerClient
from caesura.client.connection import link
from caesura.client.connection.async_client import AsyncSchedulerClient

CLIENTS = 40
PATIENCE = 30.0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


async def _answered(client: AsyncSchedulerClient) -> None:
    assert (await client.generate([1], timeout=PATIENCE)).output_ids == [1, 0]


def test_a_connection_more_costs_no_thread_and_few_descriptors(tmp_path):
    async def main() -> None:
        with FakeScheduler(f"ipc://{tmp_path}/s") as fake:
            first = AsyncSchedulerClient(fake.endpoint)
            await _answered(first)
            before = descriptors(), threads()
            others = [AsyncSchedulerClient(fake.endpoint) for _ in range(CLIENTS)]
            for client in others:
                await _answered(client)
            assert threads() == before[1]
            # Five here (two sockets with a monitor's pair, the connection), and one at the engine's end.
            assert descriptors() - before[0] <= 6 * CLIENTS
            for client in (first, *others):
                await client.close()

    asyncio.run(main())


def test_the_last_connection_ends_the_context(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s") as fake:
        before = threads()
        with ExitStack() as clients:
            for _ in range(2):
                client = clients.enter_context(SchedulerClient(fake.endpoint))
                assert client.generate([1], timeout=PATIENCE).output_ids == [1, 0]
        eventually(lambda: threads() == before)
        with SchedulerClient(fake.endpoint) as again:
            assert again.generate([1], timeout=PATIENCE).output_ids == [1, 0]


def test_more_connections_than_zeromq_allows_by_default():
    shared = link.acquire_context()
    try:
        sockets = [shared.socket(zmq.REQ) for _ in range(1100)]
        for each in sockets:
            each.close(linger=0)
    finally:
        link.release_context()


SHORT_OF_DESCRIPTORS = """
import os, resource, sys, time
import zmq
from caesura.client import SchedulerClient

first = SchedulerClient(sys.argv[1])
before, soft, hard = len(os.listdir("/proc/self/fd")), *resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(9):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + more, hard))
    try:
        SchedulerClient(sys.argv[1]).close()
    except (OSError, zmq.ZMQError):
        print("refused")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
first.close()
SchedulerClient(sys.argv[1]).close()
deadline = time.monotonic() + 10
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)  # a thread that was joined stays listed for a moment
print(len(os.listdir("/proc/self/task")))
"""


def test_a_connection_that_cannot_be_made_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS, f"ipc://{tmp_path}/nobody"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    *refusals, threads_left = ended.stdout.split()
    assert (len(refusals) > 3, threads_left) == (True, "1"), (ended.stdout, ended.stderr)
