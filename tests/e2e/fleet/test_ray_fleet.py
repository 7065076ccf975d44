"""A fleet on a real Ray cluster of this machine: placed, killed, restarted and scaled by Ray."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from safetensors.torch import load_file
from support.waiting import PATIENCE_S

from caesura.client import SamplingParams
from caesura.client.fleet.members import Member

ray = pytest.importorskip("ray")
from caesura.client.fleet.ray_fleet import Placement, RolloutFleet  # noqa: E402  (needs ray)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
ENGINE = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 2048, "log_level": "ERROR"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Four CPUs by name: engines share what there is."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def run(fleet: Callable[[], RolloutFleet], body: Callable[[RolloutFleet], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), fleet() as opened:
            await body(opened)

    asyncio.run(main())


async def whole(fleet: RolloutFleet, count: int) -> None:
    """Until ``count`` replicas serve."""
    while sum(member.serves for member in fleet.members) < count:  # noqa: ASYNC110  (Ray's work is waited for)
        await asyncio.sleep(0.1)


def test_a_killed_replica_is_restarted_and_gets_its_weights_from_another(tiny_model, other_model):
    """Two replicas; the weights came over the wire, so that no folder has them. Then four, and one."""
    tensors: dict[str, Any] = load_file(next(other_model.glob("*.safetensors")))

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
    """As on another node: an engine that listens on the network refuses who does not have the fleet's key."""

    async def body(fleet: RolloutFleet) -> None:
        (member,) = fleet.members
        assert member.address.endpoint.startswith("tcp://")
        assert fleet.replica(member.name).server_key == member.address.curve_server_key
        assert len((await fleet.generate(PROMPT, LONG)).output_ids) == 200

    run(
        lambda: RolloutFleet(tiny_model, 1, placement={"num_cpus": 1}, engine_options=ENGINE, listen="tcp"),
        body,
    )
