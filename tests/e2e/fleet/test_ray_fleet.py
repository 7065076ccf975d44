"""A fleet on a real Ray cluster of this machine: placed, killed, restarted and scaled by Ray."""

import ast
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fleet_owner import ENGINE, killed_owner
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S

from caesura.client import InvalidRequest, SamplingParams
from caesura.client.group.members import Member

ray = pytest.importorskip("ray")
from caesura.client.group.ray_fleet import Placement, RolloutFleet  # noqa: E402  (needs ray)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "nodes.md"
PROMPT = [5, 6, 7]
LONG = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def run(fleet: Callable[[], RolloutFleet], body: Callable[[RolloutFleet], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), fleet() as opened:
            await body(opened)

    asyncio.run(main())


async def whole(fleet: RolloutFleet, count: int) -> None:
    # Ray's work is waited for.
    while sum(member.serves for member in fleet.members) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def test_a_killed_replica_gets_the_weights_of_another(tiny_model, other_model):
    tensors: dict[str, Any] = weights_of(other_model)

    async def body(fleet: RolloutFleet) -> None:
        whole_run = await fleet.generate([PROMPT], LONG, return_logprob=True)
        done = await fleet.update(tensors, weight_version="second")
        assert (set(done.replies), done.fenced) == ({"replica-0", "replica-1"}, {})
        expected = await fleet.generate([PROMPT], LONG, return_logprob=True)
        assert expected[0].output_logprobs != whole_run[0].output_logprobs
        handle = await fleet.submit(PROMPT, LONG, stream=True, return_logprob=True)
        async for _ in handle:
            break
        busy = max(fleet.members, key=lambda member: member.load)
        before = fleet.replica(busy.name)
        ask, late = fleet.ask, ["the first answer of the engine that comes back"]

        async def slow(member: Member) -> Any:
            if member.state == "joining" and late:
                late.clear()
                raise TimeoutError
            return await ask(member)

        fleet.ask = slow  # type: ignore[method-assign]
        os.kill(before.pid, signal.SIGKILL)
        output = await handle.result()
        assert output.output_ids == expected[0].output_ids
        assert output.output_logprobs == pytest.approx(expected[0].output_logprobs, abs=1e-4)
        await whole(fleet, 2)
        assert not late
        assert fleet.replica(busy.name).pid != before.pid
        assert fleet.replica(busy.name).start != before.start

        await fleet.scale(4)
        status = await fleet.status()
        assert [member.state for member in status.members] == ["serving"] * 4
        assert {member.engine.weight_version for member in status.members} == {"second"}
        totals = {(await member.client.check_weights()).total for member in fleet.members}
        assert len(totals) == 1
        done = await fleet.update(tensors, transport="distributed", weight_version="third")
        assert (len(done.replies), done.fenced) == (4, {})
        handles = [await fleet.submit([*PROMPT, number], LONG) for number in range(4)]
        await fleet.scale(1)
        for handle in handles:
            assert len((await handle.result()).output_ids) == 200
        assert fleet.replicas == len(fleet.members) == 1

    run(
        lambda: RolloutFleet(
            tiny_model, 2, placement=Placement(num_cpus=1), engine_options=ENGINE, verify="checksums"
        ),
        body,
    )


@pytest.mark.long
def test_replicas_of_other_hosts_are_reached_with_keys(tiny_model):
    async def body(fleet: RolloutFleet) -> None:
        (member,) = fleet.members
        assert member.address.endpoint.startswith("tcp://")
        assert fleet.replica(member.name).server_key == member.address.curve_server_key
        assert len((await fleet.generate(PROMPT, LONG)).output_ids) == 200

    run(
        lambda: RolloutFleet(tiny_model, 1, placement={"num_cpus": 1}, engine_options=ENGINE, listen="tcp"),
        body,
    )


def test_the_example_has_an_engine_over_two_bundles(tiny_model):
    program = PAGE.read_text(encoding="utf-8").split("\n## Ray\n")[1].split("```python\n")[1].split("```")[0]
    for there, here in (
        ("num_cpus=64, num_gpus=8", "num_cpus=1"),
        ('"/shared/model", 4', f"{str(tiny_model)!r}, 1"),
        ('{"tp": 16}', '{**ENGINE, "tp": 2}'),
    ):
        assert there in program
        program = program.replace(there, here)
    names: dict[str, Any] = {"ENGINE": ENGINE, "prompts": [PROMPT], "params": LONG}
    code = compile(program, PAGE, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, names))
    assert [len(output.output_ids) for output in names["outputs"]] == [200]


def test_an_engine_over_two_bundles_comes_back(tiny_model):
    placement = Placement(num_cpus=1, bundles=2, strategy="STRICT_PACK")

    async def body(fleet: RolloutFleet) -> None:
        before = await fleet.generate(PROMPT, LONG)
        (group,) = [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
        assert len(group["bundles"]) == 2
        (member,) = fleet.members
        engine, (rank,) = fleet.replica(member.name).pid, (await member.client.status()).ranks
        assert engine not in {parent.pid for parent in psutil.Process(rank.pid).parents()}
        os.kill(rank.pid, signal.SIGKILL)
        while fleet.replica(member.name).pid == engine or not fleet.members:  # noqa: ASYNC110  (Ray's work)
            await asyncio.sleep(0.1)
        await whole(fleet, 1)
        assert (await fleet.generate(PROMPT, LONG)).output_ids == before.output_ids

    run(lambda: RolloutFleet(tiny_model, 1, placement=placement, engine_options=ENGINE | {"tp": 2}), body)


def test_a_named_fleet_is_adopted_by_its_name(tiny_model, other_model):
    address = ray.get_runtime_context().gcs_address
    killed_owner("one committed", other_model, ["ray", address, "rollouts", str(tiny_model)])

    def named(**options: Any) -> RolloutFleet:
        placement = Placement(num_cpus=1)
        return RolloutFleet(
            tiny_model,
            2,
            name="rollouts",
            placement=placement,
            engine_options=ENGINE,
            verify="checksums",
            **options,
        )

    with pytest.raises(InvalidRequest, match="adopt=True"):
        run(named, lambda fleet: fleet.status())

    async def body(fleet: RolloutFleet) -> None:
        assert [member.name for member in fleet.members] == ["replica-0", "replica-1"]
        found = (await fleet.status()).members
        assert [member.state for member in found] == ["serving"] * 2
        assert {(each.engine.generation, each.engine.weight_version) for each in found} == {
            ("running", "second")
        }
        assert len({(await member.client.check_weights()).total for member in fleet.members}) == 1
        os.kill(fleet.replica("replica-0").pid, signal.SIGKILL)
        while fleet.dispatcher.members["replica-0"].serves:  # noqa: ASYNC110  (Ray's work is waited for)
            await asyncio.sleep(0.1)
        await whole(fleet, 2)
        assert {each.engine.weight_version for each in (await fleet.status()).members} == {"second"}
        await fleet.scale(3)
        assert [member.name for member in fleet.members] == ["replica-1", "replica-0", "replica-2"]
        assert len((await fleet.generate(PROMPT, LONG)).output_ids) == 200

    run(lambda: named(adopt=True), body)
    assert not ray.util.list_named_actors(all_namespaces=True)
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}
