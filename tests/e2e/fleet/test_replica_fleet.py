"""The replicas of one server, without its HTTP: what an engine's end at the worst moment leaves."""
# ruff: noqa: ASYNC110  (another process's state is asked for)

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.plain_trainer import PlainTrainer, update_message, weights_of

from caesura.client import EngineDied, GroupError, InternalError, SamplingParams
from caesura.client.fleet.members import EngineAddress
from caesura.client.process.supervisor import RestartPolicy
from caesura.client.replicas.copying import Copies
from caesura.client.replicas.fleet import ReplicaFleet
from caesura.client.replicas.processes import ReplicaProcesses
from caesura.io_struct import WeightUpdateReqOutput

PATIENCE_S = 90.0
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def processes(tiny_model) -> Iterator[ReplicaProcesses]:
    arguments = [
        "--model",
        str(tiny_model),
        "--num-threads",
        "1",
        "--kv-pool-tokens",
        "2048",
        "--dtype",
        "float32",
    ]
    started = ReplicaProcesses(
        arguments, 2, RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, window_s=0)
    )
    started.start()
    yield started
    started.close()


def run(processes: ReplicaProcesses, model: Path, body: Callable[[ReplicaFleet], Awaitable[None]]) -> None:
    """``body`` on a fleet that serves the weights of ``model``, and that serves with all replicas again afterwards."""

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            ReplicaFleet(processes, owner="test", look_interval_s=0.05) as fleet,
        ):
            await body(fleet)
            while not all(member.serves for member in fleet.members):
                await asyncio.sleep(0.01)
            await fleet.client.update_weights_from_disk(model, weight_version="first")
            statuses = [await member.client.status() for member in fleet.members]
            assert {(each.generation, each.weight_version, each.memory) for each in statuses} == {
                ("running", "first", "resident")
            }

    asyncio.run(main())


def kill(processes: ReplicaProcesses, index: int) -> None:
    processes.replicas[index].supervisor.signal(signal.SIGKILL)


def test_an_engine_that_ends_as_its_session_begins_does_not_leave_it_open(processes, tiny_model, other_model):
    """Nobody could generate any more, nor update, until somebody ended the session by force."""

    async def body(fleet: ReplicaFleet) -> None:
        begin = fleet.members[0].client.begin_weight_update

        async def last_words(**options: Any) -> Any:
            answer = await begin(**options)
            kill(processes, 0)
            return answer

        fleet.members[0].client.begin_weight_update = last_words  # type: ignore[method-assign]
        updated = await fleet.client.update_weights_from_disk(other_model, weight_version="second")
        del fleet.members[0].client.begin_weight_update
        assert (updated.committed, updated.weight_version) == (True, "second")
        assert not fleet.updates.is_open
        (output,) = await fleet.client.generate([[5, 6, 7]], GREEDY)
        assert [span.version for span in output.weight_versions] == ["second"]

    run(processes, tiny_model, body)


def test_memory_that_was_resumed_while_an_engine_was_away_is_resumed_when_it_is_back(processes, tiny_model):
    async def body(fleet: ReplicaFleet) -> None:
        away = fleet.members[1]
        await fleet.client.pause("abort")
        await fleet.client.release_memory()
        fleet.dispatcher.lost(away, EngineDied("it hangs"))
        await fleet.client.resume_memory()
        await fleet.client.update_weights_from_disk(tiny_model, weight_version="second")
        await fleet.client.continue_generation()
        while not away.serves:
            await asyncio.sleep(0.01)
        status = await away.client.status()
        assert (status.memory, status.weights, status.weight_version) == ("resident", "valid", "second")

    run(processes, tiny_model, body)


def test_a_broadcast_that_a_killed_engine_does_not_take_ends_the_wait_of_the_others(
    processes, tiny_model, other_model
):
    """The trainer's own end of the group stays open: the other engine would wait for the broadcast's whole timeout."""
    trainer = PlainTrainer(name="group", world_size=3)

    async def body(fleet: ReplicaFleet) -> None:
        trainer.beside(trainer.join)
        await fleet.client.init_weights_update_group(
            master_address="127.0.0.1", master_port=trainer.port, rank_offset=1, world_size=3, group_name="group",
            backend="gloo", broadcast_timeout_s=10 * PATIENCE_S,
        )  # fmt: skip
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

    try:
        run(processes, tiny_model, body)
    finally:
        trainer.close()


def test_a_copy_ends_with_its_server(tmp_path):
    """Its thread would hold up the end of the server for as long as it takes, ten minutes at most."""
    copies = Copies()
    places = [EngineAddress(f"ipc://{tmp_path}/{name}", name=name) for name in ("donor", "target")]
    listeners: list[socket.socket] = []
    for place in places:  # accept, and say nothing
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(place.endpoint.removeprefix("ipc://"))
        listeners[-1].listen()
        listeners[-1].settimeout(PATIENCE_S)
    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(copies.copy, *places, "test")
        listeners.append(listeners[0].accept()[0])
        copies.end()
        with pytest.raises(InternalError, match=r"could not be copied: was killed by signal 9"):
            copying.result(PATIENCE_S)
    with pytest.raises(InternalError, match="the server ends"):
        copies.copy(*places, "test")
    for each in listeners:
        each.close()
