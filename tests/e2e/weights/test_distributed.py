"""Weights over a process group, from any trainer that builds one as the field does, and every way to fail."""

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from select import select

import pytest
import torch
import torch.distributed as dist
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.scripted import EngineDriver, assert_error
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client.trainer.rendezvous import beside, make_store
from caesura.io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    InitWeightsUpdateGroupReqInput,
    Message,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from caesura.scheduler.weights.transports.distributed import MAX_JOINING
from caesura.transfer.process_group import Membership, keys_of, make_backend


@pytest.fixture
def trainer() -> Iterator[PlainTrainer]:
    trainer = PlainTrainer()
    yield trainer
    trainer.close()


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        yield driver


def pump(driver: EngineDriver, message: Message) -> Message:
    return answer(driver, driver.send(message))


def join(driver: EngineDriver, trainer: PlainTrainer, **fields: object) -> Message:
    trainer.beside(trainer.join)
    reply = pump(driver, trainer.init_message(**fields))
    trainer.finish()
    return reply


def checksum(driver: EngineDriver) -> str:
    return driver.check_weights().total


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_trainer_that_shares_no_code_with_us(driver, trainer, other_model, load_format):
    """Also where pieces lie askew in a bucket, behind three bytes that the model ignores."""
    reply = join(driver, trainer)
    assert (reply.rank, reply.world_size) == (1, 2)
    weights = {"model.rotary_emb.inv_freq": torch.zeros(3, dtype=torch.uint8), **weights_of(other_model)}
    send = trainer.broadcast_each if load_format is None else trainer.broadcast_flat
    trainer.beside(lambda: send(weights))
    reply = pump(driver, update_message(weights, load_format=load_format, weight_version="7"))
    trainer.finish()
    assert (reply.committed, reply.weight_version) == (True, "7")
    assert (reply.written_tensors, reply.skipped_tensors) == (len(weights) - 1, 1)
    total = checksum(driver)
    driver.update(other_model)
    assert checksum(driver) == total
    driver.call(DestroyWeightsUpdateGroupReqInput())
    assert_error(driver.call(DestroyWeightsUpdateGroupReqInput()), "group_error")


def send_while(driver: EngineDriver, message: Message, until: Callable[[], bool]) -> str:
    message_id = driver.send(message)
    while not until():
        driver.tick()
    return message_id


def answer(driver: EngineDriver, message_id: str) -> Message:
    while message_id not in driver.replies:
        driver.tick()
    return driver.replies.pop(message_id)


@pytest.mark.parametrize("sent", [0, 5])
def test_a_destroy_ends_an_update_without_broadcasts(driver, trainer, other_model, sent):
    """The update would wait for each as long as the group allows, and the destroy behind it."""
    join(driver, trainer, broadcast_timeout_s=PATIENCE)
    weights, all_sent = weights_of(other_model), threading.Event()

    def send() -> None:
        trainer.broadcast_each(dict(list(weights.items())[:sent]))
        all_sent.set()

    trainer.beside(send)
    update = send_while(driver, update_message(weights), all_sent.is_set)
    at_work = "updating" if sent else "valid"
    while (status := driver.status()).session is None or status.weights != at_work:
        driver.tick()
    trainer.finish()
    assert update not in driver.replies
    destroyed = driver.send(DestroyWeightsUpdateGroupReqInput())
    assert_error(answer(driver, update), "group_error")
    assert isinstance(answer(driver, destroyed), DestroyWeightsUpdateGroupReqOutput)
    status = driver.status()
    assert status.weights == ("poisoned" if sent else "valid")


def test_two_groups_at_once_and_buffers_that_stay(driver, tiny_model, other_model):
    trainers = [PlainTrainer("pp_0"), PlainTrainer("pp_1")]
    for trainer in trainers:
        join(driver, trainer)
    places = []
    for trainer, path in [(t, p) for p in (other_model, tiny_model) for t in trainers]:
        weights = weights_of(path)
        trainer.beside(lambda send=trainer.broadcast_each, weights=weights: send(weights))
        assert pump(driver, update_message(weights, group_name=trainer.name)).committed
        trainer.finish()
        buffers = driver.engine.process_groups.find(trainer.name).buffers
        places.append([buffer.data_ptr() for buffer in buffers.values()])
    assert places[:2] == places[2:]
    for trainer in trainers:
        driver.call(DestroyWeightsUpdateGroupReqInput(group_name=trainer.name))
        trainer.close()


