"""The fleet of ``caesura serve --worker-urls``, without its HTTP, on engines without a model."""
# ruff: noqa: ASYNC110  (an engine tells nobody)

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from support.intercepted import intercept, intercept_no_more
from support.light_engines import LightEngines
from support.waiting import PATIENCE_S

from caesura.client import EngineDied, EngineError, InvalidRequest, SamplingParams, Unsupported
from caesura.client.group.members import EngineAddress
from caesura.client.group.replicas import ReplicaFleet
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetStatusReqInput,
    Request,
    UpdateWeightFromDiskReqInput,
)

PARAMS = SamplingParams(max_new_tokens=4)
Body = Callable[[LightEngines, ReplicaFleet], Awaitable[None]]


def run(body: Body, number: int = 3, **options: Any) -> None:
    async def main() -> None:
        with LightEngines(number) as engines:
            addresses = [EngineAddress(each) for each in engines.endpoints]
            async with (
                asyncio.timeout(PATIENCE_S),
                ReplicaFleet(addresses, owner="http", look_interval_s=0, **options) as fleet,
            ):
                fleet.copy = no_copy  # type: ignore[method-assign]  # the folder is read instead
                await body(engines, fleet)

    asyncio.run(main())


async def no_copy(*_: EngineAddress) -> None:
    raise Unsupported("a light engine sends no weights")


def test_pauses_of_updates_have_a_lease_that_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr("caesura.client.group.leases.RENEW_S", 0.02)

    async def body(engines: LightEngines, fleet: ReplicaFleet) -> None:
        await fleet.client.begin_weight_update()
        await fleet.client.update_weights_from_disk(tmp_path, weight_version="new")
        assert [(each.paused, each.lease_s) for each in engines.engines] == [("retract", 60.0)] * 3
        while not all(each.renewals > 1 for each in engines.engines):
            await asyncio.sleep(0.01)
        await fleet.client.end_weight_update()
        assert [each.paused for each in engines.engines] == [None] * 3
        await fleet.client.pause("in_place")  # the trainer's: it has asked for no lease, and gets none
        assert [each.lease_s for each in engines.engines] == [None] * 3
        await fleet.client.update_weights_from_disk(tmp_path, weight_version="newer")
        assert [each.paused for each in engines.engines] == ["in_place"] * 3
        assert fleet.leases.held == ()
        await fleet.client.continue_generation()

    run(body)


def test_an_engine_removed_in_a_session_goes_on_alone(tmp_path):
    async def body(engines: LightEngines, fleet: ReplicaFleet) -> None:
        await fleet.client.begin_weight_update()
        await fleet.client.update_weights_from_disk(tmp_path, weight_version="new")
        assert [each.session is None for each in engines.engines] == [False] * 3
        waiting = await fleet.client.submit([1, 2], PARAMS)
        await fleet.remove(engines.endpoints[1])
        removed = engines.engines[1]
        assert (removed.session, removed.paused) == (None, None)
        reply = await fleet.client.end_weight_update()
        assert reply.committed
        assert [each.label for each in engines.engines] == ["new", "initial", "new"]
        assert len((await waiting.result()).output_ids) == 4
        assert [each.paused for each in engines.engines] == [None] * 3

    run(body)


def test_a_removal_waits_for_an_update_under_way(tmp_path):
    """The engine that is taken out has the weights of the update, or it has had no part in it."""
    began, go_on = threading.Event(), threading.Event()

    def holds(number: int, request: Request) -> bool:
        if number == 0 and isinstance(request, UpdateWeightFromDiskReqInput):
            began.set()
            go_on.wait(PATIENCE_S)
        return False

    async def main() -> None:
        with LightEngines(3, dies=holds) as engines:
            addresses = [EngineAddress(each) for each in engines.endpoints]
            async with asyncio.timeout(PATIENCE_S), ReplicaFleet(addresses, owner="http") as fleet:
                update = asyncio.ensure_future(
                    fleet.client.update_weights_from_disk(tmp_path, weight_version="new")
                )
                await asyncio.to_thread(began.wait, PATIENCE_S)
                removal = asyncio.ensure_future(fleet.remove(engines.endpoints[1]))
                await asyncio.sleep(0)
                assert not removal.done()
                go_on.set()
                assert (await update).committed
                await removal
                assert [each.label for each in engines.engines] == ["new"] * 3
                assert [each.name for each in fleet.members] == [engines.endpoints[0], engines.endpoints[2]]

    asyncio.run(main())


