"""Updates by tensors and shared memory: sessions, refusals, bounds and mappings."""

import fcntl
import os
from collections import OrderedDict
from pathlib import Path

import msgspec
import pytest
import torch
from support.buckets_by_hand import Sender
from support.faults import Fault
from support.plain_trainer import weights_of
from support.scripted import EngineDriver, assert_error
from support.waiting import eventually

from caesura.client import SchedulerClient, launch_scheduler
from caesura.client.exceptions import EngineError
from caesura.client.trainer import SharedBucket, SharedTensors, buckets, manifest
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    CaesuraError,
    TensorSpec,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from caesura.scheduler.weights.transports.ipc import KEPT

pytestmark = pytest.mark.slow  # its engines take seconds to start

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(tiny_model):
    with launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=256) as client:
        yield client


@pytest.mark.parametrize("bucket_bytes", [16, 1000, 1 << 20])
def test_buckets_hold_their_bound_and_lose_nothing(bucket_bytes):
    tensors = OrderedDict(
        scalar=torch.tensor(3.0),
        vector=torch.arange(100, dtype=torch.bfloat16),
        matrix=torch.arange(600, dtype=torch.float32).view(30, 20),
        strided=torch.arange(600, dtype=torch.float32).view(30, 20).t(),
        empty=torch.empty(0, 4),
    )
    seen: dict[str, list[torch.Tensor]] = {}
    for bucket in buckets(tensors.items(), bucket_bytes):
        rows = [piece.rows.nbytes // max(len(piece.rows.reshape(-1)), 1) for piece in bucket.pieces]
        assert bucket.nbytes <= bucket_bytes or len(rows) == 1
        for piece in bucket.pieces:
            seen.setdefault(piece.name, []).append(piece.rows)
    for name, tensor in tensors.items():
        whole = torch.cat(seen[name]) if tensor.dim() else seen[name][0]
        assert torch.equal(whole, tensor)


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        yield driver


def test_a_short_buffer_poisons_until_a_complete_update(driver, other_model):
    driver.pause()
    sender = Sender(driver, other_model, 20_000)
    sender.send(0)
    assert_error(sender.send(1, frames=[memoryview(b"short")]), "invalid_request")
    assert driver.status().weights == "poisoned"
    assert_error(driver.go_on(), "weights_poisoned")
    replies = [sender.send(number) for number in range(len(sender.parts))]
    assert [reply.committed for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert driver.status().weights == "valid"
    driver.go_on()


def test_a_manifest_must_fit_and_be_fulfilled(driver, other_model):
    wrong = [TensorSpec(name="model.embed_tokens.weight", dtype="F32", shape=[3, 3])]
    error = assert_error(driver.call(BeginWeightUpdateReqInput(manifest=wrong)), "weight_mismatch")
    assert error.detail["mismatched"][0]["name"] == "model.embed_tokens.weight"
    weights = weights_of(other_model)
    most = manifest(list(weights.items())[1:])
    error = assert_error(driver.call(BeginWeightUpdateReqInput(manifest=most)), "weight_mismatch")
    assert error.detail["missing"] == [next(iter(weights))]
    assert driver.status().session is None
    session_id = driver.begin(manifest=manifest(weights.items()))
    error = assert_error(driver.end(session_id=session_id), "weight_mismatch")
    assert error.message == f"the session lacks {len(weights)} tensors"
    assert error.detail["missing"] == sorted(weights)
    sender = Sender(driver, other_model, 20_000)
    sender.send(0, session_id=session_id)
    assert assert_error(driver.end(session_id=session_id), "weight_mismatch").detail["missing"]
    for number in range(1, len(sender.parts)):
        sender.send(number, session_id=session_id)
    assert driver.end(session_id=session_id).committed


def test_specs_are_bounds_checked(driver, other_model):
    name, tensor = next(iter(weights_of(other_model).items()))
    fields = {"name": name, "dtype": "F32", "shape": list(tensor.shape), "offset": 0, "nbytes": tensor.nbytes}
    for fault in (
        {"offset": 4},
        {"dtype": "F31"},
        {"offset": 2, "nbytes": tensor.nbytes - tensor[0].nbytes},
        {"buffer": 3},
        {"start_row": 10**9},
        {"nbytes": tensor.nbytes - 4},
    ):
        message = UpdateWeightsFromTensorReqInput(specs=[TensorSpec(**fields | fault)])
        reply = driver.call(message, buffers=[tensor.numpy().tobytes()])
        assert reply.code in ("invalid_request", "weight_mismatch"), fault
    assert_error(Sender(driver, other_model, 1 << 20).send(0, frames=[]), "invalid_request")
    driver.assert_status(weights="valid", session=None, weights_epoch=0)


def test_shared_memory_that_could_fault_is_refused(engine, tiny_model):
    """Memory unsealed, of another size or inode, a plain file, a process that is gone: errors, no SIGBUS."""
    (bucket,) = buckets(list(weights_of(tiny_model).items())[:1])
    with SharedBucket(bucket.nbytes) as memory:
        specs = memory.fill(bucket)
        good = memory.handle
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, good.nbytes)
        inode = os.fstat(unsealed).st_ino
        replace = msgspec.structs.replace
        for handle in (
            replace(good, fd=unsealed, inode=inode),
            replace(good, nbytes=good.nbytes + 64),
            replace(good, inode=good.inode + 1),
            replace(good, fd=0, inode=os.fstat(0).st_ino),
            replace(good, pid=2**22 - 1),
        ):
            request = UpdateWeightsFromIPCReqInput(handle=handle, specs=specs)
            with pytest.raises(EngineError) as caught:
                engine.start(request, WeightUpdateReqOutput).result()
            assert caught.value.code == "invalid_request"
        os.close(unsealed)
        assert fcntl.fcntl(memory.handle.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert engine.status().weights == "valid"


def test_shared_memory_is_reserved_when_it_is_made():
    full = Fault(os, "posix_fallocate", OSError(28, "No space left on device"))
    with full, pytest.raises(CaesuraError) as caught:
        SharedBucket(1 << 20)
    assert caught.value.code == "out_of_memory"


def mapped(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("caesura-weights")


def test_one_mapping_serves_many_updates(tiny_model):
    with launch_scheduler(str(tiny_model), dtype="float32", num_threads=1, kv_pool_tokens=256) as client:
        pid = client.status().pid
        with SchedulerClient(client.endpoint) as trainer:
            for _ in range(3):
                trainer.update_weights_from_ipc(weights_of(tiny_model).items(), bucket_bytes=4096)
                assert mapped(pid) == 1
            many = [SharedTensors(weights_of(tiny_model).items()) for _ in range(KEPT + 1)]
            for shared in many:  # what is kept is bounded, whoever sends
                trainer.update_weights_from_ipc(shared)
            assert mapped(pid) == KEPT
            for shared in many:
                shared.close()
        eventually(lambda: mapped(pid) == 0)  # an idle engine lets go of memory whose owner is gone
