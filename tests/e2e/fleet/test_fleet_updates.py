"""Updates of a fleet: all members commit or none does, and another fleet adopts the engines of a dead one."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fleet_owner import killed_owner
from support.intercepted import intercept, intercept_no_more
from support.lanes import quick
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    AsyncSchedulerClient,
    EngineDied,
    EngineError,
    InternalError,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    WeightMismatch,
    WeightsInvalid,
    launch_scheduler,
)
from caesura.client.group import EngineAddress, Fleet, FleetUpdateFailed
from caesura.client.group.fleet import KEEPALIVE_TIMEOUT_S
from caesura.client.group.leases import LeaseRenewal
from caesura.client.group.members import Member
from caesura.client.trainer import SharedTensors
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetStatusReqOutput,
    PauseGenerationReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
LONG = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
SHORT_S = 0.5
DEADLINE_S = 12.0
"""Seconds of an update, a quarter of them patience with a busy machine, and half of the keepalive timeout."""


@pytest.fixture(scope="module")
def launch(tiny_model) -> Iterator[Callable[[], SchedulerClient]]:
    launched = []

    def one() -> SchedulerClient:
        launched.append(launch_scheduler(tiny_model, dtype="float32", num_threads=1, kv_pool_tokens=2048))
        return launched[-1].client

    yield one
    for engine in launched:
        engine.close()


@pytest.fixture(scope="module")
def engines(launch) -> list[SchedulerClient]:
    return [launch(), launch()]


@pytest.fixture
def tensors(other_model) -> dict[str, Any]:
    return weights_of(other_model)


@pytest.fixture(autouse=True)
def known_weights(engines, tiny_model) -> None:
    for engine in engines:
        engine.pause("abort")
        engine.update_weights_from_disk(tiny_model, weight_version="first")
        engine.continue_generation(force=True)


def endpoints(engines: list[SchedulerClient]) -> list[str]:
    return [engine.endpoint for engine in engines]


def statuses(engines: list[SchedulerClient]) -> list[GetStatusReqOutput]:
    return [engine.status(owner="") for engine in engines]


def run(engines: list[SchedulerClient], body: Callable[[Fleet], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        options.setdefault("verify", "checksums")
        options.setdefault("look_interval_s", 0)
        options.setdefault("patience_s", 20.0)
        async with asyncio.timeout(PATIENCE_S), Fleet(endpoints(engines), **options) as fleet:
            await body(fleet)

    asyncio.run(main())


async def served(fleet: Fleet) -> list[tuple[str, int]]:
    found = []
    for member in fleet.members:
        others = [other for other in fleet.members if other is not member and other.serves]
        for other in others:
            fleet.dispatcher.fence(other, "one at a time")
        output = await fleet.generate(PROMPT, GREEDY)
        found += [(span.version, span.epoch) for span in output.weight_versions]
        for other in others:
            fleet.dispatcher.admit(other, other.epoch)
    return found


@pytest.mark.parametrize("transport", ["disk", "tensor", "ipc", "shared", "distributed", "chain"])
def test_every_transport_updates_all_members(engines, tensors, other_model, transport):
    async def body(fleet: Fleet) -> None:
        before = await fleet.generate(PROMPT, GREEDY, return_logprob=True)
        epoch = fleet.weights_epoch
        handles = [await fleet.submit([*PROMPT, number], LONG) for number in range(4)]
        if transport == "disk":
            done = await fleet.update(model_path=other_model, weight_version="second")
        elif transport == "shared":
            with SharedTensors(tensors) as shared:
                done = await fleet.update(shared, transport="ipc", weight_version="second")
        else:
            done = await fleet.update(tensors, transport=transport, weight_version=2)
        assert (done.epoch, done.fenced, len(done.replies)) == (epoch + 1, {}, 2)
        label = done.weight_version
        assert await served(fleet) == [(label, epoch + 1)] * 2
        totals = {(await member.client.check_weights()).total for member in fleet.members}
        assert len(totals) == 1
        for handle in handles:
            spans = (await handle.result()).weight_versions
            epochs = [span.epoch for span in spans]
            assert epochs == sorted(epochs)
            assert {span.version for span in spans} <= {"first", label}
        after = await fleet.generate(PROMPT, GREEDY, return_logprob=True, min_weights_epoch=epoch + 1)
        assert after.output_logprobs != before.output_logprobs

    run(engines, body)


@pytest.mark.parametrize("asks", [True, False])
def test_members_empty_their_device_caches_as_asked(engines, other_model, asks):
    def emptied(cause: str) -> list[bool]:
        last = [[e for e in each.memory_history().events if e.cause == cause][-1] for each in engines]
        return [event.returned is not None for event in last]

    async def body(fleet: Fleet) -> None:
        async with fleet.paused(torch_empty_cache=asks):
            pass
        assert emptied("continue") == [asks] * 2
        await fleet.pause()
        await fleet.continue_generation(torch_empty_cache=not asks)
        assert emptied("continue") == [not asks] * 2
        await fleet.update(model_path=other_model, torch_empty_cache=asks)
        assert emptied("continue") == [asks] * 2
        await fleet.flush_cache(torch_empty_cache=asks)
        assert emptied("flush") == [asks] * 2

    run(engines, body)


def test_a_refusal_by_one_member_updates_no_member(engines, tensors):
    async def body(fleet: Fleet) -> None:
        first, second = fleet.members
        epochs = [member.epoch for member in fleet.members]
        engines[1].begin_weight_update()  # somebody else's
        with pytest.raises(FleetUpdateFailed) as caught:
            await fleet.update(tensors, weight_version="second")
        assert set(caught.value.reasons) == {second.name}
        assert caught.value.code == "session_open"
        assert caught.value.serving == [first.name]  # the other cannot continue with that session open
        engines[1].end_weight_update(commit=False)
        assert await fleet.heal() == [second.name]
        with pytest.raises(FleetUpdateFailed) as caught:
            await fleet.update({**tensors, "nobody's": tensors["model.norm.weight"]}, weight_version="second")
        assert all(isinstance(error, WeightMismatch) for error in caught.value.reasons.values())
        assert [member.epoch for member in fleet.members] == epochs
        assert await served(fleet) == [("first", fleet.weights_epoch)] * 2
        with pytest.raises(InvalidRequest):
            await fleet.update(tensors, transport="disk")

    run(engines, body)


def test_poisoned_members_come_back_from_a_peer(engines, tensors):
    async def body(fleet: Fleet) -> None:
        first, second = fleet.members

        async def fails(*_: Any, **__: Any) -> Any:
            raise InternalError("the test says so")

        second.client.update_weights_from_tensor = fails
        handle = await fleet.submit(PROMPT, LONG)
        with pytest.raises(FleetUpdateFailed) as caught:
            await fleet.update(tensors, weight_version="second")
        assert caught.value.serving == [second.name]
        assert (first.state, engines[0].status().weights) == ("fenced", "poisoned")
        output = await handle.result()
        assert {span.version for span in output.weight_versions} == {"first"}
        assert len(output.output_ids) == 200
        assert await fleet.heal() == [first.name]
        assert engines[0].status().weights == "valid"
        assert await served(fleet) == [("first", fleet.weights_epoch)] * 2

    run(engines, body)


def test_members_that_differ_are_not_committed(engines, tensors):
    async def body(fleet: Fleet) -> None:
        second = fleet.members[1].client
        send = second.update_weights_from_tensor
        others = {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}
        second.update_weights_from_tensor = lambda _, **options: send(others, **options)
        with pytest.raises(FleetUpdateFailed, match="other weights than the others"):
            await fleet.update(tensors, weight_version="second")
        assert not fleet.dispatcher.serving
        handle = await fleet.submit(PROMPT, GREEDY)  # waits: nobody has weights to serve it with
        del second.update_weights_from_tensor
        done = await fleet.update(tensors, weight_version="third")
        assert done.fenced == {}
        assert {span.version for span in (await handle.result()).weight_versions} == {"third"}

    run(engines, body)


@pytest.mark.parametrize(
    "phase",
    quick([PauseGenerationReqInput, UpdateWeightsFromTensorReqInput, BeginWeightUpdateReqInput], 2),
)
def test_a_member_that_hangs_is_fenced_and_not_waited_for(engines, tensors, phase):
    async def body(fleet: Fleet) -> None:
        slow, other = fleet.members
        epoch = fleet.weights_epoch
        fleet.dispatcher.fence(other, "until the request has begun")
        handle = await fleet.submit(PROMPT, LONG, stream=True)
        async for _ in handle:
            break
        fleet.dispatcher.admit(other, other.epoch)

        async def stopped(send: Callable[[], Awaitable[Any]]) -> Any:
            os.kill(slow.status.pid, signal.SIGSTOP)
            return await send()

        intercept(slow.client, phase, stopped)
        try:
            began = time.monotonic()
            done = await fleet.update(tensors, weight_version="second", deadline_s=DEADLINE_S)
            assert time.monotonic() - began < KEEPALIVE_TIMEOUT_S
            assert (list(done.replies), list(done.fenced)) == ([other.name], [slow.name])
            assert slow.state == "fenced"
            output = await handle.result()
            assert len(output.output_ids) == 200
            assert {span.version for span in output.weight_versions} <= {"first", "second"}
        finally:
            intercept_no_more(slow.client)
            os.kill(slow.status.pid, signal.SIGCONT)
        assert not slow.serves
        assert await fleet.heal() == [slow.name]
        assert await served(fleet) == [("second", epoch + 1)] * 2

    run(engines, body)


@pytest.mark.parametrize(
    "phase", quick([EndWeightUpdateReqInput, BeginWeightUpdateReqInput, UpdateWeightsFromTensorReqInput])
)
def test_a_member_killed_in_an_update_does_not_stop_it(engines, launch, tensors, phase):
    victim = launch()
    victim.update_weights_from_disk(engines[0].status().model_path, weight_version="first")

    async def body(fleet: Fleet) -> None:
        doomed = next(member for member in fleet.members if member.address.endpoint == victim.endpoint)
        handles = [await fleet.submit([*PROMPT, number], LONG) for number in range(6)]

        async def killed(send: Callable[[], Awaitable[Any]]) -> Any:
            os.kill(doomed.status.pid, signal.SIGKILL)
            return await send()

        intercept(doomed.client, phase, killed)
        done = await fleet.update(tensors, weight_version="second")
        assert set(done.fenced) == {doomed.name}
        assert doomed.state == "gone"
        for handle in handles:
            assert len((await handle.result()).output_ids) == 200
        assert {each.engine.weight_version for each in (await fleet.status()).members if each.engine} == {
            "second"
        }

    run([*engines, victim], body)


def test_a_broken_chain_costs_those_behind_the_break(engines, launch, tensors):
    """A member in the middle dies as it passes weights on: the one before commits, the one behind heals."""
    victim = launch()
    victim.update_weights_from_disk(engines[0].status().model_path, weight_version="first")

    async def body(fleet: Fleet) -> None:
        first, doomed, last = fleet.members
        await fleet.update(tensors, transport="chain", weight_version="second")
        assert await served(fleet) == [("second", fleet.weights_epoch)] * 3
        handles = [await fleet.submit([*PROMPT, number], LONG) for number in range(6)]

        async def killed(send: Callable[[], Awaitable[Any]]) -> Any:
            os.kill(doomed.status.pid, signal.SIGKILL)
            return await send()

        intercept(doomed.client, UpdateWeightsFromDistributedReqInput, killed)
        done = await fleet.update(tensors, transport="chain", weight_version="third")
        assert (list(done.replies), sorted(done.fenced)) == ([first.name], sorted([doomed.name, last.name]))
        for handle in handles:
            assert len((await handle.result()).output_ids) == 200
        assert await fleet.heal() == [last.name]
        await fleet.remove(doomed.name)
        assert await served(fleet) == [("third", fleet.weights_epoch)] * 2
        await fleet.update(tensors, transport="chain", weight_version="fourth")  # over links of the two
        assert await served(fleet) == [("fourth", fleet.weights_epoch)] * 2

    run([engines[0], victim, engines[1]], body)


def test_a_chain_refused_by_one_member_changes_none(engines, tensors):
    async def body(fleet: Fleet) -> None:
        def client_threads() -> int:
            return sum(each.name == "caesura-client" for each in threading.enumerate())

        before = client_threads()
        wrong = {**tensors, "model.norm.weight": tensors["model.norm.weight"][:1]}
        with pytest.raises(FleetUpdateFailed, match=r"model\.norm\.weight"):
            await fleet.update(wrong, transport="chain", weight_version="second")
        assert {(each.weights, each.weight_version) for each in statuses(engines)} == {("valid", "first")}
        await fleet.update(tensors, transport="chain", weight_version="second")
        assert await served(fleet) == [("second", fleet.weights_epoch)] * 2
        assert client_threads() == before  # members lend their connections

    run(engines, body)


def test_pauses_hold_all_members_and_newcomers(engines, tensors, launch):
    newcomer = launch()

    async def body(fleet: Fleet) -> None:
        async with fleet.paused("retract"):
            handle = await fleet.submit(PROMPT, GREEDY)
            await fleet.update(tensors, weight_version="second")
            member: Member = await fleet.add(newcomer.endpoint)
            states = [(await each.client.status()).generation for each in fleet.members]
            assert states == ["paused"] * 3
            assert not handle.done()
        output = await handle.result()
        assert {span.version for span in output.weight_versions} == {"second"}
        assert (newcomer.status().generation, newcomer.status().weight_version) == ("running", "second")
        assert await served(fleet) == [("second", fleet.weights_epoch)] * 3
        with pytest.raises(InvalidRequest):
            await fleet.add(newcomer.endpoint)
        await fleet.remove(member.name)
        assert len(fleet.members) == 2

    run(engines, body)


@pytest.mark.parametrize(("mode", "lease_s"), [("bogus", 60.0), ("in_place", 1e9)])
def test_a_pause_that_engines_refuse_is_no_pause(engines, mode, lease_s):
    """A trainer that took it for one would take the devices of engines that compute on."""

    async def body(fleet: Fleet) -> None:
        with pytest.raises(EngineError, match=r"mode|lease_s"):
            await fleet.pause(mode)
        assert fleet.paused_mode is None
        assert [status.generation for status in statuses(engines)] == ["running"] * 2
        assert len((await fleet.generate(PROMPT, GREEDY)).output_ids) == 8

    run(engines, body, lease_s=lease_s)


def test_a_member_that_refuses_a_pause_ends_it_for_all(engines):
    async def body(fleet: Fleet) -> None:
        async def refuses(_: Callable[[], Awaitable[Any]]) -> Any:
            raise InvalidRequest("it refuses")

        intercept(fleet.members[1].client, PauseGenerationReqInput, refuses)
        with pytest.raises(InvalidRequest, match="it refuses"):
            await fleet.pause()
        assert [status.generation for status in statuses(engines)] == ["running"] * 2

    run(engines, body)


@pytest.mark.parametrize("lease_s", [0, -1.0, float("nan")])
def test_a_lease_that_is_no_duration_is_refused(lease_s):
    with pytest.raises(InvalidRequest, match="lease_s"):
        Fleet(lease_s=lease_s)


def test_an_update_cancelled_before_its_commit_is_aborted(engines, tensors):
    async def body(fleet: Fleet) -> None:
        loaded = asyncio.Barrier(len(fleet.members) + 1)

        def never_ending(send: Any) -> Any:
            async def send_and_wait(*args: Any, **options: Any) -> Any:
                await send(*args, **options)
                await loaded.wait()
                await asyncio.Event().wait()

            return send_and_wait

        for member in fleet.members:
            client = member.client
            client.update_weights_from_tensor = never_ending(client.update_weights_from_tensor)
        work = asyncio.ensure_future(fleet.update(tensors, weight_version="second"))
        await loaded.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert {(each.weights, each.session) for each in statuses(engines)} == {("poisoned", None)}
        for member in fleet.members:
            del member.client.update_weights_from_tensor
        await fleet.update(tensors, weight_version="third")
        assert await served(fleet) == [("third", fleet.weights_epoch)] * 2

    run(engines, body)


# -- fleets that die -----------------------------------------------------------------------------------------


async def whole(fleet: Fleet, label: str) -> None:
    found = (await fleet.status()).members
    assert [member.state for member in found] == ["serving"] * len(found)
    assert {(each.engine.generation, each.engine.session, each.engine.weights) for each in found} == {
        ("running", None, "valid")
    }
    assert {each.engine.weight_version for each in found} == {label} == {fleet.weight_version}
    assert len({(await member.client.check_weights()).total for member in fleet.members}) == 1
    outputs = await asyncio.gather(
        *(fleet.generate([number], GREEDY, routing_key=str(number)) for number in range(2, 12))
    )
    spans = [span for output in outputs for span in output.weight_versions]
    assert len({span.incarnation for span in spans}) == len(found)
    assert {(span.version, span.epoch) for span in spans} == {(label, fleet.weights_epoch)}


@pytest.mark.parametrize(
    ("point", "label"),
    quick(
        [
            ("one loaded", "first"),
            ("one committed", "second"),
            ("paused", "first"),
            ("begun", "first"),
            ("all committed", "second"),
        ],
        2,
    ),
)
def test_a_fleet_adopts_the_engines_of_a_dead_one(engines, tiny_model, other_model, point, label):
    killed_owner(point, other_model, endpoints(engines))
    assert [status.generation for status in statuses(engines)] == ["paused"] * 2

    async def body(fleet: Fleet) -> None:
        await whole(fleet, label)
        await fleet.update(model_path=tiny_model, weight_version="third")
        await whole(fleet, "third")

    run(engines, body, adopt=True)


def test_adoption_without_complete_weights_names_the_remedy(engines, other_model):
    killed_owner("all loaded", other_model, endpoints(engines))
    with pytest.raises(WeightsInvalid, match=r"no engine has complete weights .*poisoned.* complete update"):
        run(engines, lambda fleet: fleet.status(), adopt=True)
    assert [(status.weights, status.session) for status in statuses(engines)] == [("poisoned", None)] * 2
    engines[1].update_weights_from_disk(other_model, weight_version="again")
    run(engines, lambda fleet: whole(fleet, "again"), adopt=True)


def test_a_fleet_without_weights_can_be_adopted(engines, other_model):
    killed_owner("all loaded", other_model, endpoints(engines))

    async def body(fleet: Fleet) -> None:
        waiting = await fleet.submit(PROMPT, GREEDY)
        await fleet.update(model_path=other_model, weight_version="again")
        assert {span.version for span in (await waiting.result()).weight_versions} == {"again"}
        await whole(fleet, "again")

    run(engines, body, adopt="any")


def test_engines_that_differ_need_to_be_adopted(engines, other_model):
    engines[1].update_weights_from_disk(other_model, weight_version="second")
    with pytest.raises(InvalidRequest, match="adopt=True"):
        run(engines, lambda fleet: fleet.status())
    while engines[1].status().weights_epoch <= engines[0].status().weights_epoch:  # the newest are adopted
        engines[1].update_weights_from_disk(other_model, weight_version="first")
    engines[0].pause("in_place", owner="dead")
    total = engines[1].check_weights().total
    run(engines, lambda fleet: whole(fleet, "first"), adopt=True)
    assert engines[0].check_weights().total == total


@pytest.mark.long
def test_a_dead_engine_does_not_prevent_adoption(engines, tmp_path):
    async def main() -> None:
        async with Fleet([*endpoints(engines), f"ipc://{tmp_path}/nobody"], adopt=True) as fleet:
            assert [member.state for member in fleet.members] == ["serving", "serving", "gone"]

    asyncio.run(main())


def until(engine: SchedulerClient, holds: Callable[[GetStatusReqOutput], bool]) -> GetStatusReqOutput:
    return eventually(lambda: status if holds(status := engine.status(owner="")) else None)


def until_renewed(engine: SchedulerClient) -> None:
    left = [engine.status(owner="").lease_left_s]

    def renewed(status: GetStatusReqOutput) -> bool:
        left.append(status.lease_left_s)
        return left[-1] > left[-2]

    until(engine, renewed)


@pytest.mark.parametrize("kind", [[], ["door"]], ids=["fleet", "door"])
def test_engines_go_on_when_a_dead_fleets_lease_ends(engines, other_model: Path, kind: list[str]):
    killed_owner("one loaded", other_model, [*kind, *endpoints(engines)], lease_s=SHORT_S)
    written = until(engines[0], lambda status: status.pause_owner is None)
    assert (written.generation, written.weights, written.session) == ("paused", "poisoned", None)
    untouched = until(engines[1], lambda status: status.generation == "running")
    assert (untouched.weights, untouched.weight_version, untouched.session) == ("valid", "first", None)
    assert len(engines[1].generate(PROMPT, GREEDY).output_ids) == 8


def test_a_pause_lasts_though_its_event_loop_is_busy(engines):
    async def body(fleet: Fleet) -> None:
        async with fleet.paused("in_place"):
            for engine in engines:  # blocks the loop, as a trainer's step does
                until_renewed(engine)
        assert {status.generation for status in statuses(engines)} == {"running"}

    run(engines, body)


def test_an_unreachable_member_ends_no_lease_of_others(engines, tmp_path):
    bad = EngineAddress("tcp://127.0.0.1:9", f"{tmp_path}/gone", f"{tmp_path}/gone_too")
    engines[0].pause("in_place", owner="trainer", lease_s=PATIENCE_S)
    renewal = LeaseRenewal("trainer", SHORT_S)
    try:
        renewal.hold([bad, EngineAddress(engines[0].endpoint)])
        for _ in range(2):
            until_renewed(engines[0])
    finally:
        renewal.close()
        engines[0].continue_generation(force=True)


def test_an_engine_that_ends_in_adoption_stops_no_other(engines, monkeypatch):
    check = AsyncSchedulerClient.check_weights

    async def ended(client: AsyncSchedulerClient, *args: Any, **options: Any) -> Any:
        if client.endpoint == engines[1].endpoint:
            raise EngineDied("it has ended")
        return await check(client, *args, **options)

    monkeypatch.setattr(AsyncSchedulerClient, "check_weights", ended)

    async def body(fleet: Fleet) -> None:
        assert fleet.members[0].serves
        assert len((await fleet.generate(PROMPT, GREEDY)).output_ids) == 8

    run(engines, body, adopt=True)
