"""Engines over several nodes: processes of this host that know of each other by an address alone."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
from support import engine_template
from support.plain_trainer import free_port
from support.supervised import supervised
from support.waiting import PATIENCE_S, eventually

from caesura.client import EngineError, SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.launch.launcher import engine_command
from caesura.process.curve import NODES_VARIABLE

pytestmark = pytest.mark.slow

OPTIONS = {"tp": 2, "dtype": "float32", "num_threads": 1, "kv_pool_tokens": 4096}
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "nodes.md"
Start = Callable[..., "subprocess.Popen[Any]"]


def flags(**options: Any) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def commands_of(heading: str) -> list[list[str]]:
    """Return the commands in the first block of shell below a heading of the page about nodes."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    block = section.split("```sh\n")[1].split("```")[0].replace("\\\n", "")
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [command for command in commands if command[0] != "export"]


def adapted(command: list[str], values: dict[str, Any]) -> list[str]:
    """Return a command for two ranks here, with other values; an option whose value is empty is left out."""
    values = {"--tp": 2, **values}
    found: list[str] = []
    options = iter(command)
    for each in options:
        value = str(values.get(each, next(options))) if each.startswith("--") else None
        if value != "":
            found += [each] if value is None else [each, value]
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes, which have ended when the test has."""
    with ExitStack() as stack:

        def started(*command: str, stderr: TextIO | None = None, **environment: str) -> subprocess.Popen[Any]:
            process = engine_template.Process(command, env={**os.environ, **environment}, stderr=stderr)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        yield started


@pytest.fixture
def secret(monkeypatch) -> str:
    monkeypatch.setenv(NODES_VARIABLE, secret := "a secret of all nodes of one engine")
    return secret


def test_a_node_joins_with_the_secret_until_shutdown(tiny_model, start, secret):
    place = {"nnodes": 2, "master_addr": f"127.0.0.1:{free_port()}"}
    command = engine_command("--model", str(tiny_model), *flags(**OPTIONS, **place, node_rank=1))
    stranger = start(*command, **{NODES_VARIABLE: secret[::-1]})
    node = start(*command)
    with launch_scheduler(tiny_model, **OPTIONS, **place, node_rank=0) as client:
        (rank,) = client.status().ranks
        assert psutil.Process(rank.pid).ppid() == node.pid
        assert len(client.generate([5, 6, 7], PARAMS).output_ids) == 12
        assert stranger.poll() is None
    assert node.wait() == 0


def test_a_node_ends_when_rank_0_is_refused(tiny_model, start, secret, tmp_path):
    place = {"nnodes": 2, "master_addr": f"127.0.0.1:{free_port()}"}
    command = engine_command("--model", str(tiny_model), *flags(**OPTIONS, **place, node_rank=1))
    with open(tmp_path / "log", "w") as log:
        node = start(*command, stderr=log)
    eventually(lambda: "rank 1 waits for rank 0" in (tmp_path / "log").read_text())
    with pytest.raises(EngineError, match="ep = 3 must divide tp = 2"):
        launch_scheduler(tiny_model, **OPTIONS, **place, node_rank=0, ep=3)
    assert node.wait() == 1
    assert "rank 1 is refused or cannot start: the node ends" in (tmp_path / "log").read_text()


def test_a_node_ends_if_no_rank_0_comes_in_time(tiny_model, start, secret):
    place = {"nnodes": 2, "master_addr": f"127.0.0.1:{free_port()}", "join_timeout_s": 0.2}
    node = start(*engine_command("--model", str(tiny_model), *flags(**OPTIONS, **place, node_rank=1)))
    assert node.wait() == 1


@pytest.mark.long
def test_nodes_come_back_whichever_is_killed(tiny_model, start, secret):
    place = {"--master-addr": f"127.0.0.1:{free_port()}", "--model": str(tiny_model), "--endpoint": ""}
    zero, one = (adapted(command, place) for command in commands_of("The same command on each node"))
    other = [sys.executable, "-c", engine_template.CLI, *one[1:], "--num-threads", "1"]
    node = start(*other)
    with supervised(*zero[2:], "--max-restarts", "9") as running, running.client() as client:
        expected = client.generate([5, 6, 7], PARAMS).output_ids

        def serves_again(before: int) -> None:
            def serves() -> bool:
                try:
                    return client.status(timeout=PATIENCE_S).pid != before
                except EngineError as error:
                    assert error.retryable, error
                    return False

            eventually(serves)
            assert client.generate([5, 6, 7], PARAMS).output_ids == expected

        engine = client.status().pid
        os.kill(engine, signal.SIGKILL)
        serves_again(engine)

        status = client.status()
        os.kill(status.ranks[0].pid, signal.SIGKILL)
        serves_again(status.pid)
        assert node.poll() is None, "neither took the node with it"

        engine = client.status().pid
        node.kill()
        running.wait_for("restart ")
        node = start(*other)
        serves_again(engine)
        assert running.end() == 0
    assert node.wait() == 0


def torchrun(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    (command,) = commands_of("torchrun")
    place = {"--node-rank": rank, "--nproc-per-node": 1, "--master-addr": "127.0.0.1", "--master-port": port}
    return [sys.executable, "-m", "torch.distributed.run", *adapted(command[1:], place)], {}


def srun(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a task and the variables that srun documents; Slurm itself is not here."""
    _, command = commands_of("Slurm")
    scheduler = command.index("caesura") + 1
    step = {"NUM_TASKS": "2", "NUM_NODES": "2", "NODELIST": "localhost,elsewhere", "ID": "0"}
    environment = {f"SLURM_STEP_{name}": value for name, value in step.items()}
    environment |= {"SLURM_JOB_ID": str(port - 20_000), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    return [sys.executable, "-c", engine_template.CLI, *adapted(command[scheduler:], {})], environment


def slurm_port() -> int:
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := 20_000 + os.getpid() % 10_000))
            except OSError:
                continue
            return port


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "port"), [(torchrun, free_port), (srun, slurm_port)])
def test_a_launcher_starts_all_ranks(tiny_model, tmp_path, start, launcher, port):
    endpoint = f"ipc://{tmp_path}/engine.sock"
    number = port()
    processes = []
    for rank in (1, 0):
        command, environment = launcher(rank, number)
        given = flags(num_threads=1, model=tiny_model, endpoint=endpoint)
        processes.append(start(*command, *given, **environment))
    with SchedulerClient(endpoint, connect_timeout=PATIENCE_S) as client:
        eventually(Path(endpoint.removeprefix("ipc://")).exists)
        (rank,) = client.status(timeout=PATIENCE_S).ranks
        assert rank.rank == 1
        assert len(client.generate([5, 6, 7], PARAMS).output_ids) == 12
        client.shutdown()
    assert [process.wait() for process in processes] == [0, 0]
