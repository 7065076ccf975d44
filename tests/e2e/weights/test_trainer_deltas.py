"""Deltas from a trainer: equal to full updates on every transport, for one engine, several and a fleet."""

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.faults import Fault
from support.lanes import quick
from support.plain_trainer import Weights, weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    AsyncControlClient,
    BaseMismatch,
    InvalidRequest,
    NoRollback,
    PartialUpdate,
    SchedulerClient,
    launch_scheduler,
)
from caesura.client.group import Fleet
from caesura.client.trainer import DeltaTracker, WeightDelta, WeightUpdateGroup, update_sparse
from caesura.io_struct import Request, UpdateWeightsFromDistributedReqInput

pytestmark = pytest.mark.slow  # its engines take seconds to start
TRANSPORTS = ("tensor", "ipc", "disk", "distributed")


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[list[SchedulerClient]]:
    options = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 1024}
    with launch_scheduler(tiny_model, **options) as one, launch_scheduler(tiny_model, **options) as two:
        yield [one, two]


@pytest.fixture
def clients(engines, tiny_model) -> list[SchedulerClient]:
    for client in engines:
        client.update_weights_from_disk(tiny_model, weight_version="start")
    return engines


@pytest.fixture(scope="module")
def old(tiny_model) -> Weights:
    return dict(weights_of(tiny_model))


def edited(weights: Weights, step: int = 50) -> Weights:
    """Change every ``step``-th element of most tensors, and one tensor whole."""
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for number, tensor in enumerate(new.values()):
        if number % 3:
            tensor.view(-1)[number % step :: step] += 0.25
    new["model.norm.weight"] *= 2
    return new


def total(client: SchedulerClient) -> str:
    return client.check_weights().total


def sum_of(client: SchedulerClient, weights: Weights) -> str:
    """Return the checksum after a full update."""
    client.update_weights_from_tensor(weights)
    return total(client)


