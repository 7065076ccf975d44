"""Sockets on which the processes really listen, read from the kernel's tables."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from support.http_serve import served
from support.lanes import quick

from caesura.client import EngineDied, InvalidRequest, SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.keygen import keygen

_ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def inet_listeners(pid: int) -> set[tuple[str, int]]:
    found = set()
    for process in tree(pid):
        for connection in process.net_connections(kind="inet"):
            is_tcp = connection.type.name == "SOCK_STREAM"
            if connection.laddr and (not is_tcp or connection.status == psutil.CONN_LISTEN):
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def unix_listeners(pid: int) -> set[str]:
    inodes = set()
    for process in tree(pid):
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    paths = set()
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            paths.add(fields[7] if len(fields) > 7 else "")
    return paths


def generate(client: SchedulerClient) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(client.generate([5, 6], params).output_ids) == 4


@pytest.mark.executed
@pytest.mark.parametrize("endpoint", quick([None, "tcp://127.0.0.1:0"]))
def test_a_scheduler_listens_on_its_endpoint_alone(tiny_model, endpoint):
    launched = launch_scheduler(str(tiny_model), endpoint=endpoint, kv_pool_tokens=1024)
    with launched as client:
        generate(client)
        scheme, _, place = client.endpoint.partition("://")
        port = {("127.0.0.1", int(place.rpartition(":")[2]))} if scheme == "tcp" else set()
        assert inet_listeners(launched.pid) == port
        assert unix_listeners(launched.pid) == ({place} if scheme == "ipc" else set())


@pytest.mark.long
def test_the_http_server_listens_on_one_loopback_port(tiny_model):
    with served("--model", str(tiny_model)) as server:
        server.generate([5, 6])
        port = int(server.url.rpartition(":")[2])
        assert inet_listeners(server.process.pid) == {("127.0.0.1", port)}
        (path,) = unix_listeners(server.process.pid)
        assert path in server.announced


@pytest.fixture
def keys(tmp_path):
    assert CliRunner().invoke(keygen, [str(tmp_path / "keys")]).exit_code == 0
    return tmp_path / "keys"


def test_an_engine_with_keys_serves_who_has_them(tiny_model, keys):
    own = {
        "curve_server_key": str(keys / "server.key"),
        "curve_client_key_file": str(keys / "client.key_secret"),
    }
    engine = {
        "curve_secret_key_file": keys / "server.key_secret",
        "curve_authorized_clients": keys / "clients",
    }
    with launch_scheduler(
        str(tiny_model), endpoint="tcp://0.0.0.0:0", kv_pool_tokens=1024, **engine, **own
    ) as client:
        generate(client)
        endpoint = client.endpoint.replace("0.0.0.0", "127.0.0.1")
        refusal = pytest.raises(EngineDied, match="asks for keys")
        with SchedulerClient(endpoint, connect_timeout=5.0) as stranger, refusal:
            stranger.status()
        command = [sys.executable, "-c", "from caesura.client.cli import main; main()", "status", "--json"]
        environment = {
            **os.environ,
            "CAESURA_ENDPOINT": endpoint,
            "CAESURA_CURVE_SERVER_KEY": own["curve_server_key"],
            "CAESURA_CURVE_CLIENT_KEY_FILE": own["curve_client_key_file"],
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        options = ("--curve-server-key", own["curve_server_key"])
        options += ("--curve-client-key-file", own["curve_client_key_file"])
        with served("--endpoint", endpoint, *options) as server:
            server.generate([5, 6])


def test_without_keys_nothing_listens_beyond_loopback(tiny_model):
    with pytest.raises(InvalidRequest, match="caesura keygen"):
        launch_scheduler(str(tiny_model), endpoint="tcp://0.0.0.0:0")
