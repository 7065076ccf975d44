"""Clients of one process share a context; children that it forks do not."""

import contextlib
import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack

import psutil
import pytest
import support.fake_scheduler
import zmq
from support import engine_template
from support.fake_scheduler import FakeScheduler
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import SchedulerClient
from caesura.client.connection import shared_socket
from caesura.client.connection.async_client import AsyncSchedulerClient

CLIENTS = 40


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


async def test_a_connection_more_costs_no_thread(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s") as fake:
        first = AsyncSchedulerClient(fake.endpoint)
        await first.status()
        before = descriptors(), threads()
        others = [AsyncSchedulerClient(fake.endpoint) for _ in range(CLIENTS)]
        for client in others:
            await client.status()
        assert threads() == before[1]
        # Five here (two sockets with a monitor's pair, the connection), and one at the engine's end.
        assert descriptors() - before[0] <= 6 * CLIENTS
        for client in (first, *others):
            await client.close()


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
    shared = shared_socket.acquire_context()
    try:
        sockets = [shared.socket(zmq.REQ) for _ in range(1100)]
        for each in sockets:
            each.close(linger=0)
    finally:
        shared_socket.release_context()


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


FAKE = support.fake_scheduler.__file__

BLOCKING = """
    import os, sys
    from caesura.client import SchedulerClient
    client = SchedulerClient(sys.argv[1])
    handle = client.submit([1], stream=True)
    assert handle.result().output_ids == [1, 0]
    def untouched():
        print("tensors were asked for")
        yield "name", None
    child = os.fork()
    if child == 0:
        uses = {
            "status": client.status,
            "generate": lambda: client.generate([1]),
            "submit": lambda: client.submit([1]),
            "start": lambda: client.update_weights_from_disk("/x"),
            "send": lambda: client.update_weights_from_tensor(untouched()),
            "share": lambda: client.update_weights_from_ipc(untouched()),
            "result": handle.result,
            "done": handle.done,
            "deltas": lambda: list(handle),
            "abort": handle.abort,
        }
        for name, use in uses.items():
            try:
                use()
                print("no error from", name)
            except RuntimeError as error:
                print(str(error).replace(str(os.getppid()), "N"))
        with SchedulerClient(sys.argv[1]) as own:
            print(own.generate([7]).output_ids)
        client.close()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(client.generate([2]).output_ids, flush=True)
    client.close()
"""

ASYNCIO = """
    import asyncio, os, sys
    from caesura.client import AsyncSchedulerClient
    client = AsyncSchedulerClient(sys.argv[1])
    async def use():
        handle = await client.submit([1])
        assert (await handle.result()).output_ids == [1, 0]
        return handle
    async def misuse(handle):
        for use in (client.status, lambda: client.generate([1]), handle.result, handle.abort):
            try:
                await use()
                print("no error")
            except RuntimeError as error:
                print(str(error).replace(str(os.getppid()), "N"))
        await client.close()
    loop = asyncio.new_event_loop()
    handle = loop.run_until_complete(use())
    child = os.fork()
    if child == 0:
        asyncio.run(misuse(handle))
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(loop.run_until_complete(client.generate([2])).output_ids)
    loop.run_until_complete(client.close())
    loop.close()
"""


def run(program, *arguments):
    done = engine_template.run(textwrap.dedent(program), *arguments)
    assert done.stderr == ""
    return done.stdout.splitlines()


def told(what):
    return f"this {what} belongs to process N; make a new client after a fork"


@pytest.mark.slow
def test_a_forked_child_is_told_and_the_parent_goes_on(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s") as fake:
        lines = run(BLOCKING, fake.endpoint)
    assert lines == [told("client")] * 6 + [told("generation")] * 3 + [told("client"), "[7, 0]", "[2, 0]"]


@pytest.mark.slow
def test_a_forked_child_of_an_event_loop_is_told(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s") as fake:
        lines = run(ASYNCIO, fake.endpoint)
    assert lines == [told("client")] * 2 + [told("generation"), told("client"), "[2, 0]"]


LAUNCHER = """
    import os, sys, time
    from caesura.client.launch.launcher import LaunchedScheduler
    launched = LaunchedScheduler([sys.executable, sys.argv[1], "--endpoint", "ipc://" + sys.argv[2]])
    with launched as client:
        for ending in ("exit", "return"):
            child = os.fork()
            if child == 0:
                if ending == "exit":
                    sys.exit(0)  # through the block's end and the interpreter's
                launched.close()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print(client.generate([2]).output_ids)
"""


@pytest.mark.slow
def test_the_end_of_a_forked_child_ends_no_engine(tmp_path):
    assert run(LAUNCHER, FAKE, f"{tmp_path}/s") == ["[2, 0]", "[2, 0]"]


OUTLIVED = """
    import os, sys
    from caesura.client.launch.launcher import LaunchedScheduler
    launched = LaunchedScheduler([sys.executable, sys.argv[1], "--endpoint", "ipc://" + sys.argv[2]])
    {fork}
    print(launched.pid, child, flush=True)
    os.kill(os.getpid(), 9)
"""
FORKS = {
    "os.fork": """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"!")
        sys.stdin.buffer.read()  # until the test has seen enough
        os._exit(0)
    os.read(read, 1)""",
    "multiprocessing": """
    import multiprocessing
    context = multiprocessing.get_context("fork")
    stdin = os.dup(0)  # multiprocessing gives its children another one
    def wait():
        os.read(stdin, 1)
    process = context.Process(target=wait)
    process.start()
    child = process.pid""",
}


@pytest.mark.slow
@pytest.mark.parametrize("fork", FORKS)
def test_an_engine_ends_though_a_forked_child_lives(tmp_path, fork):
    program = textwrap.dedent(OUTLIVED.replace("\n    {fork}", FORKS[fork]))
    command = [sys.executable, "-c", program, FAKE, f"{tmp_path}/s"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with engine_template.Process(command, text=True, **pipes) as launcher:
        assert launcher.stdout is not None
        engine, child = map(int, launcher.stdout.readline().split())
        launcher.wait(PATIENCE)
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(engine).wait(PATIENCE)
            assert not psutil.pid_exists(engine)
            assert psutil.pid_exists(child), "the child has not ended, only the launcher has"
        finally:
            assert launcher.stdin is not None
            launcher.stdin.close()