@pytest.mark.parametrize("bucket_bytes", quick([2000, 1 << 20]), ids=["many calls", "one call"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_is_the_full_update(clients, old, tmp_path, transport, bucket_bytes):
    client, other = clients
    new = edited(old)
    expected = sum_of(other, new)
    delta = WeightDelta.between(old, new)
    options = {"transport": transport, "bucket_bytes": bucket_bytes, "weight_version": "2"}
    if transport == "disk":
        options["folder"] = tmp_path
    before, epoch = total(client), client.status().weights_epoch
    with pytest.raises(BaseMismatch):
        client.update_weights_sparse(delta, base_epoch=epoch + 1, folder=tmp_path)
    assert (total(client), client.status().weights) == (before, "valid")
    if transport == "distributed":
        with WeightUpdateGroup.create([client], timeout_s=PATIENCE_S) as group:
            reply = client.update_weights_sparse(delta, base_epoch=epoch, group=group, **options)
    else:
        reply = client.update_weights_sparse(delta, base_epoch=epoch, **options)
    assert reply.committed and reply.weight_version == "2" and reply.digest == delta.digest
    assert total(client) == expected
    with pytest.raises(BaseMismatch):
        client.update_weights_sparse(delta)
    assert client.rollback(delta).weight_version == "start"
    assert total(client) == before
    with pytest.raises(NoRollback):
        client.rollback()


def test_a_tracker_follows_engines_through_a_rollback(clients, old):
    client, other = clients
    tracker = DeltaTracker(old, like=client.weights_manifest().tensors)
    states = [edited(old), edited(edited(old), 70)]
    for number, new in enumerate(states):
        delta = tracker.delta(new)
        client.update_weights_sparse(delta, weight_version=number)
        tracker.sent(delta)
    assert total(client) == sum_of(other, states[1])
    client.rollback()
    tracker.rolled_back()
    delta = tracker.delta(states[1])
    client.update_weights_sparse(delta)
    tracker.sent(delta)
    assert total(client) == total(other)


def test_a_delta_of_everything_goes_as_a_full_update(clients, old):
    client, other = clients
    new = {name: tensor + 0.5 for name, tensor in old.items()}
    delta = WeightDelta.between(old, new)
    assert not delta.is_small("tensor")
    assert client.update_weights_sparse(delta).written_tensors == len(old)
    assert total(client) == sum_of(other, new)


def test_a_delta_of_nothing_changes_the_label(clients, old):
    client = clients[0]
    before, delta = total(client), WeightDelta.between(old, old)
    assert client.update_weights_sparse(delta, weight_version="same").weight_version == "same"
    assert total(client) == before


def test_options_that_do_not_fit_are_named(clients, old):
    delta = WeightDelta.between(old, edited(old))
    for options, words in (
        ({"transport": "smoke"}, "transport"),
        ({"transport": "disk"}, "folder"),
        ({"transport": "distributed"}, "group"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            clients[0].update_weights_sparse(delta, **options)


def test_an_asyncio_client_sends_and_takes_back(clients, old):
    client, other = clients
    delta = WeightDelta.between(old, edited(old))
    before, expected = total(client), sum_of(other, edited(old))

    async def send() -> None:
        async with AsyncControlClient(client.endpoint) as trainer:
            await trainer.update_weights_sparse(delta, transport="ipc")
            assert total(client) == expected
            await trainer.rollback()

    asyncio.run(send())
    assert total(client) == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_engines_take_a_delta_or_none(clients, old, tmp_path, transport):
    new = edited(old)
    expected = sum_of(clients[1], new)
    clients[1].update_weights_from_tensor(old)
    delta, before = WeightDelta.between(old, new), total(clients[0])

    def send() -> list[str]:
        if transport != "distributed":
            options = {"transport": transport, "folder": tmp_path, "weight_version": "2"}
            return [reply.weight_version for reply in update_sparse(clients, delta, **options)]
        with WeightUpdateGroup.create(clients, timeout_s=PATIENCE_S) as group:
            return [r.weight_version for r in update_sparse(clients, delta, group=group, weight_version="2")]

    clients[1].update_weights_from_tensor(new)
    with pytest.raises(BaseMismatch):
        send()
    assert (total(clients[0]), total(clients[1])) == (before, expected), "one refuses: none changes"
    clients[1].update_weights_from_tensor(old)
    assert send() == ["2", "2"]
    assert [total(client) for client in clients] == [expected, expected]


def test_a_refusal_ends_the_wait_of_an_engine_that_is_late(clients, old, monkeypatch):
    """The connection of the trainer ends with the group, and not when garbage is collected."""
    new, (late, other) = edited(old), clients
    other.update_weights_from_tensor(new)
    before, pid, start = total(late), late.status().pid, late.start

    def stopped(request: Request, *arguments: Any) -> Any:
        if isinstance(request, UpdateWeightsFromDistributedReqInput):
            os.kill(pid, signal.SIGSTOP)
        return start(request, *arguments)

    monkeypatch.setattr(late, "start", stopped)
    gc.disable()
    try:
        with WeightUpdateGroup.create(clients, timeout_s=PATIENCE_S) as group, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(update_sparse, clients, WeightDelta.between(old, new), group=group)
            try:
                eventually(lambda: group._dead is not None)
            finally:
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(BaseMismatch):
                sent.result()
    finally:
        gc.enable()
    assert total(late) == before


def test_engines_that_committed_return_if_another_cannot(clients, old):
    delta, before = WeightDelta.between(old, edited(old)), total(clients[0])
    failure = NoRollback("injected")
    with Fault(clients[1], "end_weight_update", failure), pytest.raises(NoRollback, match="injected"):
        update_sparse(clients, delta)
    assert total(clients[0]) == before
    with (
        Fault(clients[1], "end_weight_update", failure),
        Fault(clients[0], "rollback", failure),
        pytest.raises(PartialUpdate) as caught,
    ):
        update_sparse(clients[::-1], delta)
    assert list(caught.value.errors) == [0] and list(caught.value.replies) == [1]


@pytest.mark.parametrize("transport", quick(TRANSPORTS, 2))
def test_a_fleet_takes_a_delta_and_returns(clients, old, tmp_path, transport):
    new = edited(old)
    expected = sum_of(clients[1], new)
    clients[1].update_weights_from_tensor(old)
    delta, before = WeightDelta.between(old, new), total(clients[0])
    delta.save(tmp_path)

    async def send() -> None:
        async with Fleet([client.endpoint for client in clients]) as fleet:
            given = {"model_path": tmp_path} if transport == "disk" else {"named_tensors": delta}
            update = await fleet.update(**given, transport=transport, weight_version="2")
            assert update.fenced == {} and len(update.replies) == 2
            assert [total(client) for client in clients] == [expected] * 2
            assert (await fleet.rollback(delta)).fenced == {}
            assert [total(client) for client in clients] == [before] * 2

    asyncio.run(send())
