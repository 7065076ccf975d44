"""A client that is there before its engine waits for it, and notices it as soon as it is there."""

import asyncio
import threading

import pytest
from support.fake_scheduler import FakeScheduler

from caesura.client import AsyncControlClient, ControlClient, EngineDied


def test_an_asyncio_client_finds_an_engine_that_comes_after_several_tries(tmp_path):
    endpoint = f"ipc://{tmp_path}/engine"

    async def ask() -> str:
        async with AsyncControlClient(endpoint, connect_timeout=None) as client:
            asked = asyncio.ensure_future(client.status())
            await asyncio.sleep(0.7)  # so that tries have failed; nothing depends on how many
            assert not asked.done()
            with FakeScheduler(endpoint):
                return (await asyncio.wait_for(asked, 30)).incarnation

    assert asyncio.run(ask()) == "fake"


def test_a_blocking_client_finds_it_too(tmp_path):
    endpoint = f"ipc://{tmp_path}/engine"
    with ControlClient(endpoint, connect_timeout=None) as client:
        found = []
        asking = threading.Thread(target=lambda: found.append(client.status().incarnation))
        asking.start()
        asking.join(0.7)
        assert asking.is_alive()
        with FakeScheduler(endpoint):
            asking.join()
    assert found == ["fake"]


def test_without_an_engine_it_ends_with_the_time_to_connect(tmp_path):
    async def ask() -> None:
        async with AsyncControlClient(f"ipc://{tmp_path}/nobody", connect_timeout=0.5) as client:
            await client.status()

    with pytest.raises(EngineDied, match="there is no such socket file"):
        asyncio.run(ask())
