"""A client that is there before its engine waits for it, and notices it as soon as it is there."""

import threading

import pytest
from support.fake_scheduler import FakeScheduler

from caesura.client import EngineDied


def test_a_client_finds_an_engine_that_comes_after_several_tries(endpoint, connect):
    with connect(endpoint, connect_timeout=None) as client:
        found = []
        asking = threading.Thread(target=lambda: found.append(client.status().incarnation))
        asking.start()
        asking.join(0.7)  # so that tries have failed; nothing depends on how many
        assert asking.is_alive()
        with FakeScheduler(endpoint):
            asking.join()
    assert found == ["fake"]


def test_without_an_engine_it_ends_with_the_time_to_connect(endpoint, connect):
    refused = pytest.raises(EngineDied, match="there is no such socket file")
    with connect(endpoint, connect_timeout=0.5) as client, refused:
        client.status()
