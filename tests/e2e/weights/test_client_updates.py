"""The client's half of updates that end otherwise than well, against engines that run."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import (
    AsyncControlClient,
    ControlClient,
    EngineDied,
    NoSession,
    SchedulerClient,
    TimedOut,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import SharedTensors, WeightUpdateGroup, manifest

pytestmark = pytest.mark.slow  # its engines take seconds to start

SMALL = 4096
"""Bytes of a bucket: every checkpoint here is many."""
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[SchedulerClient]:
    with launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=256) as client:
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
    with WeightUpdateGroup.create([engine], timeout_s=PATIENCE) as group:
        yield group


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def checksum_of(engine: SchedulerClient, weights: dict[str, torch.Tensor]) -> str:
    engine.update_weights_from_tensor(weights.items(), timeout=PATIENCE)
    return engine.check_weights(timeout=PATIENCE).total


def settled(sender: ControlClient) -> str:
    """Return the state of the weights after all that ``sender`` has sent: a connection keeps its order."""
    eventually(lambda: sender.status(timeout=PATIENCE).session is None)
    sender.check_weights(timeout=PATIENCE)  # a command: it runs behind all others
    return sender.status(timeout=PATIENCE).weights


def test_memory_that_was_given_up_waiting_for_keeps_its_bytes(engine, trainer, tiny_model, other_model):
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


@pytest.mark.parametrize("transport", ["tensor", "ipc"])
def test_a_begin_after_its_caller_timed_out_opens_nothing(engine, trainer, other_model, transport):
    update = getattr(trainer, f"update_weights_from_{transport}")
    with stopped(engine.status().pid), pytest.raises(TimedOut):
        update(weights_of(other_model).items(), bucket_bytes=SMALL, timeout=0.1)
    assert settled(trainer) == "valid"
    assert trainer.update_weights_from_disk(other_model, timeout=PATIENCE).committed


def test_a_session_block_whose_begin_times_out_opens_nothing(engine, trainer, other_model):
    with stopped(engine.status().pid), pytest.raises(TimedOut), trainer.weight_update(timeout=0.1):
        raise AssertionError("the block runs")
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


def test_an_explicit_commit_that_is_refused_may_be_made_good(engine, trainer, other_model):
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


def test_shared_tensors_of_a_part_commit_and_belong_to_a_block(engine, trainer, tiny_model, other_model):
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
    options = {"endpoint": endpoint, "dtype": "float32", "num_threads": 1, "kv_pool_tokens": 256}
    weights = weights_of(other_model)
    with ControlClient(endpoint, connect_timeout=PATIENCE) as trainer:
        with launch_scheduler(str(tiny_model), **options):
            trainer.begin_weight_update(timeout=PATIENCE)
        with launch_scheduler(str(tiny_model), **options) as engine:
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


def test_a_begin_that_cannot_be_sent_to_one_engine_opens_none(engine, trainer, tiny_model, other_model):
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
