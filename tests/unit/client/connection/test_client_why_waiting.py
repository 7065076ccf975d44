"""A generation that times out says what the engine waits for, if it waits."""

import asyncio
import re

import pytest
from support.fake_scheduler import FakeScheduler, answer, status_reply

from caesura.client import AsyncSchedulerClient, SchedulerClient, TimedOut
from caesura.io_struct import GenerateReqInput, GetStatusReqInput

TIMEOUT = 0.4
"""Long enough for the status of a fake engine; what cannot come never comes, so the tests do not depend on
it.
"""


def engine_in(**state):
    def handle(request):
        if isinstance(request, GenerateReqInput):
            return []
        if not isinstance(request, GetStatusReqInput):
            return answer(request)
        reply = status_reply(request)
        for name, value in state.items():
            setattr(reply, name, value)
        return [reply]

    return handle


def blocking(endpoint):
    with SchedulerClient(endpoint, owner="mine") as client:
        streaming, whole = client.submit([1], stream=True), client.submit([1])
        for wait in (
            lambda: client.generate([1], timeout=TIMEOUT),
            lambda: client.generate([[1], [2]], timeout=TIMEOUT),
            lambda: whole.result(TIMEOUT),
            lambda: list(streaming.deltas(TIMEOUT)),
        ):
            with pytest.raises(TimedOut) as caught:
                wait()
            yield caught.value


def coroutines(endpoint):
    async def main():
        async with AsyncSchedulerClient(endpoint, owner="mine") as client:
            streaming, whole = await client.submit([1], stream=True), await client.submit([1])
            for wait in (
                client.generate([1], timeout=TIMEOUT),
                whole.result(TIMEOUT),
                anext(streaming.deltas(TIMEOUT)),
            ):
                with pytest.raises(TimedOut) as caught:
                    await wait
                yield caught.value

    return asyncio.run(_collected(main()))


async def _collected(errors):
    return [error async for error in errors]


PAUSED = "the engine was paused (in_place) by 'trainer', 1.5 s ago, and waits for continue_generation"


@pytest.mark.parametrize("errors_of", [blocking, coroutines])
def test_a_pause_is_told_with_its_owner_and_its_age(endpoint, errors_of):
    with FakeScheduler(endpoint, engine_in(pause_owner="trainer")) as fake:
        for error in errors_of(endpoint):
            assert re.fullmatch(
                rf"no answer within {TIMEOUT} s to message \w+: {re.escape(PAUSED)}", error.message
            )
            assert error.detail["paused"] == {"mode": "in_place", "owner": "trainer", "age_s": 1.5}
            assert error.message_id
        heard = [fake.requests.get() for _ in range(fake.requests.qsize())]
        asked = [request for request in heard if isinstance(request, GetStatusReqInput)]
        assert asked
        assert {request.owner for request in asked} == {""}, "no lease is renewed by it"


@pytest.mark.parametrize(
    "state,sentence",
    [
        ({}, "the engine was paused (in_place) by a client that gave no owner, 1.5 s ago"),
        (
            {"generation": "running", "pause_mode": None, "weights": "updating"},
            "its weights are being updated",
        ),
        (
            {"weights": "poisoned"},
            "continue_generation; its weights are poisoned, and it waits for a complete update",
        ),
        (
            {"generation": "running", "pause_mode": None, "released_tags": ["kv_cache"]},
            "its memory is released, and it waits for resume_memory(['kv_cache'])",
        ),
    ],
)
def test_other_reasons_for_waiting_are_told(endpoint, state, sentence):
    with FakeScheduler(endpoint, engine_in(**state)):
        assert all(sentence in error.message for error in blocking(endpoint))


def test_an_engine_that_runs_is_not_blamed(endpoint):
    with FakeScheduler(endpoint, engine_in(generation="running", pause_mode=None)):
        for error in blocking(endpoint):
            assert re.fullmatch(rf"no answer within {TIMEOUT} s to message \w+", error.message)
            assert "paused" not in error.detail


def test_an_engine_that_says_nothing_is_not_waited_for(endpoint):
    with FakeScheduler(endpoint, lambda _: []):
        for error in blocking(endpoint):
            assert re.fullmatch(rf"no answer within {TIMEOUT} s to message \w+", error.message)


def test_status_commands_change_nothing(endpoint):
    with FakeScheduler(endpoint, engine_in()) as fake, SchedulerClient(endpoint) as client:
        handle = client.submit([1])
        for timeout in (0, -1, 0.0):
            with pytest.raises(TimedOut):
                handle.result(timeout)
        client.pause()
        heard = [fake.next_request(), fake.next_request()]
        assert [type(request).__name__ for request in heard] == [
            "GenerateReqInput",
            "PauseGenerationReqInput",
        ]
