"""The engine is told of leases whose sessions have gone, whatever has ended them."""

import asyncio
from types import SimpleNamespace

import pytest

from caesura.client.serve.session_routes import tell_ended
from caesura.client.text.sessions import SessionStore


@pytest.mark.parametrize("ends", ["finished", "evicted"])
def test_the_engine_hears_of_each_end(ends):
    async def run() -> None:
        told: asyncio.Queue[list[str]] = asyncio.Queue()

        async def end_prefix_leases(names, **_):
            told.put_nowait(names)

        store = SessionStore(max_sessions=1)
        client = SimpleNamespace(end_prefix_leases=end_prefix_leases)
        front = SimpleNamespace(sessions=store, responses=SessionStore(), client=client)
        telling = asyncio.ensure_future(tell_ended(front))
        await asyncio.sleep(0)
        store.open("a")
        lease = store.append("a", "r", lambda later: [1]).lease()["prefix_lease"]
        if ends == "finished":
            await asyncio.to_thread(store.finish, "a")
        else:
            await asyncio.to_thread(store.open, "b")
        assert await told.get() == [lease]
        telling.cancel()

    asyncio.run(run())
