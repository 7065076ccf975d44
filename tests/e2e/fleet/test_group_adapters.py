"""Adapters of several engines: all get a version or none does, and one that comes back gets it again."""
# ruff: noqa: ASYNC110  (another process's state is asked for)

import asyncio
import json
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.lora import ALL_LINEAR, edit_adapter, logprobs_by_peft, make_adapter
from support.plain_trainer import PlainTrainer
from support.waiting import PATIENCE_S
from torch import Tensor

from caesura.client import EngineError, GroupError, SamplingParams, UnknownAdapter
from caesura.client.group import EngineAddress, Fleet, FleetUpdateFailed
from caesura.client.group.members import Member
from caesura.client.group.processes import ReplicaProcesses
from caesura.client.group.replicas import ReplicaFleet
from caesura.client.launch.restart_policy import RestartPolicy
from caesura.client.trainer import manifest
from caesura.io_struct import (
    InitWeightsUpdateGroupReqOutput,
    LoadAdapterReqInput,
    LoadAdapterReqOutput,
    new_id,
)

PROMPT = [5 + 7 * i % 90 for i in range(24)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "base"
    make_checkpoint(path, "qwen3", num_hidden_layers=2, max_position_embeddings=1024)
    return path


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Path]:
    return [make_adapter(base, base.parent / str(seed), ALL_LINEAR, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def processes(base: Path) -> Iterator[ReplicaProcesses]:
    options = (
        "--num-threads 1 --kv-pool-tokens 4096 --dtype float32 --enable-lora --max-loras 2 --max-lora-rank 8"
    )
    policy = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.01, restart_window_s=0)
    started = ReplicaProcesses(["--model", str(base), *options.split()], 2, policy)
    started.start()
    yield started
    started.close()


def run(
    processes: ReplicaProcesses,
    body: Callable[[ReplicaFleet], Awaitable[None]],
    *,
    look_interval_s: float = 0.05,
) -> None:
    """Run ``body`` on a fleet; afterwards all replicas serve, and have the same adapters."""

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            ReplicaFleet(processes, owner="test", look_interval_s=look_interval_s) as fleet,
        ):
            await body(fleet)
            await all_serve(fleet)
            for name in list(fleet.dispatcher.adapters):
                await fleet.client.unload_adapter(name)
            assert [await versions(member) for member in fleet.members] == [{}, {}]

    asyncio.run(main())


async def all_serve(fleet: Fleet) -> None:
    while {each.state for each in fleet.members} != {"serving"}:
        await asyncio.sleep(0.01)


async def versions(member: Member) -> dict[str, int]:
    status = await member.client.status(owner="")
    return {each.name: each.adapter_epoch for each in status.adapters if not each.replaced}


async def logprobs(member: Member, name: str) -> list[float]:
    output = await member.client.generate(PROMPT, GREEDY, adapter=name, return_logprob=True)
    return output.output_logprobs


