"""Committed weights from one engine to others, each a process of its own."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    Busy,
    EngineError,
    GenerateOutput,
    GroupError,
    InvalidRequest,
    LaunchedScheduler,
    MemoryReleased,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    WeightMismatch,
    WeightsPoisoned,
    launch_scheduler,
)
from caesura.client.trainer import clone_weights
from caesura.client.trainer.chain import join_links
from caesura.client.trainer.rendezvous import make_store
from caesura.io_struct import (
    SendWeightsReqInput,
    SendWeightsReqOutput,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    WeightUpdateReqOutput,
)

SMALL = 20_000
"""Bytes of a bucket: the tiny model is many of them."""


def launched(model: Path) -> LaunchedScheduler:
    return launch_scheduler(str(model), dtype="float32", num_threads=1, kv_pool_tokens=1024)


@pytest.fixture(scope="module")
def source(tiny_model) -> Iterator[SchedulerClient]:
    with launched(tiny_model) as client:
        yield client


@pytest.fixture(scope="module")
def target(tiny_model) -> Iterator[SchedulerClient]:
    with launched(tiny_model) as client:
        yield client


@pytest.fixture(autouse=True)
def known_weights(source, target, tiny_model, other_model) -> None:
    for engine, path in ((source, other_model), (target, tiny_model)):
        engine.resume_memory()
        engine.update_weights_from_disk(path, weight_version=path.name)
        engine.continue_generation()


def total(engine: SchedulerClient) -> str:
    return engine.check_weights().total


def clone(
    source: SchedulerClient, *targets: SchedulerClient, **fields: object
) -> list[WeightUpdateReqOutput]:
    return clone_weights(source, targets, **{"timeout": PATIENCE_S, "bucket_bytes": SMALL, **fields})


PARAMS = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)


@contextmanager
def generating(*engines: SchedulerClient) -> Iterator[list[list[GenerateOutput]]]:
    over, outputs = threading.Event(), [list[GenerateOutput]() for _ in engines]

    def work(engine: SchedulerClient, found: list[GenerateOutput]) -> None:
        is_last = False
        while not is_last:
            is_last = over.is_set()
            found.append(engine.generate([5, 6, 7], sampling_params=PARAMS, timeout=PATIENCE_S))

    with ThreadPoolExecutor(len(engines)) as pool:
        working = [pool.submit(work, *each) for each in zip(engines, outputs, strict=True)]
        try:
            yield outputs
        finally:
            over.set()
        for each in working:
            each.result()


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 26])
def test_a_target_ends_with_the_sources_weights(source, target, other_model, tiny_model, bucket_bytes):
    epochs = source.status().weights_epoch, target.status().weights_epoch
    assert total(source) != total(target)
    with generating(source, target) as outputs:
        (reply,) = clone(source, target, bucket_bytes=bucket_bytes)
        assert (reply.committed, reply.weight_version) == (True, other_model.name)
        assert total(target) == total(source)
    assert (source.status().weights_epoch, target.status().weights_epoch) == (epochs[0], epochs[1] + 1)
    assert target.status().weight_version == other_model.name
    ours, theirs = (
        [[(span.version, span.epoch) for span in each.weight_versions] for each in found] for found in outputs
    )
    assert all(spans == [(other_model.name, epochs[0])] for spans in ours)
    before, after = (tiny_model.name, epochs[1]), (other_model.name, epochs[1] + 1)
    assert all(spans in ([before], [before, after], [after]) for spans in theirs)
    assert theirs == sorted(theirs, key=lambda spans: [epoch for _, epoch in spans])
    assert theirs[-1] == [after]
    assert all(len(output.output_ids) == 200 for found in outputs for output in found)


def test_a_generation_that_is_frozen_goes_on_with_the_clone(source, target, other_model, tiny_model):
    handle = target.submit([5, 6, 7], sampling_params=PARAMS, stream=True)
    next(iter(handle))
    target.pause("in_place")
    assert clone(source, target, flush_cache=False)[0].committed
    target.continue_generation()
    spans = handle.result(timeout=PATIENCE_S).weight_versions
    assert [span.version for span in spans] == [tiny_model.name, other_model.name]


def test_a_paused_source_and_a_poisoned_target(source, target):
    source.pause("in_place")
    target.pause("abort")
    target.check_weights("reset_tensors")
    assert target.status().weights == "poisoned"
    (reply,) = clone(source, target, weight_version="mine")
    assert (reply.committed, reply.weights, reply.weight_version) == (True, "valid", "mine")
    assert total(target) == total(source)


def test_weights_that_are_not_of_one_commit_are_refused_by_name(source, target, other_model):
    before = total(target)
    with source.weight_update():
        source.update_weights_from_disk(other_model)
        with pytest.raises(SessionOpen):
            clone(source, target)
    source.check_weights("reset_tensors")
    with pytest.raises(WeightsPoisoned):
        clone(source, target)
    source.pause("abort")
    source.update_weights_from_disk(other_model)
    source.release_memory("weights")
    with pytest.raises(MemoryReleased):
        clone(source, target)
    assert target.status().weights == "valid"
    assert total(target) == before


def test_a_target_that_refuses_costs_the_source_nothing(source, target):
    target.begin_weight_update()
    with pytest.raises(SessionOpen):
        clone(source, target)
    target.end_weight_update(commit=False)
    with pytest.raises(InvalidRequest):
        clone(source, target, session_id="mine")
    with pytest.raises(InvalidRequest):
        clone(source)
    assert clone(source, target)[0].committed
    assert source.status().weights == "valid"


def test_a_send_by_hand_is_checked(source):
    specs = [tensor.spec() for tensor in source.weights_manifest().tensors]
    with pytest.raises(GroupError, match="init it first"):
        source.send_weights(specs, group_name="nobody")
    with pytest.raises(WeightMismatch) as caught:
        source.send_weights([specs[0], specs[0]], group_name="nobody")
    assert caught.value.detail["mismatched"][0]["reason"] == "named twice"
    with pytest.raises(InvalidRequest, match="counts 1 tensors"):
        source.send_weights(specs, group_name="nobody", tensors_per_broadcast=[1])
    assert source.status().weights == "valid"


def test_released_weights_are_not_sent(source):
    source.pause("abort")
    source.release_memory()
    specs = tensors_of(source)
    with pytest.raises(MemoryReleased):
        source.send_weights(specs, group_name="nobody")


class Pair:
    """A group of two engines, and its calls one by one."""

    def __init__(self, source: SchedulerClient, target: SchedulerClient, name: str) -> None:
        self.name, self.source, self.target = name, source, target
        self._store, _ = make_store("127.0.0.1", 0, timedelta(seconds=PATIENCE_S))
        limits = (PATIENCE_S, PATIENCE_S)
        join_links([source, target], [name], self._store, "127.0.0.1", "gloo", limits)

    def send(self, specs: Sequence[TensorSpec]):
        return self.source.start(
            SendWeightsReqInput(specs=list(specs), group_name=self.name), SendWeightsReqOutput
        )

    def receive(self, specs: Sequence[TensorSpec], session_id: str):
        message = UpdateWeightsFromDistributedReqInput(
            specs=list(specs), group_name=self.name, session_id=session_id
        )
        return self.target.start(message, WeightUpdateReqOutput)


def tensors_of(engine: SchedulerClient) -> list[TensorSpec]:
    return [tensor.spec() for tensor in engine.weights_manifest().tensors]


def test_weight_changes_wait_until_sending_ends(source, target, tiny_model):
    pair, specs, before = Pair(source, target, "midst"), tensors_of(source), total(source)
    half = len(specs) // 2
    session = target.begin_weight_update().session_id
    sending = pair.send(specs)
    assert pair.receive(specs[:half], session).result(PATIENCE_S).written_tensors == half
    assert source.generate([5, 6, 7], sampling_params=SamplingParams(max_new_tokens=8)).output_ids
    source.pause("in_place")
    update = source.start(
        UpdateWeightFromDiskReqInput(model_path=str(tiny_model), weight_version="next"), WeightUpdateReqOutput
    )
    behind = source.start(UpdateWeightFromDiskReqInput(model_path="/nowhere"), WeightUpdateReqOutput)
    with pytest.raises(Busy):  # the update has its place in the queue
        behind.result(PATIENCE_S)
    assert (source.status().update, sending.done(), update.done()) == (None, False, False)
    assert total(target) != before
    pair.receive(specs[half:], session).result(PATIENCE_S)
    assert sending.result(PATIENCE_S).sent_tensors == len(specs)
    assert update.result(PATIENCE_S).weight_version == "next"
    target.end_weight_update(weight_version="old")
    assert (total(target), source.status().weight_version) == (before, "next")
    assert total(source) != before
    source.destroy_weights_update_group("midst")
    target.destroy_weights_update_group("midst")


def test_a_destroy_ends_a_send_which_holds_nothing_back_any_more(source, target, tiny_model):
    pair, specs = Pair(source, target, "given up"), tensors_of(source)
    session = target.begin_weight_update().session_id
    sending = pair.send(specs)
    pair.receive(specs[:5], session).result(PATIENCE_S)
    assert not sending.done()
    source.destroy_weights_update_group("given up")
    with pytest.raises(GroupError, match="the group was destroyed"):
        sending.result(PATIENCE_S)
    assert source.update_weights_from_disk(tiny_model, weight_version="next").committed
    target.end_weight_update(commit=False)
    target.destroy_weights_update_group("given up")


@pytest.mark.long
def test_a_target_that_is_killed_in_the_midst_costs_the_source_nothing(source, tiny_model):
    specs, before = tensors_of(source), total(source)
    process = launched(tiny_model)
    with process as doomed:
        pair = Pair(source, doomed, "doomed target")
        session = doomed.begin_weight_update().session_id
        sending = pair.send(specs)
        pair.receive(specs[:5], session).result(PATIENCE_S)
        assert not sending.done()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="a broadcast failed"):
            sending.result(PATIENCE_S)
    assert source.status().weights == "valid"
    assert source.generate([5, 6, 7], sampling_params=SamplingParams(max_new_tokens=8)).output_ids
    assert total(source) == before
    source.destroy_weights_update_group("doomed target")


def test_a_source_that_is_killed_in_the_midst_poisons_the_target_until_another_sends(
    source, target, tiny_model
):
    process = launched(tiny_model)
    with process as doomed:
        specs = tensors_of(doomed)
        pair = Pair(doomed, target, "doomed source")
        session = target.begin_weight_update().session_id
        receiving = pair.receive(specs, session)
        pair.send(specs[:5]).result(PATIENCE_S)
        assert eventually(lambda: target.status().weights == "updating")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GroupError, match="a broadcast failed"):
            receiving.result(PATIENCE_S)
        with pytest.raises(EngineError):  # nor does it answer what a clone asks first
            clone(doomed, target)
    assert target.status().weights == "poisoned"
    with pytest.raises(WeightsPoisoned):
        target.generate([5, 6, 7], sampling_params=SamplingParams(max_new_tokens=8))
    assert clone(source, target)[0].committed
    assert total(target) == total(source)
    target.destroy_weights_update_group("doomed source")
