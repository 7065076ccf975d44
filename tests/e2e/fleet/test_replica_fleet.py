"""The replicas of one server, without its HTTP."""
# ruff: noqa: ASYNC110  (another process's state is asked for)

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.intercepted import intercept, intercept_no_more
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.waiting import PATIENCE_S

from caesura.client import (
    AsyncControlClient,
    EngineDied,
    EngineRestarting,
    GroupError,
    InternalError,
    SamplingParams,
)
from caesura.client.group import Fleet
from caesura.client.group.members import EngineAddress
from caesura.client.group.processes import ReplicaProcesses
from caesura.client.group.recovery import copy_beside
from caesura.client.group.replicas import ReplicaFleet
from caesura.client.launch.restart_policy import RestartPolicy
from caesura.io_struct import BeginWeightUpdateReqInput, WeightUpdateReqOutput
from caesura.io_struct.control import LeaseAction

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
ALL_TOKENS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def processes(tiny_model) -> Iterator[ReplicaProcesses]:
    options = ["--num-threads", "1", "--kv-pool-tokens", "2048", "--dtype", "float32"]
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, restart_window_s=0)
    started = ReplicaProcesses(["--model", str(tiny_model), *options], 2, policy)
    started.start()
    yield started
    started.close()


@pytest.fixture
def trainer_of() -> Iterator[Callable[[str], PlainTrainer]]:
    """Yield a function that makes a trainer of a group of three, by the name of the group."""
    made: list[PlainTrainer] = []

    def make(name: str) -> PlainTrainer:
        made.append(PlainTrainer(name=name, world_size=3))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def run(
    processes: ReplicaProcesses, body: Callable[[ReplicaFleet], Awaitable[None]], *, model: Path | None = None
) -> None:
    """Run ``body`` on a fleet. Afterwards all replicas must serve and run, without any more commands."""

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            ReplicaFleet(processes, owner="test", look_interval_s=0.05) as fleet,
        ):
            fleet.copy = partial(Fleet.copy, fleet)  # type: ignore[method-assign]  # no process for each
            await body(fleet)
            while {each.state for each in fleet.members} != {"serving"} or await states(fleet) != {"running"}:
                await asyncio.sleep(0.01)
            await until(lambda: (fleet.paused_mode, fleet.lease) == (None, None))
            if model is None:
                return
            await fleet.client.update_weights_from_disk(model, weight_version="first")
            statuses = [await member.client.status() for member in fleet.members]
            assert {(each.generation, each.weight_version, each.memory) for each in statuses} == {
                ("running", "first", "resident")
            }

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def states(fleet: ReplicaFleet) -> set[str]:
    return {(await member.client.status(owner="")).generation for member in fleet.members}


def kill(processes: ReplicaProcesses, index: int) -> None:
    processes.replicas[index].signal(signal.SIGKILL)


async def kill_all(processes: ReplicaProcesses, fleet: ReplicaFleet) -> None:
    for index in range(len(processes.replicas)):
        kill(processes, index)
    await until(lambda: {member.state for member in fleet.members} == {"gone"})


def test_an_engine_that_ends_leaves_no_session_open(processes, tiny_model, other_model):
    async def body(fleet: ReplicaFleet) -> None:
        async def last_words(send: Callable[[], Awaitable[Any]]) -> Any:
            answer = await send()
            kill(processes, 0)
            return answer

        intercept(fleet.members[0].client, BeginWeightUpdateReqInput, last_words)
        updated = await fleet.client.update_weights_from_disk(other_model, weight_version="second")
        intercept_no_more(fleet.members[0].client)
        assert (updated.committed, updated.weight_version) == (True, "second")
        assert fleet.updates.session is None
        (output,) = await fleet.client.generate([[5, 6, 7]], GREEDY)
        assert [span.version for span in output.weight_versions] == ["second"]

    run(processes, body, model=tiny_model)


def test_memory_is_resumed_when_an_engine_is_back(processes, tiny_model):
    async def body(fleet: ReplicaFleet) -> None:
        away = fleet.members[1]
        await fleet.client.pause("abort")
        await fleet.client.release_memory()
        fleet.dispatcher.lost(away, EngineDied("it hangs"))
        await fleet.client.resume_memory()
        await fleet.client.update_weights_from_disk(tiny_model, weight_version="second")
        await fleet.client.continue_generation()
        await until(lambda: away.serves)
        status = await away.client.status()
        assert (status.memory, status.weights, status.weight_version) == ("resident", "valid", "second")

    run(processes, body, model=tiny_model)


