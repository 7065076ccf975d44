"""Weights through CUDA IPC into an engine process on the same device, from a trainer or parameter server."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.parameter_server import CudaParameterServer

from caesura.client import launch_scheduler
from caesura.client.exceptions import EngineError
from caesura.client.trainer import buckets
from caesura.client.trainer.shared import SharedBucket
from caesura.io_struct import UpdateWeightsFromIPCReqInput, WeightUpdateReqOutput

DEVICE = torch.device("cuda", 0)
BUCKET_BYTES = 20_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=True, seed=seed)
    return paths


@pytest.fixture(scope="module")
def engine(models):
    options = {"device": "cuda", "dtype": "float32", "kv_pool_tokens": 256, "allow_legacy_pickle": True}
    with launch_scheduler(str(models[0]), **options) as client:
        yield client


@pytest.fixture(scope="module")
def cold(engine, models):
    totals = []
    for path in models:
        engine.update_weights_from_disk(path)
        totals.append(engine.check_weights("checksum").total)
    return totals


def device_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in load_file(path / "model.safetensors").items()}


def push(engine, memory: SharedBucket, weights: dict[str, torch.Tensor]) -> int:
    parts = list(buckets(weights.items(), BUCKET_BYTES))
    with engine.weight_update() as update:
        for part in parts:
            request = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=memory.fill(part))
            engine.start(request, WeightUpdateReqOutput).result()
    assert update.result.committed
    return len(parts)


def test_updates_through_one_export_equal_cold_loads(engine, models, cold):
    weights = [device_weights(path) for path in models]
    with SharedBucket(BUCKET_BYTES, DEVICE) as memory:
        free = []
        for number in range(20):
            assert push(engine, memory, weights[number % 2]) > 3
            assert engine.check_weights("checksum").total == cold[number % 2]
            free.append(torch.cuda.mem_get_info(DEVICE)[0])
    assert min(free[10:]) >= min(free[:10]) - MIB, "something stays mapped from update to update"


def test_an_unopened_bucket_is_freed_with_its_owner():
    before = torch.cuda.memory_allocated(DEVICE)
    for _ in range(5):
        SharedBucket(64 * MIB, DEVICE).close()
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_a_handle_out_of_bounds_is_refused_and_the_engine_lives(engine, models, cold):
    engine.update_weights_from_disk(models[0])
    (part, *_) = buckets(device_weights(models[1]).items(), BUCKET_BYTES)
    with SharedBucket(BUCKET_BYTES, DEVICE) as memory:
        specs = memory.fill(part)
        kind, data = memory.handle.handle[:-64], memory.handle.handle[-64:]
        for changes in (
            {"device_uuid": "another"},
            {"handle": kind + bytes(64)},
            {"handle": data[:10]},
            {"nbytes": 1 << 34},
            {"offset": 1 << 34},
            {"ref_counter_offset": 1 << 40},
        ):
            handle = msgspec.structs.replace(memory.handle, **changes)
            with pytest.raises(EngineError) as caught:
                request = UpdateWeightsFromIPCReqInput(handle=handle, specs=specs)
                engine.start(request, WeightUpdateReqOutput).result()
            assert caught.value.code == "invalid_request", changes
    assert engine.status().weights == "valid"
    assert engine.check_weights("checksum").total == cold[0]


@pytest.mark.parametrize("half_bytes", [BUCKET_BYTES, MIB])
def test_a_parameter_server_drives_an_update(engine, models, cold, half_bytes):
    engine.update_weights_from_disk(models[0])
    uuid = f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"
    free = []
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool, CudaParameterServer(half_bytes) as server:
            update = pool.submit(
                engine.update_weights_from_checkpoint_engine, {uuid: server.address}, timeout_s=20.0
            )
            assert server.ask(server.handle) == ""
            for bucket in server.buckets(load_file(models[1] / "model.safetensors")):
                assert server.ask(bucket) == ""
            assert server.ask(None) == ""
            assert server.ask(None) == ""
            assert update.result().committed
        assert engine.check_weights("checksum").total == cold[1]
        free.append(torch.cuda.mem_get_info(DEVICE)[0])
    assert free[-1] >= free[1] - MIB
