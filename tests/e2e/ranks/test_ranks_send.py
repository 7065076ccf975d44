"""Weights from, to and through an engine of two ranks: chains, relays and clones, beside an engine of one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S, eventually

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.trainer import WeightUpdateChain, clone_weights

pytestmark = pytest.mark.slow

SMALL = 20_000
"""Bytes of a bucket: the tiny model is many of them."""


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[dict[str, SchedulerClient]]:
    options = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 1024, "log_level": "WARNING"}
    with (
        launch_scheduler(tiny_model, tp=2, **options) as two,
        launch_scheduler(tiny_model, **options) as one,
    ):
        yield {"two": two, "one": one}


def assert_all_have(engines: dict[str, SchedulerClient], path: Path, label: str) -> None:
    """Assert that every rank has the same bytes as after a reload."""
    for client in engines.values():
        before, status = client.check_weights().total, client.status()
        assert (status.weights, status.weight_version, status.session) == ("valid", label, None)
        assert client.update_weights_from_disk(path, flush_cache=False).changed_tensors == 0
        assert client.check_weights().total == before


@pytest.mark.parametrize("order", ["two one", "one two"])
def test_ranks_receive_and_pass_on_one_send_of_a_trainer(engines, tiny_model, other_model, order):
    params = SamplingParams(max_new_tokens=100, temperature=1.0, seed=3, ignore_eos=True)
    clients = [engines[name] for name in order.split()]
    handles = [client.submit([5, 6, 7], sampling_params=params) for client in clients]
    with WeightUpdateChain.create(clients, timeout_s=PATIENCE_S) as chain:
        for path in (other_model, tiny_model):
            replies = chain.update(
                weights_of(path).items(),
                bucket_bytes=SMALL,
                weight_version=path.name,
                flush_cache=False,
                timeout=PATIENCE_S,
            )
            assert [reply.weight_version for reply in replies] == [path.name] * 2
            assert_all_have(engines, path, path.name)
    for handle in handles:
        assert handle.result(timeout=PATIENCE_S).finish_reason.type == "length"


@pytest.mark.parametrize(("source", "target"), [("two", "one"), ("one", "two")])
def test_an_engine_of_ranks_sends_its_weights_and_serves_on(engines, other_model, tiny_model, source, target):
    for client, path in ((engines[source], other_model), (engines[target], tiny_model)):
        client.update_weights_from_disk(path, weight_version=path.name)
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    handle = engines[source].submit([5, 6, 7], sampling_params=params)
    eventually(lambda: engines[source].status().running_requests)
    (reply,) = clone_weights(
        engines[source], [engines[target]], bucket_bytes=SMALL, timeout_s=PATIENCE_S, timeout=PATIENCE_S
    )
    assert reply.weight_version == other_model.name
    (span,) = handle.result(timeout=PATIENCE_S).weight_versions
    assert span.version == other_model.name
    assert_all_have(engines, other_model, other_model.name)
