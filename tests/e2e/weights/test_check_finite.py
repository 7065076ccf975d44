"""``check_finite``: weights with NaN or infinities are not committed."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.client_updates import update_by
from support.lanes import quick
from support.parameter_server import ParameterServer
from support.plain_trainer import weights_of
from support.waiting import PATIENCE_S as PATIENCE

from caesura.client import (
    SamplingParams,
    SchedulerClient,
    WeightsNotFinite,
    WeightsPoisoned,
    launch_scheduler,
)

pytestmark = pytest.mark.slow  # its engines take seconds to start

NAN, INF = float("nan"), float("inf")
NORM = "model.norm.weight"
Q, K, DOWN = (
    f"model.layers.{layer}.{part}.weight"
    for layer, part in ((0, "self_attn.q_proj"), (1, "self_attn.k_proj"), (1, "mlp.down_proj"))
)
Weights = dict[str, torch.Tensor]


def checkpoint(root: Path, kind: str) -> Path:
    make_checkpoint(root / "plain", "qwen3", dtype=torch.float32 if kind == "float32" else torch.bfloat16)
    if kind != "fp8":
        return root / "plain"
    make_fp8_checkpoint(root / "plain", root / kind, (16, 32))
    return root / kind


@pytest.fixture(scope="module", params=quick(["fp8", "float32", "bfloat16"], 2))
def folder(request, tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[SchedulerClient]:
    options = {"check_finite": True, "allow_legacy_pickle": True}
    with launch_scheduler(folder, num_threads=1, kv_pool_tokens=256, **options) as client:
        yield client


def spoil(weights: Weights, name: str, *values: float) -> None:
    flat = weights[name].reshape(-1).float().clone()
    flat[-len(values) :] = torch.tensor(values)
    weights[name] = flat.to(weights[name].dtype).view(weights[name].shape)


def send(engine: SchedulerClient, transport: str, weights: Weights, folder: Path):
    if transport == "disk":
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return update_by(engine, transport, weights, folder)


@pytest.mark.parametrize("transport", ["disk", "tensor", "ipc", "distributed"])
def test_non_finite_weights_are_not_committed(engine, folder, transport, tmp_path):
    target = Path(shutil.copytree(folder, tmp_path / "new"))
    before = engine.status()
    weights = weights_of(folder)
    for name, values in ((NORM, (NAN, INF, -INF)), (K, (NAN,)), (DOWN, (NAN, NAN)), (Q, (NAN,))):
        spoil(weights, name, *values)
    with pytest.raises(WeightsNotFinite) as caught:
        send(engine, transport, weights, target)
    error = caught.value
    assert (error.detail["tensors"], len(error.detail["non_finite"])) == (4, 3)
    found = {each["name"]: (each["count"], each["total"]) for each in error.detail["non_finite"]}
    assert found[Q] == (1, weights[Q].numel())
    assert f"{Q} (1 of {weights[Q].numel()})" in error.message
    assert "and 1 more tensors" in error.message
    assert not error.retryable

    status = engine.status()
    assert (status.weights, status.weights_epoch) == ("poisoned", before.weights_epoch)
    assert "the commit failed" in status.weights_detail
    assert Q in status.weights_detail
    with pytest.raises(WeightsPoisoned):
        engine.generate([5, 6, 7], SamplingParams(max_new_tokens=1))
    if transport != "disk":
        engine.update_weights_from_tensor([(NORM, weights_of(folder)[NORM])])
        assert engine.status().weights == "poisoned", "the others are still what they were"
    assert send(engine, transport, weights_of(folder), target).committed
    status = engine.status()
    assert (status.weights, status.weights_epoch) == ("valid", before.weights_epoch + 1)
    assert engine.generate([5, 6, 7], SamplingParams(max_new_tokens=1)).output_ids


def test_a_parameter_server_hears_it_instead_of_the_commit(engine, folder):
    epoch, weights = engine.status().weights_epoch, weights_of(folder)
    bad = {**weights}
    spoil(bad, NORM, NAN, INF)
    with ThreadPoolExecutor(1) as pool, ParameterServer(1 << 20) as server:
        update = pool.submit(
            engine.update_weights_from_checkpoint_engine, {"cpu": server.address}, timeout_s=PATIENCE
        )
        told = [server.ask(message) for message in (server.handle, *server.buckets(bad), None, None)]
        assert told[:-1] == [""] * (len(told) - 1)
        assert f"{NORM} (2 of {weights[NORM].numel()})" in told[-1]
        with pytest.raises(WeightsNotFinite):
            update.result(PATIENCE)
    status = engine.status()
    assert (status.weights, status.weights_epoch) == ("poisoned", epoch)
    assert engine.update_weights_from_tensor(list(weights.items())).committed


def test_finite_values_that_overflow_in_the_cast_are_found(engine, folder):
    weights = {name: value.float() for name, value in weights_of(folder).items() if "scale_inv" not in name}
    with engine.weight_update():
        engine.update_weights_from_tensor(list(weights.items()))
    too_large = {NORM: weights[NORM].double().fill_(1e300)}
    with pytest.raises(WeightsNotFinite, match=f"{NORM} "):
        engine.update_weights_from_tensor(list(too_large.items()))
    assert engine.update_weights_from_tensor(list(weights.items())).committed


def test_the_end_of_a_session_and_a_continue_refuse_it_too(engine, folder):
    weights = weights_of(folder)
    bad = {**weights}
    spoil(bad, NORM, INF)
    with pytest.raises(WeightsNotFinite), engine.weight_update():
        engine.update_weights_from_tensor(list(bad.items()))
    status = engine.status()
    assert (status.weights, status.session) == ("poisoned", None)
    assert engine.session_id is None, "the session is over on both sides"
    assert engine.update_weights_from_tensor(list(weights.items())).committed

    engine.pause("in_place")
    assert not engine.update_weights_from_tensor([(NORM, bad[NORM])], flush_cache=False).committed
    with pytest.raises(WeightsNotFinite):
        engine.continue_generation()
    status = engine.status()
    assert (status.generation, status.weights, status.session) == ("paused", "poisoned", None)
    with pytest.raises(WeightsPoisoned):
        engine.continue_generation()
    assert engine.update_weights_from_tensor(list(weights.items()), flush_cache=False).committed
    assert engine.continue_generation().was_paused


@pytest.mark.long
def test_without_the_option_nan_is_committed(tiny_model):
    with launch_scheduler(tiny_model, num_threads=1, kv_pool_tokens=256) as client:
        weights = weights_of(tiny_model)
        spoil(weights, NORM, NAN)
        assert client.update_weights_from_tensor([(NORM, weights[NORM])]).committed
        assert client.status().weights == "valid"
        with pytest.raises(Exception, match="not finite"):
            client.generate([5, 6, 7], SamplingParams(max_new_tokens=2))
