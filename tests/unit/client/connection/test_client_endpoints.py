"""A client that finds no scheduler says so at once, and what it found instead."""

import asyncio
import contextlib
import socket
import threading

import pytest
from support.fake_scheduler import FakeScheduler

from caesura.client import AsyncControlClient, ControlClient, EngineDied, InvalidRequest
from caesura.process.contract import SHUT_SUFFIX

FOR_EVER = 3600.0
"""A test would fail by its own time limit before a client that waits."""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A call that waited for a scheduler would do so for an hour."""
    monkeypatch.setattr("caesura.client.connection.options.DEFAULT_CONNECT_TIMEOUT_S", FOR_EVER)


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


def test_a_missing_socket_file_is_reported_at_once(tmp_path):
    endpoint = f"ipc://{tmp_path}/nobody"
    sentence = (
        f"no scheduler answers at {endpoint}: there is no such socket file; "
        f"`caesura scheduler --endpoint {endpoint}` starts one"
    )
    assert set(refusals(endpoint)) == {sentence}


def test_a_stale_socket_file_is_reported_at_once(tmp_path):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as ended:
        ended.bind(f"{tmp_path}/s")
    assert all("nobody listens at its socket file" in each for each in refusals(f"ipc://{tmp_path}/s"))


def test_a_file_that_is_no_socket_is_reported_at_once(tmp_path):
    (tmp_path / "s").write_text("")
    assert all("the file is not a socket" in each for each in refusals(f"ipc://{tmp_path}/s"))


def test_a_port_without_a_listener_is_reported_at_once():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there meanwhile
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert all(f"no scheduler answers at {endpoint}: nobody" in each for each in refusals(endpoint))


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
            said = (
                f"what listens at {endpoint} broke the connection off: "
                "it is no scheduler, one that asks for keys "
            )
            assert all(each.startswith(said) for each in refusals(endpoint))
        finally:
            other.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_scheduler_without_room_is_reported_at_once(tmp_path):
    (tmp_path / f"s{SHUT_SUFFIX}").write_text("")
    assert all("takes no more clients" in each for each in refusals(f"ipc://{tmp_path}/s"))


def test_a_scheduler_that_listens_is_found_after_all(tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    with ControlClient(endpoint) as client:
        with pytest.raises(EngineDied):
            client.status()
        with FakeScheduler(endpoint):
            assert client.status().incarnation == "fake"


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
