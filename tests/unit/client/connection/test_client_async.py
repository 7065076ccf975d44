"""AsyncSchedulerClient: the blocking client's behaviour, from an event loop."""

import asyncio
import inspect
import threading

import pytest
import torch
from support.fake_scheduler import FakeScheduler, answer, delta, finished, results, rid_of, silent
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    AsyncGenerationHandle,
    AsyncSchedulerClient,
    EngineDied,
    GenerationHandle,
    InternalError,
    SamplingParams,
    SchedulerClient,
)
from caesura.client.connection import async_channel
from caesura.io_struct import (
    AbortReq,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    UpdateWeightsFromIPCReqInput,
)


def run(endpoint, body, handler=answer):
    async def main():
        with FakeScheduler(endpoint, handler) as fake:
            async with AsyncSchedulerClient(endpoint) as client:
                await body(client, fake)

    asyncio.run(main(), debug=True)


def public(cls):
    return {
        name: [(each.name, each.kind, each.default) for each in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods_and_arguments():
    launcher_only = {"expect_exit", "engine_exited"}
    blocking = {name: each for name, each in public(SchedulerClient).items() if name not in launcher_only}
    assert public(AsyncSchedulerClient) == blocking
    assert public(AsyncGenerationHandle) == public(GenerationHandle)


def test_work_of_an_update_does_not_stop_the_loop():
    async def main():
        turned = threading.Event()
        asyncio.get_running_loop().call_soon(turned.set)
        assert await async_channel.run(lambda: turned.wait(PATIENCE))

    asyncio.run(main())


def test_a_cancelled_generate_is_aborted(endpoint):
    async def body(client, fake):
        task = asyncio.create_task(client.generate([1], rid="r"))
        await asyncio.to_thread(fake.next_request, GenerateReqInput)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.to_thread(fake.next_request, AbortReq)).rid == "r"

    run(endpoint, body, silent)


def test_a_generation_whose_sink_raises_is_aborted(endpoint):
    class Broken:
        def on_tokens(self, delta):
            raise ValueError("no")

    def one_token(request):
        return [delta((request.rid, 0, 0, [1]))] if isinstance(request, GenerateReqInput) else answer(request)

    async def body(client, fake):
        request = GenerateReqInput(input_ids=[9], sampling_params=SamplingParams(), rid="r", stream=True)
        broken = client.channel.start_generation(request, Broken())
        with pytest.raises(InternalError, match="sink"):
            await broken.waiter
        assert (await client.status(timeout=PATIENCE)).incarnation == "fake"
        assert (await asyncio.to_thread(fake.next_request, AbortReq)).rid == "r"

    run(endpoint, body, one_token)


def unanswered(*kinds):
    return lambda request: [] if isinstance(request, kinds) else answer(request)


def test_a_cancelled_update_aborts_its_session(endpoint):
    async def body(client, fake):
        tensors = [(name, torch.ones(16, 16)) for name in "abc"]
        task = asyncio.create_task(client.update_weights_from_ipc(tensors, bucket_bytes=1024))
        await asyncio.to_thread(fake.next_request, UpdateWeightsFromIPCReqInput)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end = await asyncio.to_thread(fake.next_request, EndWeightUpdateReqInput)
        assert not end.commit

    run(endpoint, body, unanswered(UpdateWeightsFromIPCReqInput, EndWeightUpdateReqInput))


def test_a_session_block_that_is_dropped_is_aborted_without_waiting(endpoint):
    async def body(client, fake):
        async def generator():
            async with client.weight_update():
                yield

        opened = generator()
        await anext(opened)
        await opened.aclose()
        end = await asyncio.to_thread(fake.next_request, EndWeightUpdateReqInput)
        assert not end.commit

    run(endpoint, body, unanswered(EndWeightUpdateReqInput))


def test_a_timer_that_fires_early_is_set_again(endpoint, monkeypatch):
    async def use():
        loop = asyncio.get_running_loop()
        later = loop.call_later
        async with AsyncSchedulerClient(endpoint, connect_timeout=1.0) as client:
            waiting = asyncio.ensure_future(client.status())
            monkeypatch.setattr(loop, "call_later", lambda delay, *rest: later(delay / 2, *rest))
            done, _ = await asyncio.wait({waiting}, timeout=PATIENCE)
            assert done
            with pytest.raises(EngineDied, match="there is no such socket file"):
                waiting.result()

    asyncio.run(use())


def test_a_client_belongs_to_one_loop(endpoint):
    with FakeScheduler(endpoint):
        client = AsyncSchedulerClient(endpoint)

        async def first():
            await client.status(timeout=PATIENCE)

        async def second():
            with pytest.raises(RuntimeError, match="another event loop"):
                await client.status()

        with asyncio.Runner() as runner:
            runner.run(first())
            asyncio.run(second())
            runner.run(client.close())


def test_a_flood_of_messages_is_never_stuck_in_the_socket(endpoint):
    def flood(request):
        steps = [delta((rid_of(request), 0, step, [step])) for step in range(300)]
        return [*steps, results(finished(rid_of(request), list(range(300))))]

    async def body(client, fake):
        outputs = await asyncio.gather(*(client.generate([i], timeout=PATIENCE) for i in range(20)))
        assert all(output.output_ids == list(range(300)) for output in outputs)

    run(endpoint, body, flood)
