"""Committed weights from one engine to others, each a process of its own, and every way in which that ends early."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from caesura.client import (
    GroupError,
    InvalidRequest,
    MemoryReleased,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    WeightMismatch,
    WeightsPoisoned,
    launch_scheduler,
)
from caesura.client.tensors import clone_weights
from caesura.io_struct import WeightUpdateReqOutput

SMALL = 20_000
"""Bytes of a bucket: the tiny model is many of them."""
PATIENCE_S = 60.0


@contextmanager
def launched(model: Path) -> Iterator[SchedulerClient]:
    with launch_scheduler(str(model), dtype="float32", num_threads=1, kv_pool_tokens=1024) as client:
        yield client


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
    """Whatever a test has left behind: the source has one model's weights and the target the other's."""
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


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 26])
def test_a_target_ends_with_the_sources_weights(source, target, other_model, bucket_bytes):
    """Label and digests, while both generate; the source's epoch stays."""
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    handles = [engine.submit([5, 6, 7], sampling_params=params) for engine in (source, target)]
    epochs = source.status().weights_epoch, target.status().weights_epoch
    assert total(source) != total(target)
    (reply,) = clone(source, target, bucket_bytes=bucket_bytes)
    assert (reply.committed, reply.weight_version) == (True, other_model.name)
    assert total(target) == total(source)
    assert (source.status().weights_epoch, target.status().weights_epoch) == (epochs[0], epochs[1] + 1)
    assert target.status().weight_version == other_model.name
    spans = [
        [(span.version, span.epoch) for span in handle.result(timeout=PATIENCE_S).weight_versions]
        for handle in handles
    ]
    assert spans[0] == [(other_model.name, epochs[0])]
    assert spans[1][-1] == (other_model.name, epochs[1] + 1)


def test_a_paused_source_and_a_poisoned_target(source, target):
    source.pause("in_place")
    target.pause("abort")
    target.check_weights("reset_tensors")
    assert target.status().weights == "poisoned"
    (reply,) = clone(source, target, weight_version="mine")
    assert (reply.committed, reply.weights, reply.weight_version) == (True, "valid", "mine")
    assert total(target) == total(source)


def test_weights_that_are_not_of_one_commit_are_refused_by_name(source, target, other_model):
    """And cost the target nothing."""
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
    """Over a group that is not there, and of tensors that are not: nothing happens to the weights."""
    specs = [tensor.spec() for tensor in source.weights_manifest().tensors]
    with pytest.raises(GroupError, match="init it first"):
        source.send_weights(specs, group_name="nobody")
    with pytest.raises(WeightMismatch) as caught:
        source.send_weights([specs[0], specs[0]], group_name="nobody")
    assert caught.value.detail["mismatched"][0]["reason"] == "named twice"
    with pytest.raises(InvalidRequest, match="counts 1 tensors"):
        source.send_weights(specs, group_name="nobody", tensors_per_broadcast=[1])
    assert source.status().weights == "valid"
