"""Keys: who is heard by an engine that has some, what is refused, and what the files are."""

import contextlib
import os
import select
import shutil
import socket
import stat
import threading

import pytest
import zmq
import zmq.auth
from click.testing import CliRunner

from caesura.client import ControlClient, EngineDied, InvalidRequest
from caesura.client.connection import shared_socket
from caesura.client.keygen import keygen
from caesura.io_struct import (
    CaesuraError,
    ErrorCode,
    HelloReqInput,
    ShutdownReqInput,
    ShutdownReqOutput,
    decode_request,
)
from caesura.scheduler.messaging.endpoint import ServerKeys
from caesura.scheduler.messaging.message_dispatcher import answer_hello
from caesura.scheduler.messaging.router_socket import Router

pytestmark = pytest.mark.slow  # its engines take seconds to start


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for each in (folder, folder / "other"):
        assert CliRunner().invoke(keygen, [str(each)]).exit_code == 0
    return folder


def server_keys(folder):
    found = ServerKeys.read(str(folder / "server.key_secret"), str(folder / "clients"))
    assert found is not None
    return found


def client_options(server_folder, client_folder):
    return {
        "curve_server_key": server_folder / "server.key",
        "curve_client_key_file": client_folder / "client.key_secret",
    }


class Served:
    """A router in a thread that answers hellos and shutdown messages, and does not stop."""

    def __init__(self, endpoint: str, keys: ServerKeys | None) -> None:
        self.router = Router(endpoint, lambda _: None, keys)
        self.heard = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.router.socket.poll(20)
            for client, header, _ in self.router.receive():
                message = decode_request(header)
                if isinstance(message, HelloReqInput):
                    self.router.send(client, answer_hello(message, "incarnation"))
                elif isinstance(message, ShutdownReqInput):
                    self.heard += 1
                    self.router.send(client, ShutdownReqOutput(id=message.id))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.router.close()


@contextlib.contextmanager
def served(endpoint: str, keys: ServerKeys | None):
    with contextlib.closing(Served(endpoint, keys)) as server:
        yield server


def refused(endpoint: str, connect_timeout: float = 8.0, **options) -> str:
    with (
        contextlib.closing(ControlClient(endpoint, connect_timeout=connect_timeout, **options)) as client,
        pytest.raises(EngineDied) as caught,
    ):
        client.shutdown()
    return str(caught.value)


def assert_heard(endpoint: str, **options) -> None:
    with contextlib.closing(ControlClient(endpoint, **options)) as client:
        client.shutdown()


def non_loopback() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_client_with_an_authorized_key_is_heard(keys, tmp_path, kind):
    endpoint = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/s.sock"
    key = zmq.auth.load_certificate(keys / "server.key")[0].decode()
    with served(endpoint, server_keys(keys)) as server:
        for option in ({}, {"curve_server_key": key}):  # a file, and the key as text
            assert_heard(server.router.endpoint, **{**client_options(keys, keys), **option})


def test_other_keys_than_the_right_ones_are_told_why(keys):
    with served("tcp://127.0.0.1:0", server_keys(keys)) as server:
        endpoint = server.router.endpoint
        assert "not among its authorized clients" in refused(endpoint, **client_options(keys, keys / "other"))
        assert "curve_server_key" in refused(endpoint, **client_options(keys / "other", keys))
        assert "asks for keys" in refused(endpoint)
        assert server.heard == 0


def test_the_reason_of_a_refusal_outlives_the_next_try(keys):
    def forward_the_first() -> None:
        with door.accept()[0] as outside, socket.create_connection(("127.0.0.1", port)) as inside:
            while ready := select.select([outside, inside], [], [])[0]:
                data = ready[0].recv(4096)
                if not data:
                    return
                (inside if ready[0] is outside else outside).sendall(data)

    with (
        served("tcp://127.0.0.1:0", server_keys(keys)) as server,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):
        port = int(server.router.endpoint.rpartition(":")[2])
        thread = threading.Thread(target=forward_the_first)
        thread.start()
        options = {**client_options(keys / "other", keys), "connect_timeout": 3.0}
        message = refused(f"tcp://127.0.0.1:{door.getsockname()[1]}", **options)
        thread.join()
    assert "it broke the handshake off: curve_server_key is perhaps not" in message