def test_a_killed_engine_ends_a_broadcast_for_all(processes, trainer_of, tiny_model, other_model):
    trainer = trainer_of("group")

    async def body(fleet: ReplicaFleet) -> None:
        trainer.beside(trainer.join)
        await join(fleet, trainer, broadcast_timeout_s=PATIENCE_S)
        await asyncio.to_thread(trainer.finish)
        request = update_message(weights_of(Path(other_model)), group_name="group", weight_version="never")
        update = fleet.client.start(request, WeightUpdateReqOutput)
        while (session := (await fleet.members[1].client.status()).session) is None:
            await asyncio.sleep(0.01)
        assert session.written_tensors == 0
        kill(processes, 0)
        with pytest.raises(GroupError, match="replica-0 left the group"):
            await update
        (output,) = await fleet.client.generate([[5, 6, 7]], GREEDY)
        assert "never" not in {span.version for span in output.weight_versions}

    run(processes, body, model=tiny_model)


def test_an_update_follows_the_loss_of_all_weights(processes, tiny_model, other_model):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.update_weights_from_tensor(weights_of(Path(other_model)), weight_version="second")
        await fleet.client.pause("retract")
        await kill_all(processes, fleet)
        with pytest.raises(EngineRestarting, match="no replica is there now"):
            await fleet.client.end_weight_update(commit=False, force=True)
        await until(lambda: {member.state for member in fleet.members} == {"fenced"})
        updated = await fleet.client.update_weights_from_tensor(
            weights_of(Path(other_model)), weight_version="third"
        )
        assert (updated.committed, len(fleet.dispatcher.serving)) == (True, 2)
        await fleet.client.continue_generation()
        (output,) = await fleet.client.generate([[5, 6, 7]], GREEDY)
        assert [span.version for span in output.weight_versions] == ["third"]

    run(processes, body, model=tiny_model)


def test_an_engine_that_does_not_serve_has_no_veto(processes, tiny_model, other_model):
    async def body(fleet: ReplicaFleet) -> None:
        away = fleet.members[0]

        async def refused(_: Callable[[], Awaitable[Any]]) -> Any:
            raise InternalError("it cannot")

        fleet.heals = False
        fleet.dispatcher.fence(away, "it has lost its weights")
        intercept(away.client, BeginWeightUpdateReqInput, refused)
        updated = await fleet.client.update_weights_from_disk(other_model, weight_version="second")
        assert (updated.committed, [member.name for member in fleet.dispatcher.serving]) == (
            True,
            ["replica-1"],
        )
        assert "it cannot" in away.reason
        intercept_no_more(away.client)
        fleet.heals = True

    run(processes, body, model=tiny_model)


def join(fleet: ReplicaFleet, trainer: PlainTrainer, **fields: Any) -> Awaitable[Any]:
    return fleet.client.init_weights_update_group(
        master_address="127.0.0.1", master_port=trainer.port, rank_offset=1, world_size=3,
        group_name=trainer.name,
        backend="gloo", **fields,
    )  # fmt: skip


def test_a_group_whose_member_ended_is_no_group(processes, trainer_of, tiny_model):
    trainer = trainer_of("met")

    async def body(fleet: ReplicaFleet) -> None:
        first = fleet.members[0].client
        start = first.start

        def last_words(*message: Any) -> Any:
            answer, lost = start(*message), asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda _: lost.set_exception(EngineDied("it is gone")))
            return lost

        first.start = last_words  # type: ignore[method-assign]
        trainer.beside(trainer.join)
        with pytest.raises(GroupError, match="replica-0 ended before all had joined"):
            await join(fleet, trainer)
        del first.start
        with pytest.raises(GroupError):  # the other one was told to leave
            await fleet.members[1].client.destroy_weights_update_group(trainer.name)

    run(processes, body, model=tiny_model)


def test_a_replica_that_ends_ends_the_join_of_all(processes, trainer_of, tiny_model):
    trainer = trainer_of("never")  # it does not come

    async def body(fleet: ReplicaFleet) -> None:
        joining = asyncio.ensure_future(join(fleet, trainer, timeout_s=PATIENCE_S))
        await fleet.members[0].client.status()  # behind its call to join
        kill(processes, 0)
        with pytest.raises(GroupError, match="replica-0 ended before all had joined"):
            await joining

    run(processes, body, model=tiny_model)