def sent(adapter: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of an adapter."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    return load_file(adapter / "adapter_model.safetensors"), config


async def restarted(processes: ReplicaProcesses, fleet: Fleet, index: int) -> None:
    processes.replicas[index].signal(signal.SIGKILL)
    while fleet.members[index].serves:
        await asyncio.sleep(0.01)
    await all_serve(fleet)


def test_every_replica_has_each_version_and_its_number(processes, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        for number, path in enumerate(adapters):
            loaded = await fleet.client.load_adapter("a", path)
            assert loaded.changed_tensors == loaded.tensors == 28
            assert [await versions(member) for member in fleet.members] == [{"a": number + 1}] * 2
            first, second = [await logprobs(member, "a") for member in fleet.members]
            assert first == second
        status = await fleet.client.status()
        assert [(each.name, each.adapter_epoch, each.path) for each in status.adapters] == [
            ("a", 2, str(adapters[1]))
        ]
        assert (status.weights_epoch, status.generation, status.session) == (0, "running", None)
        with pytest.raises(UnknownAdapter, match="no adapter 'b' is loaded: a"):
            await fleet.client.generate(PROMPT, GREEDY, adapter="b")
        with pytest.raises(EngineError, match="is loaded: replace it"):
            await fleet.client.load_adapter("a", adapters[0], replace=False)

    run(processes, body)


def test_one_refusal_leaves_the_version_of_before(processes, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.load_adapter("a", adapters[0], pinned=True)
        known = [await logprobs(member, "a") for member in fleet.members]
        own = fleet.members[1].client
        await own.load_adapter("foreign", adapters[1], pinned=True)
        with pytest.raises(FleetUpdateFailed, match="replica-1: of 2 adapter slots 2 are pinned") as failed:
            await fleet.client.load_adapter("b", adapters[1])
        assert failed.value.code == "no_adapter_slot"
        bad = adapters[1].parent / "bad"
        shutil.copytree(adapters[1], bad)
        edit_adapter(bad, use_dora=True)
        with pytest.raises(EngineError, match="use_dora") as refused:
            await fleet.client.load_adapter("a", bad)
        assert not isinstance(refused.value, FleetUpdateFailed), "all refuse it in the same words"
        assert [(await versions(member))["a"] for member in fleet.members] == [1, 1]
        assert [await logprobs(member, "a") for member in fleet.members] == known
        assert [(await member.client.status()).session for member in fleet.members] == [None, None]
        await own.unload_adapter("foreign")
        loaded = await fleet.client.load_adapter("a", adapters[1])
        assert [(await versions(member))["a"] for member in fleet.members] == [loaded.adapter_epoch] * 2

    run(processes, body)


@pytest.mark.parametrize("at", ["load_adapter", "end_weight_update"])
def test_a_replica_that_dies_in_a_load_gets_it_when_back(processes, adapters, at):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.load_adapter("a", adapters[0])
        client = fleet.members[0].client
        start, end = client.start, client.end_weight_update

        def last_words(request: Any, *rest: Any) -> Any:
            if at == "load_adapter" and isinstance(request, LoadAdapterReqInput):
                processes.replicas[0].signal(signal.SIGKILL)
            return start(request, *rest)

        async def last_commit(**options: Any) -> Any:
            if at == "end_weight_update":
                processes.replicas[0].signal(signal.SIGKILL)
            return await end(**options)

        client.start, client.end_weight_update = last_words, last_commit  # type: ignore[method-assign]
        loaded = await fleet.client.load_adapter("a", adapters[1])
        del client.start, client.end_weight_update
        await all_serve(fleet)
        assert [await versions(member) for member in fleet.members] == [{"a": loaded.adapter_epoch}] * 2
        first, second = [await logprobs(member, "a") for member in fleet.members]
        assert first == second

    run(processes, body)


def test_requests_of_a_dead_engine_go_on_with_the_adapter(processes, base, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        loaded = await fleet.client.load_adapter("a", adapters[0])
        handle = await fleet.client.submit(PROMPT, LONG, adapter="a", return_logprob=True, stream=True)
        await anext(aiter(handle))
        (member,) = [each for each in fleet.members if each.load]
        processes.replicas[fleet.members.index(member)].signal(signal.SIGKILL)
        output = await handle.result()
        assert len({span.incarnation for span in output.weight_versions}) == 2
        assert {(span.adapter, span.adapter_epoch) for span in output.weight_versions} == {
            ("a", loaded.adapter_epoch)
        }
        expected = logprobs_by_peft(base, adapters[0], [*PROMPT, *output.output_ids], len(PROMPT))
        np.testing.assert_allclose(output.output_logprobs, expected, atol=1e-4, rtol=0)

    run(processes, body)


def test_a_broadcast_reaches_all_replicas_or_none(processes, base, adapters):
    tensors, config = sent(adapters[0])
    request = LoadAdapterReqInput(
        name="b", config=config, specs=manifest(tensors.items()), group_name="group"
    )
    trainer = PlainTrainer(name="group", world_size=3)

    async def body(fleet: ReplicaFleet) -> None:
        known = await fleet.client.load_adapter("a", adapters[0])
        trainer.beside(trainer.join)
        await fleet.client.start(trainer.init_message(), InitWeightsUpdateGroupReqOutput)
        await asyncio.to_thread(trainer.finish)
        trainer.beside(lambda: trainer.broadcast_each(tensors))
        loaded = await fleet.client.start(request, LoadAdapterReqOutput)
        await asyncio.to_thread(trainer.finish)
        assert loaded.digest == known.digest
        assert [await versions(member) for member in fleet.members] == [{"a": 1, "b": 2}] * 2
        load = fleet.client.start(msgspec.structs.replace(request, id=new_id()), LoadAdapterReqOutput)
        while (await fleet.members[1].client.status()).session is None:
            await asyncio.sleep(0.01)
        processes.replicas[0].signal(signal.SIGKILL)
        with pytest.raises(GroupError, match="replica-0 left the group"):
            await load
        assert await versions(fleet.members[1]) == {"a": 1, "b": 2}
        await all_serve(fleet)
        assert [await versions(member) for member in fleet.members] == [{"a": 1}, {"a": 1, "b": 2}]

    run(processes, body)
    trainer.close()


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_are_kept_for_a_replica_that_restarts(processes, adapters, shared):
    async def body(fleet: ReplicaFleet) -> None:
        tensors, config = sent(adapters[0])
        await fleet.client.load_adapter("a", tensors=tensors, config=config, shared=shared)
        for tensor in tensors.values():
            tensor.zero_()
        known = await logprobs(fleet.members[1], "a")
        await restarted(processes, fleet, 0)
        assert await logprobs(fleet.members[0], "a") == known

    run(processes, body)


@pytest.mark.parametrize("refused", [False, True])
def test_a_folder_that_has_changed_is_not_taken_for_it(processes, adapters, tmp_path, caplog, refused):
    async def body(fleet: ReplicaFleet) -> None:
        folder = tmp_path / "changes"
        shutil.copytree(adapters[0], folder)
        await fleet.client.load_adapter("a", folder)
        known = await logprobs(fleet.members[1], "a")
        shutil.copytree(adapters[1], folder, dirs_exist_ok=True)
        edit_adapter(folder, use_dora=refused)
        await restarted(processes, fleet, 0)
        assert [await versions(member) for member in fleet.members] == [{}, {"a": 1}]
        assert "replica-0 serves without adapter 'a'" in caplog.text
        assert ("use_dora" if refused else "has other tensors now") in caplog.text
        for number in range(4):
            output = await fleet.client.generate([*PROMPT, number], GREEDY, adapter="a")
            assert output.weight_versions[0].adapter_epoch == 1
        assert fleet.dispatcher.moved == 0, "nobody asks an engine that does not have it"
        assert await logprobs(fleet.members[1], "a") == known
        shutil.rmtree(folder)
        await restarted(processes, fleet, 1)
        assert "adapter 'a' is lost" in caplog.text
        with pytest.raises(UnknownAdapter, match="no adapter 'a' is loaded"):
            await fleet.client.generate(PROMPT, GREEDY, adapter="a")

    run(processes, body)


def test_all_replicas_evict_the_same_adapter(processes, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        for name in ("old", "used"):
            await fleet.client.load_adapter(name, adapters[0])
        for member in fleet.members:  # which says nothing of the group's use
            await logprobs(member, "old")
        await fleet.client.generate(PROMPT, GREEDY, adapter="used")
        assert (await fleet.client.load_adapter("new", adapters[1])).evicted == ["old"]
        assert [(await versions(member)).keys() for member in fleet.members] == [{"used", "new"}] * 2
        with pytest.raises(UnknownAdapter, match="no adapter 'old' is loaded: new, used"):
            await fleet.client.generate(PROMPT, GREEDY, adapter="old")

    run(processes, body)


def test_an_update_that_admits_a_replica_gives_it_adapters(processes, base, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        # Tensors, which a restarted engine does not load by itself.
        tensors, config = sent(adapters[0])
        await fleet.client.load_adapter("a", tensors=tensors, config=config)
        known = await logprobs(fleet.members[0], "a")
        await fleet.client.pause("retract")  # during which nothing else admits it
        processes.replicas[0].signal(signal.SIGKILL)
        while fleet.members[0].state != "fenced":
            await asyncio.sleep(0.01)
        await fleet.client.update_weights_from_disk(base)
        assert fleet.members[0].serves
        await fleet.client.continue_generation()
        assert await logprobs(fleet.members[0], "a") == known

    run(processes, body)


def test_adapters_changed_at_a_replicas_socket_come_back(processes, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.load_adapter("a", adapters[0])
        for change in ("unload", "replace"):
            own = fleet.members[0].client
            await (own.unload_adapter("a") if change == "unload" else own.load_adapter("a", adapters[1]))
            while await versions(fleet.members[0]) != {"a": 1}:
                await asyncio.sleep(0.01)

    run(processes, body)


def test_another_fleet_adopts_adapters(processes, adapters):
    async def body(fleet: ReplicaFleet) -> None:
        await fleet.client.load_adapter("a", adapters[0])
        await fleet.members[1].client.unload_adapter("a")
        endpoints = [EngineAddress(member.address.endpoint) for member in fleet.members]
        async with Fleet(endpoints, look_interval_s=0) as other:
            assert [await versions(member) for member in other.members] == [{"a": 1}] * 2
            output = await other.generate(PROMPT, GREEDY, adapter="a")
            assert output.weight_versions[0].adapter_epoch == 1
            assert (await other.client.load_adapter("a", adapters[1])).adapter_epoch == 2
            await other.client.load_adapter("a", adapters[0])
            with pytest.raises(UnknownAdapter):
                await other.client.unload_adapter("b")

    run(processes, body, look_interval_s=0)  # this fleet would give its members what the other replaces
