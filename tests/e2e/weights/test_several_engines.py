"""Weights for several engines: down a chain, from one export of shared memory, from one engine to others."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    Busy,
    EngineDied,
    EngineError,
    GenerateOutput,
    GroupError,
    InvalidRequest,
    LaunchedScheduler,
    MemoryReleased,
    PartialUpdate,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    WeightMismatch,
    WeightsPoisoned,
    launch_scheduler,
)
from caesura.client.trainer import SharedTensors, WeightUpdateChain, clone_weights, update_from_shared
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


PARAMS = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=8)
Engines = list[SchedulerClient]


def launched(model: Path) -> LaunchedScheduler:
    return launch_scheduler(str(model), dtype="float32", num_threads=1, kv_pool_tokens=1024)


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[Engines]:
    with launched(tiny_model) as first, launched(tiny_model) as second, launched(tiny_model) as third:
        yield [first, second, third]


@pytest.fixture
def source(engines, other_model) -> SchedulerClient:
    return restored(engines[0], other_model)


@pytest.fixture
def target(engines, tiny_model) -> SchedulerClient:
    return restored(engines[1], tiny_model)


def restored(engine: SchedulerClient, path: Path) -> SchedulerClient:
    engine.resume_memory()
    engine.update_weights_from_disk(path, weight_version=path.name)
    engine.continue_generation()
    return engine


@pytest.fixture(scope="module")
def chain(engines) -> Iterator[WeightUpdateChain]:
    with WeightUpdateChain.create(engines, timeout_s=PATIENCE_S) as chain:
        yield chain


def totals(engines: Engines) -> list[str]:
    return [engine.check_weights().total for engine in engines]


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 26])
def test_a_chain_leaves_every_engine_with_the_sent_weights(
    engines, chain, tiny_model, other_model, bucket_bytes
):
    handles = [engine.submit([5, 6, 7], sampling_params=PARAMS) for engine in engines]
    for path in (other_model, tiny_model):
        replies = chain.update(
            weights_of(path).items(), bucket_bytes=bucket_bytes, weight_version=path.name, flush_cache=False
        )
        assert [(reply.committed, reply.weight_version) for reply in replies] == [(True, path.name)] * 3
        (total,) = set(totals(engines))
        assert engines[0].update_weights_from_disk(path, flush_cache=False).changed_tensors == 0
        assert engines[0].check_weights().total == total
    for handle in handles:
        assert handle.result(timeout=PATIENCE_S).finish_reason.type == "length"


def test_one_export_of_shared_memory_serves_all_engines(engines, tiny_model, other_model):
    with SharedTensors(weights_of(tiny_model)) as shared:
        for path in (other_model, tiny_model):
            shared.copy_from(weights_of(path))
            replies = update_from_shared(engines, shared, weight_version=path.name, timeout=PATIENCE_S)
            assert [reply.weight_version for reply in replies] == [path.name] * 3
            (total,) = set(totals(engines))
            assert engines[2].update_weights_from_disk(path).changed_tensors == 0
            assert engines[2].check_weights().total == total
        with pytest.raises(InvalidRequest, match="SharedTensors"):
            update_from_shared(engines, weights_of(path))
        with pytest.raises(InvalidRequest, match="clients"):
            update_from_shared([], shared)


@pytest.mark.parametrize("road", ["chain", "shared"])
def test_a_refusal_of_one_engine_changes_none(engines, chain, other_model, road):
    def update(tensors: dict[str, torch.Tensor]) -> None:
        if road == "chain":
            chain.update(tensors, timeout=PATIENCE_S)
        else:
            with SharedTensors(tensors) as shared:
                update_from_shared(engines, shared, timeout=PATIENCE_S)

    before = totals(engines)
    with pytest.raises(WeightMismatch):
        update({**weights_of(other_model), "nobody": torch.zeros(3)})
    engines[1].begin_weight_update()
    with pytest.raises(SessionOpen):
        update(weights_of(other_model))
    engines[1].end_weight_update(commit=False)
    assert eventually(lambda: all(engine.status().session is None for engine in engines))
    assert totals(engines) == before
    assert all(engine.status().weights == "valid" for engine in engines)
    update(weights_of(other_model))
    assert len(set(totals(engines))) == 1


@pytest.mark.long
def test_an_engine_that_dies_costs_those_behind_it(engines, tiny_model, other_model):
    before, _, behind = engines
    process = launched(tiny_model)
    with process as doomed:
        for engine in (before, behind):
            engine.update_weights_from_disk(tiny_model)
        line = [before, doomed, behind]
        with WeightUpdateChain.create(line, group_name="doomed", timeout_s=PATIENCE_S) as chain:
            send, sent = chain._group.send, []

            def send_and_kill(part: list[tuple[str, torch.Tensor]], *rest: object) -> None:
                send(part, *rest)
                sent.append(part)
                if len(sent) == 10:
                    assert eventually(lambda: behind.status().weights == "updating")
                    os.kill(process.pid, signal.SIGKILL)
                    assert eventually(lambda: process.returncode is not None)

            chain._group.send = send_and_kill
            with pytest.raises(PartialUpdate) as caught:
                chain.update(
                    weights_of(other_model), bucket_bytes=1, weight_version="new", timeout=PATIENCE_S
                )
        assert list(caught.value.replies) == [0]
        assert sorted(caught.value.errors) == [1, 2]
        assert isinstance(caught.value.errors[1], EngineDied)
    assert (before.status().weights, before.status().weight_version) == ("valid", "new")
    assert behind.status().weights == "poisoned"
    assert clone_weights(before, [behind], timeout=PATIENCE_S)[0].weight_version == "new"
    assert len(set(totals([before, behind]))) == 1


# -- from engine to engine -----------------------------------------------------------------------------------


def total(engine: SchedulerClient) -> str:
    return engine.check_weights().total


def clone(
    source: SchedulerClient, *targets: SchedulerClient, **fields: object
) -> list[WeightUpdateReqOutput]:
    return clone_weights(source, targets, **{"timeout": PATIENCE_S, "bucket_bytes": SMALL, **fields})


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


def test_weights_of_no_one_commit_are_not_cloned(source, target, other_model):
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
    specs = tensors_of(source)
    with pytest.raises(GroupError, match="init it first"):
        source.send_weights(specs, group_name="nobody")
    with pytest.raises(WeightMismatch) as caught:
        source.send_weights([specs[0], specs[0]], group_name="nobody")
    assert caught.value.detail["mismatched"][0]["reason"] == "named twice"
    with pytest.raises(InvalidRequest, match="counts 1 tensors"):
        source.send_weights(specs, group_name="nobody", tensors_per_broadcast=[1])
    assert source.status().weights == "valid"
    source.pause("abort")
    source.release_memory()
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
    assert source.generate([5, 6, 7], sampling_params=SHORT).output_ids
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


def test_a_destroy_ends_a_send(source, target, tiny_model):
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
def test_a_killed_target_costs_the_source_nothing(source, tiny_model):
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
    assert source.generate([5, 6, 7], sampling_params=SHORT).output_ids
    assert total(source) == before
    source.destroy_weights_update_group("doomed target")


def test_a_killed_source_poisons_the_target(source, target, tiny_model):
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
        target.generate([5, 6, 7], sampling_params=SHORT)
    assert clone(source, target)[0].committed
    assert total(target) == total(source)
    target.destroy_weights_update_group("doomed source")
