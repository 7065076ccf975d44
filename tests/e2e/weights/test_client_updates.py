"""A trainer's half of updates: refused, timed out, cancelled, over a process group; on engines that run."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import client_updates
from support.lanes import every, quick
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import (
    AsyncControlClient,
    ControlClient,
    EngineDied,
    EngineError,
    GroupError,
    InvalidRequest,
    LaunchedScheduler,
    NoSession,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    TimedOut,
    Unsupported,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import SharedTensors, WeightUpdateGroup, manifest
from caesura.io_struct import InitWeightsUpdateGroupReqOutput, WeightUpdateReqOutput

pytestmark = pytest.mark.slow  # its engines take seconds to start

SMALL = 4096
"""Bytes of a bucket: every checkpoint here is many."""
NORM = "model.norm.weight"


def launched(model: Path, **options: object) -> LaunchedScheduler:
    return launch_scheduler(str(model), dtype="float32", num_threads=1, kv_pool_tokens=1024, **options)


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[SchedulerClient]:
    with launched(tiny_model) as client:
        yield client


@pytest.fixture
def trainer(engine, tiny_model) -> Iterator[ControlClient]:
    with ControlClient(engine.endpoint) as client:
        with contextlib.suppress(NoSession):  # what a test that failed has left
            client.end_weight_update(commit=False, force=True, timeout=PATIENCE)
        client.update_weights_from_disk(tiny_model, timeout=PATIENCE)
        yield client
    assert engine.status(timeout=PATIENCE).session is None


@pytest.fixture(scope="module")
def group(engine) -> Iterator[WeightUpdateGroup]:
    with WeightUpdateGroup.create([engine], group_name="ours", timeout_s=PATIENCE) as group:
        yield group


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def checksum_of(engine: SchedulerClient, weights: dict[str, torch.Tensor]) -> str:
    engine.update_weights_from_tensor(weights.items(), timeout=PATIENCE)
    return engine.check_weights(timeout=PATIENCE).total


def settled(sender: ControlClient) -> str:
    """Return the state of the weights after all that ``sender`` has sent: a connection keeps its order."""
    eventually(lambda: sender.status(timeout=PATIENCE).session is None)
    sender.check_weights(timeout=PATIENCE)  # a command: it runs behind all others
    return sender.status(timeout=PATIENCE).weights


def test_a_broadcast_ends_with_the_time_of_its_call(engine, trainer, tiny_model):
    with WeightUpdateGroup.create([trainer], group_name="late", timeout_s=PATIENCE) as late:
        with stopped(engine.status().pid), pytest.raises(TimedOut):
            trainer.update_weights_from_distributed(weights_of(tiny_model).items(), group=late, timeout=0.1)
        with pytest.raises(GroupError, match="is dead"):
            late.update([(NORM, weights_of(tiny_model)[NORM])])
    eventually(lambda: engine.status(timeout=PATIENCE).session is None)


def test_memory_of_a_timed_out_call_keeps_its_bytes(engine, trainer, tiny_model, other_model):
    first, second = weights_of(other_model), weights_of(tiny_model)
    expected = checksum_of(engine, {**first, NORM: second[NORM]})
    for mapped in (False, True):  # also where the engine has mapped the client's memory before
        if mapped:
            trainer.update_weights_from_ipc(second.items(), timeout=PATIENCE)
        epoch = engine.status().weights_epoch
        with stopped(engine.status().pid):
            with pytest.raises(TimedOut):
                trainer.update_weights_from_ipc(first.items(), timeout=0.1)
            with pytest.raises(TimedOut):
                trainer.update_weights_from_ipc([(NORM, second[NORM])], timeout=0.1)
        assert settled(trainer) == "valid"
        status = engine.status()
        assert status.weights_epoch == epoch + 2
        assert engine.check_weights().total == expected


@pytest.mark.parametrize("kind", ["tensor", "ipc", "block"])
def test_a_begin_after_its_caller_timed_out_opens_nothing(engine, trainer, other_model, kind):
    with stopped(engine.status().pid), pytest.raises(TimedOut):
        if kind == "block":
            with trainer.weight_update(timeout=0.1):
                raise AssertionError("the block runs")
        update = getattr(trainer, f"update_weights_from_{kind}")
        update(weights_of(other_model).items(), bucket_bytes=SMALL, timeout=0.1)
    assert settled(trainer) == "valid"
    assert trainer.session_id is None
    assert trainer.update_weights_from_disk(other_model, timeout=PATIENCE).committed


def test_a_commit_that_is_refused_ends_its_block(engine, trainer, other_model):
    weights = weights_of(other_model)
    with pytest.raises(WeightMismatch), trainer.weight_update(manifest=manifest(weights.items())):
        trainer.update_weights_from_tensor([(NORM, weights[NORM])])
    assert (engine.status().session, engine.status().weights) == (None, "poisoned")
    assert trainer.session_id is None
    assert trainer.update_weights_from_ipc(weights.items(), bucket_bytes=SMALL).committed


def test_a_refused_explicit_commit_may_be_made_good(engine, trainer, other_model):
    weights = weights_of(other_model)
    trainer.begin_weight_update(manifest=manifest(weights.items()))
    trainer.update_weights_from_tensor([(NORM, weights[NORM])])
    with pytest.raises(WeightMismatch):
        trainer.end_weight_update()
    assert trainer.session_id is not None
    trainer.update_weights_from_ipc(weights.items(), bucket_bytes=SMALL)
    assert trainer.end_weight_update().committed
    assert trainer.session_id is None


@pytest.mark.parametrize("transport", ["tensor", "ipc", "shared"])
def test_sessions_are_never_committed_after_a_timeout(engine, trainer, tiny_model, other_model, transport):
    new = {name: tensor.clone() for name, tensor in weights_of(other_model).items()}
    whole = {checksum_of(engine, weights_of(other_model)), checksum_of(engine, weights_of(tiny_model))}
    tensors = SharedTensors(new.items()) if transport == "shared" else new.items()
    values = [tensor for _, tensor in tensors]
    update = trainer.update_weights_from_tensor if transport == "tensor" else trainer.update_weights_from_ipc
    with stopped(engine.status().pid):
        with pytest.raises(TimedOut):
            update(tensors, timeout=0.1)
        for tensor in values:
            tensor.fill_(7.0)
    if settled(trainer) == "valid":
        assert engine.check_weights().total in whole
    else:  # it was written and aborted: nothing of it serves
        assert transport == "shared"


def test_shared_tensors_of_a_part_commit(engine, trainer, tiny_model, other_model):
    weights = weights_of(other_model)
    halves = [SharedTensors(list(weights.items())[first::2]) for first in (0, 1)]
    assert trainer.update_weights_from_ipc(halves[0], weight_version="half", timeout=PATIENCE).committed
    assert engine.status().weight_version == "half"
    with trainer.weight_update(manifest=manifest(weights.items()), weight_version="all") as session:
        for half in halves:
            assert not trainer.update_weights_from_ipc(half, timeout=PATIENCE).committed
    assert session.result.weight_version == "all"
    assert engine.check_weights().total == checksum_of(engine, weights)


def test_a_client_keeps_the_id_and_no_flag(engine, trainer, other_model):
    epoch = engine.status().weights_epoch
    opened = trainer.begin_weight_update(timeout=PATIENCE)
    assert trainer.session_id == opened.session_id
    engine.end_weight_update(commit=False, force=True)
    tensors = [(NORM, weights_of(other_model)[NORM])]
    with pytest.raises(NoSession):
        trainer.update_weights_from_tensor(tensors, timeout=PATIENCE)
    assert trainer.session_id is None
    assert engine.status().weights_epoch == epoch
    assert trainer.update_weights_from_tensor(tensors, timeout=PATIENCE).committed


def test_a_session_does_not_outlive_its_engine(tiny_model, other_model, tmp_path):
    endpoint = f"ipc://{tmp_path}/s.sock"
    weights = weights_of(other_model)
    with ControlClient(endpoint, connect_timeout=PATIENCE) as trainer:
        with launched(tiny_model, endpoint=endpoint):
            trainer.begin_weight_update(timeout=PATIENCE)
        with launched(tiny_model, endpoint=endpoint) as engine:
            with pytest.raises((NoSession, EngineDied)):  # as soon or as late as the client hears of it
                trainer.update_weights_from_tensor(weights.items(), bucket_bytes=SMALL, timeout=PATIENCE)
            assert (engine.status().weights_epoch, engine.status().weights) == (0, "valid")
            assert trainer.session_id is None
            reply = trainer.update_weights_from_tensor(weights.items(), bucket_bytes=SMALL, timeout=PATIENCE)
            assert (reply.committed, engine.status().weights_epoch) == (True, 1)


@pytest.mark.parametrize("kind", ["update", "block"])
def test_a_cancelled_task_leaves_no_session(engine, trainer, other_model, kind):
    async def update(client: AsyncControlClient) -> None:
        if kind == "update":
            await client.update_weights_from_ipc(weights_of(other_model).items(), bucket_bytes=SMALL)
            return
        async with client.weight_update():
            raise AssertionError("the block runs")

    async def main() -> None:
        async with AsyncControlClient(engine.endpoint) as client:
            await client.status(timeout=PATIENCE)
            with stopped(engine.status().pid):
                task = asyncio.create_task(update(client))
                await asyncio.sleep(0)  # it has sent its begin
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await client.check_weights(timeout=PATIENCE)

    asyncio.run(main())
    assert settled(engine) == "valid"
    assert trainer.update_weights_from_disk(other_model, timeout=PATIENCE).committed


def test_a_begin_that_one_does_not_get_opens_none(engine, trainer, tiny_model, other_model):
    gone = ControlClient("ipc:///nowhere", connect_timeout=0.01)
    gone.close()
    with WeightUpdateGroup.create([engine], group_name="half", timeout_s=PATIENCE) as half:
        half.clients.append(gone)
        with pytest.raises(EngineDied):
            half.update(weights_of(other_model).items(), bucket_bytes=SMALL, timeout=PATIENCE)
        half.clients.remove(gone)
        assert settled(engine) == "valid"
        assert half.update(weights_of(other_model).items(), bucket_bytes=SMALL, timeout=PATIENCE)[0].committed


@pytest.mark.parametrize("transport", ["tensor", "ipc", "distributed"])
def test_a_subset_commits_however_many_buckets_it_takes(
    engine, trainer, group, tiny_model, other_model, transport
):
    weights = weights_of(other_model)
    subset = {name: weights[name] for name in list(weights)[1:4]}
    expected = checksum_of(engine, {**weights_of(tiny_model), **subset})
    trainer.update_weights_from_disk(tiny_model)
    for bucket_bytes in (64, 1 << 20):
        options = {"group": group} if transport == "distributed" else {}
        reply = getattr(trainer, f"update_weights_from_{transport}")(
            subset.items(), bucket_bytes=bucket_bytes, weight_version="some", timeout=PATIENCE, **options
        )
        assert (reply.committed, reply.weights, reply.weight_version) == (True, "valid", "some")
        assert engine.check_weights().total == expected
        trainer.update_weights_from_disk(tiny_model)


# -- refusals ------------------------------------------------------------------------------------------------

EVERY_WAY = (*client_updates.TRANSPORTS, "tensor, asyncio", "ipc, asyncio")


def updated(engine: ControlClient, transport: str, tensors, folder, **options):
    if transport == "disk":
        save_file(tensors, folder / "model.safetensors")
    kind, _, how = transport.partition(", ")
    if how != "asyncio":
        return client_updates.update_by(engine, transport, tensors, folder, **options)

    async def update():
        async with AsyncControlClient(engine.endpoint) as client:
            method = getattr(client, f"update_weights_from_{kind}")
            return await method(tensors, timeout=PATIENCE, **options)

    return asyncio.run(update())


@pytest.fixture
def folder(tmp_path, tiny_model):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize("transport", EVERY_WAY)
def test_a_state_dict_updates_and_wrong_names_are_told(engine, tiny_model, folder, transport):
    weights = weights_of(tiny_model)
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    said = rf"all {len(weights)} names begin with 'module\.', which the checkpoint's names do not; "
    said += r"module\..* \[\d+.*is not in"
    with pytest.raises(WeightMismatch, match=said):
        updated(engine, transport, wrapped, folder)
    assert updated(engine, transport, weights, folder, weight_version=7).weight_version == "7"
    assert engine.status().weights == "valid"


MISTAKES = [
    (lambda c: c.update_weights_from_disk(None), "model_path = None must be a path"),
    (
        lambda c: c.update_weights_from_tensor({}, bucket_bytes="1GB"),
        "bucket_bytes = '1GB' must be an integer",
    ),
    (lambda c: c.update_weights_from_ipc({}, bucket_bytes=0), "bucket_bytes = 0 must be an integer of at"),
    (lambda c: c.update_weights_from_distributed({}, group="g"), "group = 'g' must be a WeightUpdateGroup"),
    (lambda c: c.begin_weight_update(deadline=5), r"did you mean deadline_s\?"),
    (lambda c: c.weight_update(deadline=5).__enter__(), r"did you mean deadline_s\?"),
    (lambda c: c.pause("in_place", lease_s=5), "lease_s needs an owner: any name"),
    (WeightUpdateGroup.create, "clients must be a list of clients, not a SchedulerClient"),
    (lambda c: WeightUpdateGroup.create([c], backend="mpi"), "backend = 'mpi' must be gloo or nccl"),
    (lambda c: c.pause("inplace"), r"mode = 'inplace' must be .* \(did you mean 'in_place'\?\)"),
    (lambda c: c.release_memory("kv"), r"tags\[0\] = 'kv' must be .* \(did you mean 'kv_cache'\?\)"),
]


def test_a_mistake_of_a_trainer_is_told_in_a_sentence(engine):
    for call, sentence in MISTAKES:
        with pytest.raises((EngineError, TypeError), match=sentence):
            call(engine)


def test_one_tag_is_as_good_as_a_list_of_it(engine):
    engine.pause("abort")
    assert engine.release_memory("kv_cache").released_tags == ["kv_cache"]
    assert engine.resume_memory("kv_cache").released_tags == []
    engine.continue_generation()


@pytest.mark.parametrize(("transport", "label"), every(product(EVERY_WAY, [7.0, True, ["7"]]), 4))
def test_a_label_that_is_none_is_refused_in_a_sentence(engine, tiny_model, folder, transport, label):
    weights = weights_of(tiny_model)
    with pytest.raises(InvalidRequest, match=r"weight_version = .* must be a string or an integer"):
        updated(engine, transport, weights, folder, weight_version=label)


# -- process groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_our_half_with_buckets_of_any_size(engine, group, tiny_model, other_model, load_format, paused):
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    handle = engine.submit([5, 6, 7], sampling_params=params)
    if paused:
        engine.pause("in_place")
    for bucket_bytes in (1, 20_000, 1 << 26):
        for path in (other_model, tiny_model):
            epoch = engine.status().weights_epoch
            (reply,) = group.update(
                weights_of(path).items(),
                bucket_bytes=bucket_bytes,
                load_format=load_format,
                flush_cache=False,
                weight_version=path.name,
            )
            assert reply.committed
            assert (reply.weights_epoch, reply.weight_version) == (epoch + 1, path.name)
            total = engine.check_weights().total
            assert engine.update_weights_from_disk(path, flush_cache=False).changed_tensors == 0
            assert engine.check_weights().total == total
    engine.continue_generation()
    assert handle.result().finish_reason.type == "length"


def test_broadcasts_join_the_trainers_session(engine, group, other_model):
    weights = weights_of(other_model)
    assert engine.update_weights_from_distributed(weights.items(), group=group, bucket_bytes=4096).committed
    with engine.weight_update(weight_version="mine") as session:
        reply = engine.update_weights_from_distributed(weights.items(), group=group, bucket_bytes=4096)
        assert not reply.committed
    assert session.result is not None
    assert session.result.weight_version == "mine"


def test_an_engine_that_refuses_ends_the_wait(engine, tiny_model, other_model):
    big = torch.zeros(1 << 20)
    with WeightUpdateGroup.create([engine], group_name="refused", timeout_s=PATIENCE) as group:
        with pytest.raises(WeightMismatch) as caught:
            group.update([("nobody", big)])
        assert caught.value.detail["unexpected"] == ["nobody"]
        with pytest.raises(GroupError, match="create it again"):
            group.update(weights_of(other_model).items())
    assert engine.status().weights == "valid"
    with WeightUpdateGroup.create([engine], group_name="refused", timeout_s=PATIENCE) as group:
        assert group.update(weights_of(tiny_model).items())[0].committed


def test_a_manifest_that_is_refused_costs_no_group(engine, group, other_model):
    tensors = [*weights_of(other_model).items(), ("nobody", torch.zeros(3))]
    with pytest.raises(WeightMismatch):
        group.update(tensors, bucket_bytes=4096)
    assert group.update(weights_of(other_model).items())[0].committed
    assert engine.status().session is None


def test_a_group_that_cannot_be_made_fails_at_once(engine):
    with pytest.raises(GroupError, match="other parameters"):
        WeightUpdateGroup.create([engine, engine], group_name="never", timeout_s=PATIENCE)
    with pytest.raises(Unsupported):
        WeightUpdateGroup.create([engine], backend="nccl", group_name="never", timeout_s=PATIENCE)
    with pytest.raises(GroupError):  # nothing is left of it
        engine.destroy_weights_update_group("never")


def test_a_group_of_an_earlier_trainer_is_replaced(engine, other_model):
    with (
        WeightUpdateGroup.create([engine], group_name="left", timeout_s=PATIENCE) as first,
        WeightUpdateGroup.create([engine], group_name="left", timeout_s=PATIENCE) as second,
    ):
        assert second.update(weights_of(other_model).items())[0].committed
        first.clients = []  # its close would have the engine leave the new one


def test_a_process_group_that_the_trainer_has_already(engine, other_model):
    existing = PlainTrainer("existing")
    init = engine.start(existing.init_message(), InitWeightsUpdateGroupReqOutput)
    existing.join()
    assert init.result().rank == 1
    group = WeightUpdateGroup(existing.group, group_name="existing", clients=[engine])
    assert group.update(weights_of(other_model).items())[0].committed
    group.close()
    existing.close()


def test_several_engines_with_one_broadcast(engine, tiny_model, other_model):
    with (
        launched(tiny_model) as second,
        WeightUpdateGroup.create([engine, second], group_name="both", timeout_s=PATIENCE) as group,
    ):
        for path, bucket_bytes in ((other_model, 4096), (tiny_model, 1 << 26)):
            replies = group.update(weights_of(path).items(), bucket_bytes=bucket_bytes)
            assert [reply.committed for reply in replies] == [True, True]
            assert engine.check_weights().total == second.check_weights().total
        second.begin_weight_update()
        with pytest.raises(SessionOpen):
            group.update(weights_of(other_model).items(), bucket_bytes=4096)
        assert engine.status().session is None
        second.end_weight_update(commit=False)
        second.pause("in_place")
        handle = second.submit([5, 6, 7])
        second.continue_generation()
        handle.result()
        with pytest.raises(EngineError):
            group.update([("nobody", torch.zeros(1 << 20))])
        assert second.status().weights == engine.status().weights == "valid"


@pytest.mark.parametrize("doing", quick(["receiving", "joining"]))
def test_shutdown_does_not_wait_for_a_trainer(tiny_model, doing):
    trainer = PlainTrainer(f"shutdown-{doing}", timeout_s=PATIENCE)
    process = launched(tiny_model)
    with process as client:
        if doing == "receiving":
            trainer.beside(trainer.join)
        init = client.start(trainer.init_message(timeout_s=PATIENCE), InitWeightsUpdateGroupReqOutput)
        pending = init
        if doing == "receiving":
            init.result()
            trainer.finish()
            message = update_message(weights_of(tiny_model), group_name=trainer.name)
            pending = client.start(message, WeightUpdateReqOutput)
            while client.status().update is None:
                assert not pending.done()
        client.shutdown()
        with pytest.raises(EngineError):
            pending.result()
        assert eventually(lambda: process.returncode is not None)
        assert process.returncode == 0
    trainer.close()
