"""One update of several engines: down a chain, or from one export of shared memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import (
    EngineDied,
    InvalidRequest,
    LaunchedScheduler,
    PartialUpdate,
    SamplingParams,
    SchedulerClient,
    SessionOpen,
    WeightMismatch,
    launch_scheduler,
)
from caesura.client.trainer import SharedTensors, WeightUpdateChain, clone_weights, update_from_shared

Engines = list[SchedulerClient]


def launched(model: Path) -> LaunchedScheduler:
    return launch_scheduler(str(model), dtype="float32", num_threads=1, kv_pool_tokens=1024)


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[Engines]:
    with launched(tiny_model) as first, launched(tiny_model) as second, launched(tiny_model) as third:
        yield [first, second, third]


@pytest.fixture(scope="module")
def chain(engines) -> Iterator[WeightUpdateChain]:
    with WeightUpdateChain.create(engines, timeout_s=PATIENCE_S) as chain:
        yield chain


def totals(engines: Engines) -> list[str]:
    return [engine.check_weights().total for engine in engines]


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 26])
def test_a_chain_leaves_every_engine_with_the_sent_weights(
    engines, chain, tiny_model, other_model, bucket_bytes
):
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    handles = [engine.submit([5, 6, 7], sampling_params=params) for engine in engines]
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
def test_an_engine_that_dies_in_the_midst_costs_itself_and_those_behind_it(engines, tiny_model, other_model):
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