@pytest.mark.parametrize("told", [True, False], ids=["by an update", "by nobody"])
def test_a_session_over_a_new_group_begins_again(processes, trainer_of, tiny_model, other_model, told):
    weights = list(weights_of(Path(other_model)).items())
    half, rest = dict(weights[::2]), dict(weights[1::2])
    first, second = trainer_of("made"), trainer_of("made")

    async def joined(fleet: ReplicaFleet, trainer: PlainTrainer) -> None:
        trainer.beside(trainer.join)
        await join(fleet, trainer)
        await asyncio.to_thread(trainer.finish)

    async def sent(fleet: ReplicaFleet, part: dict[str, Any], label: str, trainer: PlainTrainer) -> Any:
        trainer.beside(lambda: trainer.broadcast_each(part))
        request = update_message(part, group_name="made", weight_version=label, owner="test")
        answer = await fleet.client.start(request, WeightUpdateReqOutput)
        await asyncio.to_thread(trainer.finish)
        return answer

    async def body(fleet: ReplicaFleet) -> None:
        last = second
        await joined(fleet, first)
        await fleet.client.pause("retract")
        assert not (await sent(fleet, half, "never", first)).committed
        kill(processes, 0)
        await until(lambda: fleet.members[0].state == "fenced")
        request = update_message(rest, group_name="made", weight_version="never", owner="test")
        if told:
            with pytest.raises(GroupError, match="replica-0 left the group"):
                await fleet.client.start(request, WeightUpdateReqOutput)
            assert fleet.updates.session is None
        await fleet.client.destroy_weights_update_group("made")  # as the error said
        first.close()
        await joined(fleet, second)
        if not told:
            with pytest.raises(GroupError, match="replica-0 has no part in the open session"):
                await fleet.client.start(request, WeightUpdateReqOutput)
            await fleet.client.destroy_weights_update_group("made")
            second.close()
            last = trainer_of("made")
            await joined(fleet, last)
        assert (await sent(fleet, dict(weights), "second", last)).committed
        await fleet.client.continue_generation()
        (output,) = await fleet.client.generate([[5, 6, 7]], GREEDY)
        assert [span.version for span in output.weight_versions] == ["second"]
        await fleet.client.destroy_weights_update_group("made")
        with pytest.raises(GroupError, match="no weight update group"):
            await fleet.client.destroy_weights_update_group("made")

    run(processes, body, model=tiny_model)


@pytest.mark.parametrize("restores", [True, False], ids=["from its folder", "not"])
def test_only_a_replica_without_the_weights_is_copied_to(processes, tiny_model, other_model, restores):
    async def body(fleet: ReplicaFleet) -> None:
        copied: list[str] = []
        copy = fleet.copy

        async def counted(donor: EngineAddress, target: EngineAddress) -> None:
            copied.append(target.name)
            await copy(donor, target)

        fleet.copy = counted  # type: ignore[method-assign]
        if restores:
            await fleet.client.update_weights_from_disk(other_model, weight_version="second")
        else:
            await fleet.client.update_weights_from_tensor(
                weights_of(Path(other_model)), weight_version="second"
            )
        restarted = fleet.members[0]
        kill(processes, 0)
        await until(lambda: restarted.state == "gone")
        await until(lambda: restarted.serves)
        assert copied == ([] if restores else ["replica-0"])
        status = await restarted.client.status()
        assert (status.weight_version, status.totals.updates == []) == ("second", restores)
        await fleet.client.check_weights("checksum")  # which compares them

    run(processes, body, model=tiny_model)


def test_commands_do_not_wait_for_a_copy_and_updates_do(processes, tiny_model, other_model):
    async def body(fleet: ReplicaFleet) -> None:
        begun, go, away, copy = asyncio.Event(), asyncio.Event(), fleet.members[0], fleet.copy

        async def slow(*places: EngineAddress) -> None:
            begun.set()
            await go.wait()
            await copy(*places)

        fleet.copy = slow  # type: ignore[method-assign]

        async def until_copying() -> None:
            go.clear()
            async with AsyncControlClient(away.address.endpoint) as stranger:
                await stranger.update_weights_from_disk(tiny_model, weight_version="foreign")
            await begun.wait()
            begun.clear()

        await fleet.client.update_weights_from_disk(other_model, weight_version="second")
        await until_copying()
        await fleet.client.flush_cache()
        await fleet.client.pause("in_place")
        go.set()
        while (await away.client.status()).session is not None or fleet.weights_lock.locked():
            await asyncio.sleep(0.01)
        assert not away.serves
        await fleet.client.continue_generation()
        await until(lambda: away.serves)
        assert not begun.is_set()

        await until_copying()
        update = asyncio.ensure_future(
            fleet.client.update_weights_from_disk(other_model, weight_version="third")
        )
        await fleet.client.pause("in_place")
        assert not update.done()
        go.set()
        await update
        assert [(await each.client.status()).weight_version for each in fleet.members] == ["third"] * 2
        await fleet.client.continue_generation()

    run(processes, body, model=tiny_model)


