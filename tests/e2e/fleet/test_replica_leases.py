"""The end of a pause's lease on several replicas: a trainer that is gone leaves nothing paused, whatever became of the engines."""
# ruff: noqa: ASYNC110  (another process's state is asked for)

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S

from caesura.client import SamplingParams
from caesura.client.group.processes import ReplicaProcesses
from caesura.client.group.replicas import ReplicaFleet
from caesura.client.launch.supervisor import RestartPolicy
from caesura.io_struct.control import LeaseAction

SHORT_S, LONGER_S = 0.5, 3.0
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def processes(tiny_model) -> Iterator[ReplicaProcesses]:
    options = ["--num-threads", "1", "--kv-pool-tokens", "2048", "--dtype", "float32"]
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, window_s=0)
    started = ReplicaProcesses(["--model", str(tiny_model), *options], 2, policy)
    started.start()
    yield started
    started.close()


def run(processes: ReplicaProcesses, body: Callable[[ReplicaFleet], Awaitable[None]]) -> None:
    """``body`` on a fleet; afterwards all replicas must serve and run, without any more commands."""

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            ReplicaFleet(processes, owner="trainer", look_interval_s=0.05) as fleet,
        ):
            await body(fleet)
            while {each.state for each in fleet.members} != {"serving"} or await states(fleet) != {"running"}:
                await asyncio.sleep(0.01)
            assert (fleet.paused_mode, fleet.lease) == (None, None)

    asyncio.run(main())


async def states(fleet: ReplicaFleet) -> set[str]:
    return {(await member.client.status(owner="")).generation for member in fleet.members}


async def kill_all(processes: ReplicaProcesses, fleet: ReplicaFleet) -> None:
    for replica in processes.replicas:
        replica.supervisor.signal(signal.SIGKILL)
    while {member.state for member in fleet.members} != {"gone"}:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("action", ["continue", "abort", "stay"])
def test_a_lease_ends_though_every_engine_that_knew_of_it_has_died(processes, action: LeaseAction):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.pause("in_place", lease_s=SHORT_S, on_lease_expiry=action)
        handle = await fleet.submit([5, 6, 7], GREEDY)
        await kill_all(processes, fleet)
        while fleet.lease is not None:
            await asyncio.sleep(0.01)
        if action == "continue":
            assert len((await handle.result()).output_ids) == 8
            return
        while not fleet.present:
            await asyncio.sleep(0.01)
        status = await fleet.combined("")
        assert (status.generation, status.pause_mode, status.pause_owner) == ("paused", "in_place", None)
        if action == "abort":
            assert (await handle.result()).finish_reason.type == "abort"
        await fleet.client.continue_generation()
        if action == "stay":
            assert len((await handle.result()).output_ids) == 8

    run(processes, body)


def test_a_status_tells_a_pause_that_no_engine_knows_of(processes):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.pause("retract", lease_s=PATIENCE_S)
        await kill_all(processes, fleet)
        while not fleet.present:
            await asyncio.sleep(0.01)
        status = await fleet.combined("")
        assert (status.generation, status.pause_mode, status.pause_owner) == ("paused", "retract", "trainer")
        assert status.pause_age_s is not None
        assert status.lease_left_s is not None
        await fleet.client.continue_generation()

    run(processes, body)


def test_a_lease_ends_for_a_replica_that_an_update_has_brought_into_the_pause(processes, other_model):
    """It was restarted, and the update paused it, without the lease that the others have."""

    async def body(fleet: ReplicaFleet) -> None:
        back = fleet.members[0]
        await fleet.client.pause("in_place", lease_s=LONGER_S)
        processes.replicas[0].supervisor.signal(signal.SIGKILL)
        while back.state != "fenced":
            await fleet.client.status()  # which renews the lease
        updated = await fleet.client.update_weights_from_disk(
            other_model, weight_version="second", flush_cache=False
        )
        assert updated.committed
        assert back.serves

    run(processes, body)


@pytest.mark.parametrize("explicit", [False, True])
def test_half_an_update_that_its_trainer_has_left_ends_with_the_lease(
    processes, tiny_model, other_model, explicit
):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.update_weights_from_disk(tiny_model, weight_version="whole")
        await fleet.client.pause("retract", lease_s=SHORT_S)
        handle = await fleet.submit([5, 6, 7], GREEDY)
        if explicit:
            await fleet.client.begin_weight_update()
        half = dict(list(weights_of(Path(other_model)).items())[::2])
        await fleet.client.update_weights_from_tensor(half, weight_version="never")
        output = await handle.result()
        assert {span.version for span in output.weight_versions} == {"whole"}
        assert len(output.output_ids) == 8
        assert not fleet.updates.is_open

    run(processes, body)
