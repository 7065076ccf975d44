"""A fleet's process is killed in an update: engines go on where they can, and another fleet adopts them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fleet_owner import killed_owner
from support.lanes import quick

from caesura.client import (
    AsyncSchedulerClient,
    EngineDied,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    WeightsInvalid,
    launch_scheduler,
)
from caesura.client.group import EngineAddress, Fleet
from caesura.client.group.leases import LeaseRenewal
from caesura.io_struct import GetStatusReqOutput

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
PATIENCE_S = 90.0
SHORT_S = 0.5


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[list[SchedulerClient]]:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 2048}
    with launch_scheduler(tiny_model, **options) as one, launch_scheduler(tiny_model, **options) as two:
        yield [one, two]


@pytest.fixture(autouse=True)
def known_weights(engines, tiny_model) -> None:
    for engine in engines:
        engine.pause("abort")
        engine.update_weights_from_disk(tiny_model, weight_version="first")
        engine.continue_generation(force=True)


def endpoints(engines: list[SchedulerClient]) -> list[str]:
    return [engine.endpoint for engine in engines]


def statuses(engines: list[SchedulerClient]) -> list[GetStatusReqOutput]:
    return [engine.status() for engine in engines]


def run(engines: list[SchedulerClient], body: Callable[[Fleet], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            Fleet(endpoints(engines), look_interval_s=0, patience_s=20.0, **options) as fleet,
        ):
            await body(fleet)

    asyncio.run(main())


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


def test_a_fleet_without_any_weights_can_be_adopted_for_an_update(engines, other_model):
    killed_owner("all loaded", other_model, endpoints(engines))

    async def body(fleet: Fleet) -> None:
        waiting = await fleet.submit(PROMPT, GREEDY)
        await fleet.update(model_path=other_model, weight_version="again")
        assert {span.version for span in (await waiting.result()).weight_versions} == {"again"}
        await whole(fleet, "again")

    run(engines, body, adopt="any")


def test_engines_that_differ_are_refused_unless_they_are_adopted(engines, other_model):
    engines[1].update_weights_from_disk(other_model, weight_version="second")
    with pytest.raises(InvalidRequest, match="adopt=True"):
        run(engines, lambda fleet: fleet.status())
    engines[1].update_weights_from_disk(other_model, weight_version="first")
    engines[0].pause("in_place", owner="dead")
    total = engines[1].check_weights().total
    run(engines, lambda fleet: whole(fleet, "first"), adopt=True)
    assert engines[0].check_weights().total == total


@pytest.mark.long
def test_a_dead_engine_does_not_keep_the_others_from_being_adopted(engines, tmp_path):
    async def main() -> None:
        async with Fleet([*endpoints(engines), f"ipc://{tmp_path}/nobody"], adopt=True) as fleet:
            assert [member.state for member in fleet.members] == ["serving", "serving", "gone"]

    asyncio.run(main())


def until(engine: SchedulerClient, holds: Callable[[GetStatusReqOutput], bool]) -> GetStatusReqOutput:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(status := engine.status(owner="")):
        assert time.monotonic() < deadline, status
    return status


def test_engines_of_a_dead_fleet_go_on_when_its_lease_is_over(engines, other_model: Path):
    killed_owner("one loaded", other_model, endpoints(engines), lease_s=SHORT_S)
    written = until(engines[0], lambda status: status.pause_owner is None)
    assert (written.generation, written.weights, written.session) == ("paused", "poisoned", None)
    untouched = until(engines[1], lambda status: status.generation == "running")
    assert (untouched.weights, untouched.weight_version, untouched.session) == ("valid", "first", None)
    assert len(engines[1].generate(PROMPT, GREEDY).output_ids) == 8


def test_a_pause_lasts_while_its_fleet_lives_though_its_event_loop_is_busy(engines):
    async def body(fleet: Fleet) -> None:
        async with fleet.paused("in_place"):
            for engine in engines:  # blocks the loop, as a trainer's step does
                left: list[float] = [engine.status(owner="").lease_left_s]

                def renewed(status: GetStatusReqOutput, left: list[float] = left) -> bool:
                    left.append(status.lease_left_s)
                    return left[-1] > left[-2]

                until(engine, renewed)
        assert {status.generation for status in statuses(engines)} == {"running"}

    run(engines, body)


def test_a_member_that_cannot_be_connected_to_does_not_end_the_leases_of_others(engines, tmp_path):
    bad = EngineAddress("tcp://127.0.0.1:9", f"{tmp_path}/gone", f"{tmp_path}/gone_too")
    engines[0].pause("in_place", owner="trainer", lease_s=PATIENCE_S)
    renewal = LeaseRenewal("trainer", SHORT_S)
    try:
        renewal.hold([bad, EngineAddress(engines[0].endpoint)])
        left = [engines[0].status(owner="").lease_left_s]

        def renewed(status: GetStatusReqOutput) -> bool:
            left.append(status.lease_left_s)
            return left[-1] > left[-2]

        for _ in range(2):
            until(engines[0], renewed)
    finally:
        renewal.close()
        engines[0].continue_generation(force=True)


def test_an_engine_that_ends_while_it_is_adopted_does_not_keep_the_others_from_it(engines, monkeypatch):
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