def test_a_slow_answer_sets_no_counter_back(processes, tiny_model):
    async def body(fleet: ReplicaFleet) -> None:
        first, second = fleet.members
        asked, go = asyncio.Event(), asyncio.Event()
        statuses = first.client.status, second.client.status

        async def told(**options: Any) -> Any:
            answer = await statuses[0](**options)
            asked.set()
            return answer

        async def late(**options: Any) -> Any:
            second.client.status = statuses[1]  # type: ignore[method-assign]
            await go.wait()
            return await statuses[1](**options)

        async def never(**_: Any) -> Any:
            await asyncio.Event().wait()

        fleet.status_s = PATIENCE_S
        first.client.status, second.client.status = told, late  # type: ignore[method-assign]
        slow = asyncio.ensure_future(fleet.combined("test"))
        await asked.wait()
        await fleet.client.generate([[5, 6, 7]] * 4, GREEDY)
        newer = await fleet.combined("test")
        go.set()
        assert (await slow).generated_tokens >= newer.generated_tokens

        await fleet.client.pause("in_place")
        fleet.status_s = 0.01
        first.client.status = never  # type: ignore[method-assign]
        assert (await fleet.combined("test")).generation == "paused"
        first.client.status, second.client.status = statuses  # type: ignore[method-assign]
        await fleet.client.continue_generation()

    run(processes, body, model=tiny_model)


@pytest.mark.parametrize("action", ["continue", "abort", "stay"])
def test_a_lease_ends_though_all_engines_have_died(processes, action: LeaseAction):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.pause("in_place", lease_s=0.5, on_lease_expiry=action)
        handle = await fleet.submit([5, 6, 7], ALL_TOKENS)
        await kill_all(processes, fleet)
        await until(lambda: fleet.lease is None)
        if action == "continue":
            assert len((await handle.result()).output_ids) == 8
            return
        await until(lambda: fleet.present)
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
        await until(lambda: fleet.present)
        status = await fleet.combined("")
        assert (status.generation, status.pause_mode, status.pause_owner) == ("paused", "retract", "test")
        assert status.pause_age_s is not None
        assert status.lease_left_s is not None
        await fleet.client.continue_generation()

    run(processes, body)


def test_a_lease_ends_for_a_replica_that_came_back(processes, other_model):
    async def body(fleet: ReplicaFleet) -> None:
        back = fleet.members[0]
        await fleet.client.pause("in_place", lease_s=3.0)
        kill(processes, 0)
        while back.state != "fenced":
            await fleet.client.status()  # which renews the lease
        updated = await fleet.client.update_weights_from_disk(
            other_model, weight_version="second", flush_cache=False
        )
        assert updated.committed
        assert back.serves

    run(processes, body)


@pytest.mark.parametrize("explicit", [False, True])
def test_half_an_update_ends_with_the_lease(processes, tiny_model, other_model, explicit):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.update_weights_from_disk(tiny_model, weight_version="whole")
        await fleet.client.pause("retract", lease_s=0.5)
        handle = await fleet.submit([5, 6, 7], ALL_TOKENS)
        if explicit:
            await fleet.client.begin_weight_update()
        half = dict(list(weights_of(Path(other_model)).items())[::2])
        await fleet.client.update_weights_from_tensor(half, weight_version="never")
        output = await handle.result()
        assert {span.version for span in output.weight_versions} == {"whole"}
        assert len(output.output_ids) == 8
        assert fleet.updates.session is None

    run(processes, body)


def test_a_copy_ends_with_its_server(tmp_path):
    places = [EngineAddress(f"ipc://{tmp_path}/{name}", name=name) for name in ("donor", "target")]
    listeners: list[socket.socket] = []
    for place in places:  # accept, and say nothing
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(place.endpoint.removeprefix("ipc://"))
        listeners[-1].listen()
        listeners[-1].settimeout(PATIENCE_S)

    async def body() -> None:
        copying = asyncio.ensure_future(copy_beside(*places, "test"))
        connection, _ = await asyncio.to_thread(listeners[0].accept)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(copying, PATIENCE_S)
        with connection:  # which the process has held
            connection.settimeout(0.0)
            while connection.recv(1024):
                pass

    asyncio.run(body())
    for each in listeners:
        each.close()