def test_init_waits_beside_the_loop(driver, trainer):
    """Everything else is answered until the trainer joins, and the same init may be sent again."""
    message_id = driver.send(trainer.init_message())
    again = trainer.init_message()
    again_id = driver.send(again)
    assert driver.status().generation == "running"
    driver.pause()
    assert_error(driver.call(update_message({})), "group_error")
    other = trainer.init_message(rank=1, world_size=3)
    assert "other parameters" in assert_error(driver.call(other), "group_error").message
    trainer.beside(trainer.join)
    assert answer(driver, message_id).rank == 1
    assert answer(driver, again_id).rank == 1
    trainer.finish()
    assert driver.call(trainer.init_message()).rank == 1


def test_a_failed_join_names_the_missing_ranks(driver):
    """Also before a garbage collection, which an idle engine may not see for hours."""
    trainer = PlainTrainer(world_size=3)
    store = dist.TCPStore("127.0.0.1", trainer.port, 3, is_master=True, wait_for_workers=False)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        error = assert_error(pump(driver, trainer.init_message(rank=2, timeout_s=0.5)), "group_error")
        assert error.detail["address"] == f"127.0.0.1:{trainer.port}"
        assert (error.detail["world_size"], error.detail["rank"]) == (3, 2)
        assert error.detail["ranks_seen"] == [2]
        assert "rank 2 of 3" in error.message
        assert "[2]" in error.message
        assert_error(driver.call(DestroyWeightsUpdateGroupReqInput()), "group_error")  # forgotten
        del error
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        gc.enable()
    del store


def test_destroy_ends_an_init_that_waits(driver, trainer):
    message_id = driver.send(trainer.init_message())
    driver.call(DestroyWeightsUpdateGroupReqInput())
    assert "destroyed" in assert_error(answer(driver, message_id), "group_error").message


@pytest.mark.parametrize("fields,code", [
    ({"rank": 2}, "invalid_request"),
    ({"world_size": 10**9}, "invalid_request"),
    ({"backend": "nccl"}, "unsupported"),
])  # fmt: skip
def test_inits_that_cannot_be_right_are_refused_at_once(driver, trainer, fields, code):
    assert_error(driver.call(trainer.init_message(**fields), max_ticks=3), code)


@pytest.mark.parametrize("fault", ["name", "shape", "dtype", "start_row", "unknown dtype", "room", "size"])
def test_a_refused_call_never_joins_and_ends_the_group(driver, trainer, other_model, fault):
    join(driver, trainer)
    weights = weights_of(other_model)
    name, tensor = next(iter(weights.items()))
    fields = {"name": name, "dtype": "F32", "shape": list(tensor.shape)} | {
        "name": {"name": "nobody"},
        "shape": {"shape": [1]},
        "dtype": {"dtype": "I32"},
        "start_row": {"start_row": 1},
        "unknown dtype": {"dtype": "F31"},
        # Of a tensor that the model ignores, but whose bytes would come.
        "room": {"name": "model.rotary_emb.inv_freq", "shape": [2**50]},
        "size": {"name": "model.rotary_emb.inv_freq", "shape": [2**40, 2**40]},
    }[fault]
    failures: list[Exception] = []

    def send() -> None:
        try:
            trainer.broadcast_each({name: tensor})
        except RuntimeError as error:
            failures.append(error)

    trainer.beside(send)
    reply = pump(driver, UpdateWeightsFromDistributedReqInput(specs=[TensorSpec(**fields)]))
    assert reply.code in ("weight_mismatch", "invalid_request", "out_of_memory")
    trainer.finish()
    assert failures
    assert driver.status().weights == "valid"
    assert "init it again" in assert_error(driver.call(update_message(weights)), "group_error").message
    driver.call(DestroyWeightsUpdateGroupReqInput())
    trainer.close()
    other = PlainTrainer()  # on a port of its own: the old store may live a little longer, with its keys
    assert join(driver, other).rank == 1
    other.close()