def test_wrong_addresses_are_refused_and_change_nothing():
    async def body(engines: LightEngines, fleet: ReplicaFleet) -> None:
        port = engines.endpoints[0].rpartition(":")[2]
        with answering(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 8) as web:
            for wrong in (
                f"tcp://localhost:{port}",  # an engine that is there, by another name
                engines.endpoints[0],
                "tcp://no-such-host.invalid:5555",
                f"tcp://127.0.0.1:{web}",
                "http://127.0.0.1:1",
                "",
            ):
                for _ in range(3):  # a failed try must not harm the next one, nor other connections
                    with pytest.raises(EngineError):
                        await fleet.add(wrong)
        assert [member.state for member in fleet.members] == ["serving"] * 3
        for number in range(12):
            (output,) = await fleet.client.generate([[number]], PARAMS)
            assert len(output.output_ids) == 4

    run(body)


@contextlib.contextmanager
def answering(said: bytes) -> Iterable[int]:
    """Yield the port of a listener that says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as client:
                        client.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("what", ["heal", "add"])
def test_a_silent_engine_holds_up_no_update(tmp_path, monkeypatch, what):
    monkeypatch.setattr("caesura.client.group.fleet.PROBE_S", PATIENCE_S)
    monkeypatch.setattr("caesura.client.group.fleet.ASK_S", PATIENCE_S)

    async def body(engines: LightEngines, fleet: ReplicaFleet) -> None:
        asked = asyncio.Event()
        silent, name = fleet.members[2], engines.endpoints[2]
        with contextlib.ExitStack() as opened:
            nobody = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            if what == "heal":

                async def never(_: Callable[[], Awaitable[Any]]) -> Any:
                    asked.set()
                    await asyncio.Event().wait()

                intercept(silent.client, GetStatusReqInput, never)
                fleet.dispatcher.lost(silent, EngineDied("it is silent"))
                work = asyncio.ensure_future(fleet.heal())
                await asked.wait()
            else:
                await fleet.remove(name)
                work = asyncio.ensure_future(fleet.add(f"tcp://127.0.0.1:{nobody.getsockname()[1]}"))
                accepted, _ = await asyncio.to_thread(nobody.accept)  # and that is all that it does
                opened.enter_context(accepted)
            reply = await fleet.client.update_weights_from_disk(tmp_path, weight_version="new")
            assert reply.committed
            assert not work.done()
            work.cancel()
            await asyncio.wait([work])
        assert [each.label for each in engines.engines] == ["new", "new", "initial"]

    run(body)


def test_one_engine_is_not_two_workers():
    async def main() -> None:
        with LightEngines(1) as engines:
            port = engines.endpoints[0].rpartition(":")[2]
            twice = [EngineAddress(f"tcp://{host}:{port}") for host in ("127.0.0.1", "localhost")]
            with pytest.raises(InvalidRequest, match="is the engine that the fleet has as"):
                await ReplicaFleet(twice, owner="http").open()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [UpdateWeightFromDiskReqInput, GetStatusReqInput, EndWeightUpdateReqInput])
def test_a_worker_restarted_in_an_update_stops_no_other(tmp_path, kind):
    """A new process answers that does not know the session, which refuses no update."""

    async def body(engines: LightEngines, fleet: ReplicaFleet) -> None:
        victim = fleet.members[1].client

        async def restarted(send: Callable[[], Awaitable[Any]]) -> Any:
            if engines.engines[1].loaded != "new" and kind is GetStatusReqInput:
                return await send()  # those before the session has loaded
            intercept_no_more(victim)
            before = victim.incarnation
            engines.end([1])
            engines.start([1])
            while victim.incarnation == before:
                with contextlib.suppress(EngineError):
                    await victim.flush_cache()
            return await send()

        intercept(victim, kind, restarted)
        reply = await fleet.client.update_weights_from_disk(tmp_path, weight_version="new")
        assert reply.committed
        assert [member.serves for member in fleet.members] == [True, False, True]
        assert [each.label for each in engines.engines] == ["new", "initial", "new"]
        assert await fleet.heal() == [engines.endpoints[1]]
        assert engines.engines[1].label == "new"

    run(body)


def test_a_worker_that_dies_in_begin_is_left_out(tmp_path):
    async def main() -> None:
        def dies(number: int, request: Request) -> bool:
            return number == 1 and isinstance(request, BeginWeightUpdateReqInput)

        with LightEngines(3, dies=dies) as engines:
            addresses = [EngineAddress(each) for each in engines.endpoints]
            async with (
                asyncio.timeout(PATIENCE_S),
                ReplicaFleet(addresses, owner="http", look_interval_s=0) as fleet,
            ):
                assert (await fleet.client.update_weights_from_disk(tmp_path)).committed
                assert [member.state for member in fleet.members] == ["serving", "gone", "serving"]

    asyncio.run(main())