def test_a_refusal_is_not_told_of_an_engine_that_has_ended(keys, tmp_path):
    endpoint, options = f"ipc://{tmp_path}/s.sock", client_options(keys / "other", keys)
    with contextlib.closing(ControlClient(endpoint, **options)) as client:
        with served(endpoint, server_keys(keys)), pytest.raises(EngineDied, match="broke the handshake off"):
            client.shutdown()
        with pytest.raises(EngineDied, match="no scheduler answers at"):
            client.shutdown()


def test_a_client_with_keys_never_falls_back_to_plain_text(keys):
    with served("tcp://127.0.0.1:0", None) as server:
        assert "has no keys" in refused(server.router.endpoint, **client_options(keys, keys))
        assert server.heard == 0


def test_a_refusal_before_the_hello_is_sent_is_told(keys, monkeypatch):
    monitors = []
    get_monitor_socket, connect_to = zmq.Socket.get_monitor_socket, shared_socket.connect_to

    def watched(dealer, *events):
        monitors.append(get_monitor_socket(dealer, *events))
        return monitors[-1]

    def until_the_refusal(dealer, endpoint):
        connect_to(dealer, endpoint)
        assert monitors[-1].poll(20_000)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", watched)
    monkeypatch.setattr(shared_socket, "connect_to", until_the_refusal)
    with served("tcp://127.0.0.1:0", None) as server:
        assert "has no keys" in refused(server.router.endpoint, **client_options(keys, keys))


def test_keys_count_from_the_next_connection_on(keys, tmp_path):
    """Keys are added and removed while the engine runs; those that cannot be read admit nobody."""
    (tmp_path / "clients").mkdir()
    own = ServerKeys.read(str(keys / "server.key_secret"), str(tmp_path / "clients"))
    options = client_options(keys, keys)
    with (
        served("tcp://127.0.0.1:0", own) as server,
        contextlib.closing(ControlClient(server.router.endpoint, **options)) as client,
    ):
        with pytest.raises(EngineDied, match="not among"):
            client.shutdown()
        (tmp_path / "clients" / "new.key").write_text((keys / "clients" / "client.key").read_text())
        client.shutdown()
        (tmp_path / "clients" / "new.key").unlink()
        assert "not among" in refused(server.router.endpoint, **options)
        (tmp_path / "clients").rmdir()
        assert "not among" in refused(server.router.endpoint, **options)


def test_without_its_thread_keys_admit_nobody(keys):
    with contextlib.closing(Router("tcp://127.0.0.1:0", lambda _: None, server_keys(keys))) as router:
        router.socket.disable_monitor()  # the thread ends with the last event
        router._access._thread.join()
        message = refused(router.endpoint, **client_options(keys, keys))
        assert "broke the handshake off" in message
        assert not router.socket.poll(0)


def test_beyond_loopback_only_with_keys(keys):
    for address in ("tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.77:0"):
        with pytest.raises(CaesuraError) as caught:
            Router(address, lambda _: None)
        assert caught.value.code == ErrorCode.INVALID_REQUEST
        for word in ("caesura keygen", "curve_secret_key_file", "curve_authorized_clients", "loopback"):
            assert word in caught.value.message


def test_with_keys_an_address_of_this_host_is_served(keys):
    with pytest.raises(CaesuraError, match="needs an IP address"):
        Router("tcp://example.com:0", lambda _: None, server_keys(keys))
    address = non_loopback()
    if address is None:
        pytest.skip("this host has no address but loopback")
    with served(f"tcp://{address}:0", server_keys(keys)) as server:
        assert server.router.endpoint.startswith(f"tcp://{address}:")
        assert_heard(server.router.endpoint, **client_options(keys, keys))
        assert "asks for keys" in refused(server.router.endpoint)


