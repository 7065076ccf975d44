"""Sessions and promises of Tinker's clients, without a model."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Response
from support.fake_scheduler import answer

from caesura.client.exceptions import QueueFull
from caesura.client.serve.tinker import asample
from caesura.client.serve.tinker.promises import Promise, Sampler, TinkerClients
from caesura.io_struct import GenerateReqInput, GetStatusReqInput, Message, Request


class Questions:
    """The engine's status, of which each question takes an answer."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[None] = asyncio.Queue()
        self.answers: asyncio.Queue[None] = asyncio.Queue()

    async def status(self, *, owner: str) -> None:
        assert owner == ""
        self.asked.put_nowait(None)
        await self.answers.get()


def run(test: Callable[[TinkerClients, Any], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def main() -> None:
        client: Any = Questions()
        await test(TinkerClients(client, **limits), client)

    asyncio.run(main())


def promised(clients: TinkerClients, name: str, work: Coroutine[Any, Any, Any] | None = None) -> Promise:
    async def answer(found: Any, _: bool) -> Response[bytes]:
        return Response(found)

    return clients.promise(name, clients.begin("session"), work or asyncio.Event().wait(), answer)


def test_a_session_without_heartbeats_ends():
    async def test(clients: TinkerClients, _: object) -> None:
        promise = promised(clients, "a")
        await asyncio.wait({promise.task})
        assert promise.task.cancelled()
        assert not clients.sessions
        assert not clients.promises

    run(test, session_s=0.0)


def test_a_heartbeat_is_the_start_of_another_term():
    async def test(clients: TinkerClients, _: object) -> None:
        session = clients.begin("session")
        first = session.ends
        assert clients.begin("session") is session
        assert first.cancelled()
        assert not session.ends.cancelled()
        assert session.ends.when() > first.when()

    run(test)


def test_results_that_nobody_retrieves_are_bounded():
    async def test(clients: TinkerClients, _: object) -> None:
        for name in ("a", "b"):
            promised(clients, name)
        with pytest.raises(QueueFull, match="2 results have not been retrieved"):
            promised(clients, "c")
        clients.drop("a")
        promised(clients, "c")

    run(test, max_promises=2)


def test_the_last_retrieved_results_stay():
    async def test(clients: TinkerClients, _: object) -> None:
        for name in ("unread", "a", "b", "c"):
            promise = promised(clients, name, asyncio.sleep(0, name))
            await promise.task
            if name != "unread":
                clients.retrieved(promise)
        assert list(clients.promises) == ["unread", "b", "c"]

    run(test, max_retrieved=2)


def test_a_request_waits_for_a_question_after_it():
    async def test(clients: TinkerClients, engine: Questions) -> None:
        def admitted(count: int) -> list[asyncio.Task[None]]:
            sampler = Sampler(id="s", session=clients.begin("session"))
            promise = promised(clients, "a")
            return [asyncio.ensure_future(clients.admitted(promise, sampler)) for _ in range(count)]

        early = admitted(2)
        await engine.asked.get()
        late = admitted(3)
        engine.answers.put_nowait(None)
        await asyncio.gather(*early)
        await engine.asked.get()
        assert not any(each.done() for each in late)
        engine.answers.put_nowait(None)
        await asyncio.gather(*late)
        assert engine.asked.empty()

    run(test)


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_result_that_is_not_there_is_asked_for_again(serve, monkeypatch, state):
    monkeypatch.setattr(asample, "HOLD_S", 0.0)

    def handler(request: Request) -> Iterable[Message]:
        if isinstance(request, GenerateReqInput):
            return []
        found = answer(request)
        is_status = isinstance(request, GetStatusReqInput)
        return [msgspec.structs.replace(each, generation=state) for each in found] if is_status else found

    _, server = serve(handler, served_model_name="base")
    with httpx.Client(base_url=f"{server.url}/api/v1", timeout=None) as http:

        def post(route: str, **body: object) -> dict[str, Any]:
            response = http.post(route, json=body)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        session = post("create_session")["session_id"]
        made = post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="base"
        )
        prompt = {"chunks": [{"tokens": [1, 2]}]}
        asked = post("asample", seq_id=0, prompt=prompt, sampling_params={}, **made)
        found = post("retrieve_future", request_id=asked["request_id"])
    paused = {"queue_state": "paused_capacity", "queue_state_reason": "the engine is paused"}
    expected = {"queue_state": "active"} if state == "running" else paused
    assert found == {"type": "try_again", "request_id": asked["request_id"], **expected}
