"""``torch_empty_cache`` arrives, by every door: over HTTP, from the asyncio and from the blocking client."""

import asyncio

import pytest
from support.http_serve import served

from caesura.client import AsyncControlClient, ControlClient, launch_scheduler


@pytest.fixture(scope="module")
def engine(tiny_model):
    with launch_scheduler(tiny_model, dtype="float32", num_threads=1, kv_pool_tokens=1024) as engine:
        yield engine


def emptied(engine, cause: str) -> bool:
    """Whether the last event of ``cause`` says that something was given back, be it 0 bytes."""
    events = [event for event in engine.memory_history().events if event.cause == cause]
    return events[-1].returned is not None


@pytest.mark.parametrize("asks", [True, False])
def test_over_http(engine, other_model, asks):
    with served("--endpoint", engine.endpoint, "--weights-root", str(other_model.parent)) as server:
        server.ok("/pause_generation", {"mode": "abort"})
        server.ok("/continue_generation", {"torch_empty_cache": asks})
        assert emptied(engine, "continue") is asks
        assert server.post(f"/flush_cache?torch_empty_cache={str(asks).lower()}").status_code == 200
        assert emptied(engine, "flush") is asks
        body = {"model_path": str(other_model), "torch_empty_cache": asks}
        server.ok("/update_weights_from_disk", body)
        assert emptied(engine, "update_commit") is asks


@pytest.mark.parametrize("asks", [True, False])
def test_from_the_asyncio_client(engine, other_model, asks):
    async def cycle() -> None:
        async with AsyncControlClient(engine.endpoint) as client:
            await client.pause("abort")
            report = await client.continue_generation(torch_empty_cache=asks)
            assert (report.freed is not None) is asks
            await client.update_weights_from_disk(other_model, torch_empty_cache=asks)

    asyncio.run(cycle())
    assert emptied(engine, "continue") is asks
    assert emptied(engine, "update_commit") is asks


@pytest.mark.parametrize("asks", [True, False])
def test_from_the_blocking_client(engine, other_model, asks):
    with ControlClient(engine.endpoint) as client:
        client.pause("abort")
        assert (client.continue_generation(torch_empty_cache=asks).freed is not None) is asks
        client.update_weights_from_disk(other_model, torch_empty_cache=asks)
    assert emptied(engine, "continue") is asks
    assert emptied(engine, "update_commit") is asks