def test_generation_goes_on_until_the_first_tensor_is_there(driver, trainer, other_model):
    join(driver, trainer)
    rid = driver.generate([5, 6, 7], max_new_tokens=100)
    weights = weights_of(other_model)
    driver.send(update_message(weights, flush_cache=False))
    for _ in range(20):
        driver.tick()
    status = driver.status()
    assert (status.weights, status.update.source, status.update.written_bytes) == ("valid", "distributed", 0)
    step = status.step
    assert step > 10
    trainer.beside(lambda: trainer.broadcast_each(weights))
    assert select([driver.engine.wakeup.fd], [], [], PATIENCE)[0], "the first tensor has not come"
    driver.run_until_idle()
    trainer.finish()
    spans = driver.result(rid).weight_versions
    assert [span.epoch for span in spans] == [0, 1]
    assert spans[0].end >= step - 1


def test_a_session_that_expires_before_the_trainer_sends(driver, trainer, other_model):
    join(driver, trainer)
    message = update_message(weights_of(other_model))
    message.session_id = driver.begin(deadline_s=0.2)
    error = assert_error(pump(driver, message), "deadline_exceeded")
    assert "expired" in error.message
    status = driver.status()
    assert (status.weights, status.session) == ("valid", None)
    assert_error(driver.call(update_message(weights_of(other_model))), "group_error")


def listeners(pid: int) -> set[str]:
    links = [entry.readlink().name for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in links if name.startswith("socket:")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


LOOPBACK = "0100007F"


def test_a_group_of_one_host_listens_on_loopback_alone(driver):
    before = listeners(os.getpid())
    message = InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=PATIENCE
    )
    limit = timedelta(seconds=PATIENCE)
    store, is_local = make_store("127.0.0.1", 0, limit, 2)
    assert is_local
    message.master_port = store.port
    member = Membership(message.group_name, f"127.0.0.1:{store.port}", 2, 0, "gloo")
    _, ranks = keys_of(member, store)
    joining = beside(lambda: make_backend(member, ranks, limit, hostname="127.0.0.1"))
    assert pump(driver, message).rank == 1
    joining.result(PATIENCE)
    opened = listeners(os.getpid()) - before
    assert len(opened) >= 3  # the rendezvous and both ranks
    assert {place.rpartition(":")[0] for place in opened} == {LOOPBACK}


def assert_joins_end(before: set[threading.Thread]) -> None:
    eventually(lambda: not any(t.name == "caesura-feed" for t in set(threading.enumerate()) - before))


def init_of(port: int, number: int, timeout_s: float) -> InitWeightsUpdateGroupReqInput:
    return InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        group_name=f"g{number}",
        timeout_s=timeout_s,
    )


def test_joins_of_a_trainer_that_hangs_end(driver):
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        port = hanging.getsockname()[1]
        messages = [init_of(port, number, 0.3 if number else 600.0) for number in range(MAX_JOINING)]
        for message in messages:
            driver.send(message)
        for message in messages[1:]:
            assert "did not answer" in assert_error(answer(driver, message.id), "group_error").message
        driver.call(DestroyWeightsUpdateGroupReqInput(group_name="g0"))
        assert_joins_end(before)


def test_joins_that_wait_are_bounded(driver):
    before = set(threading.enumerate())
    messages = [init_of(9, number, 600.0) for number in range(MAX_JOINING + 20)]
    for message in messages:
        driver.send(message)
    driver.tick(5)
    refused = [message for message in messages if message.id in driver.replies]
    assert refused == messages[MAX_JOINING:]
    for message in refused:
        error = assert_error(driver.replies.pop(message.id), "queue_full")
        assert error.detail == {"waiting": MAX_JOINING, "limit": MAX_JOINING}
    assert len(set(threading.enumerate()) - before) <= MAX_JOINING
    for message in messages[:MAX_JOINING]:
        driver.call(DestroyWeightsUpdateGroupReqInput(group_name=message.group_name))
    assert_joins_end(before)