def test_two_options_belong_together(keys):
    secret, clients = str(keys / "server.key_secret"), str(keys / "clients")
    for given, missing in (
        ((None, clients), "curve_secret_key_file"),
        ((secret, None), "curve_authorized_clients"),
    ):
        with pytest.raises(CaesuraError) as caught:
            ServerKeys.read(*given)
        assert caught.value.detail["field"] == missing
    for missing in (options := client_options(keys, keys)):
        others = {name: value for name, value in options.items() if name != missing}
        with pytest.raises(InvalidRequest, match=missing):
            ControlClient("tcp://127.0.0.1:1", **others)


def test_a_secret_that_others_may_read_is_refused(keys, tmp_path):
    loose = tmp_path / "loose.key_secret"
    loose.write_text((keys / "server.key_secret").read_text())
    loose.chmod(0o644)
    with pytest.raises(CaesuraError, match="chmod 600"):
        ServerKeys.read(str(loose), str(keys / "clients"))
    with pytest.raises(InvalidRequest, match="chmod 600"):
        ControlClient("tcp://127.0.0.1:1", curve_server_key=keys / "server.key", curve_client_key_file=loose)


@pytest.mark.parametrize("text", ["", 'public-key = "short"', "\0" * 100, 'secret-key = "' + "a" * 40 + '"'])
def test_files_that_hold_no_keys_are_refused_by_name(keys, tmp_path, text):
    wrong = tmp_path / "wrong.key"
    wrong.write_text(text)
    wrong.chmod(0o600)
    for secret, clients in (
        (wrong, keys / "clients"),
        (keys / "server.key_secret", wrong),
        (wrong, tmp_path),
    ):
        with pytest.raises(CaesuraError) as caught:
            ServerKeys.read(str(secret), str(clients))
        assert caught.value.code == ErrorCode.INVALID_REQUEST
        assert "wrong.key" in caught.value.message
    with pytest.raises(CaesuraError, match="cannot be read"):
        ServerKeys.read(str(tmp_path / "absent"), str(keys / "clients"))


def test_keygen_writes_private_files_that_zeromq_reads(keys):
    names = {"server.key", "server.key_secret", "client.key_secret", "clients/client.key"}
    files = {str(path.relative_to(keys)) for path in keys.rglob("*") if path.is_file()}
    assert files == names | {f"other/{name}" for name in names}
    pairs = {}
    for name in names:
        assert stat.S_IMODE(os.stat(keys / name).st_mode) == 0o600
        public, secret = pairs[name] = zmq.auth.load_certificate(keys / name)
        assert len(public) == 40
        assert (secret is not None) == name.endswith("_secret")
    assert pairs["server.key"][0] == pairs["server.key_secret"][0]
    assert pairs["server.key_secret"][1].decode() not in repr(server_keys(keys))


def test_keygen_never_overwrites_and_adds_clients(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(keygen, [str(tmp_path), *arguments])

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert run("--client", "a", "--client", "b").exit_code == 0
    before = files()
    again = run("--client", "c", "--client", "b")
    assert (again.exit_code, "never overwritten" in again.output, files()) == (1, True, before)
    assert run("--client", "c").exit_code == 0
    after = files()
    assert {path: after[path] for path in before} == before, "the engine's keys stay"
    assert {path.name for path in after.keys() - before.keys()} == {"c.key_secret", "c.key"}
    for name in ("server", "../x", ".hidden", "clients", ""):
        assert run("--client", name).exit_code == 2


def test_a_fifo_among_the_authorized_keys_stops_nobody(keys, tmp_path):
    """Opening one waits for its other end, which may never come."""
    clients = tmp_path / "clients"
    shutil.copytree(keys / "clients", clients)
    found = ServerKeys.read(str(keys / "server.key_secret"), str(clients))
    os.mkfifo(clients / "x.key")
    with served("tcp://127.0.0.1:0", found) as server:
        assert refused(server.router.endpoint, **client_options(keys, keys))
        os.unlink(clients / "x.key")
        assert_heard(server.router.endpoint, **client_options(keys, keys))
