"""Weights that survive their release."""

import errno
import os

import pytest
import torch
from support.buckets_by_hand import Sender
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    ErrorReply,
    GenerateReqInput,
    PauseGenerationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
)
from caesura.io_struct import ReleaseMemoryOccupationReqInput as Release
from caesura.io_struct import ResumeMemoryOccupationReqInput as Resume
from caesura.scheduler.memory import host_copy, residency
from caesura.scheduler.memory.residency import StorageComponent

PROMPT = [3 + 7 * i % 90 for i in range(40)]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, ignore_eos=True)


def generate(driver: EngineDriver) -> list[int]:
    result = driver.complete(PROMPT, sampling_params=SAMPLED)
    return tokens_of(result)


def call(driver: EngineDriver, message):
    reply = driver.call(message)
    assert not isinstance(reply, ErrorReply), reply
    return reply


def checksum(driver: EngineDriver) -> str:
    return call(driver, WeightsCheckerReqInput()).total


@pytest.fixture(params=["mapped", "storage"])
def backend(request, monkeypatch):
    if request.param == "storage":
        monkeypatch.setattr(residency, "_plain", lambda device: StorageComponent)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("backup") / name for name in ("first", "second")]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=False, seed=seed)
    return paths


@pytest.fixture
def driver(models, backend):
    with EngineDriver(str(models[0]), scripted=False, weights_cpu_backup=True) as driver:
        yield driver


def test_a_server_without_updates_serves_again(driver):
    before, total = generate(driver), checksum(driver)
    sizes = driver.status().device_memory
    for _ in range(3):
        reply = call(driver, Release())
        status = driver.status()
        assert (status.weights, status.memory) == ("valid", "released")
        assert reply.freed_bytes["weights"] == sizes.weights
        assert reply.weights_kept
        assert status.device_memory.weights_backup == sizes.weights
        rid = driver.generate(PROMPT, sampling_params=SAMPLED)  # waits, as without KV memory
        driver.tick(5)
        assert driver.status().waiting_requests == 1
        call(driver, Resume())
        driver.run_until_idle()
        assert tokens_of(driver.result(rid)) == before == generate(driver)
        assert checksum(driver) == total
        assert driver.status().device_memory.weights_backup == 0
        assert driver.status().weights_epoch == 0


def test_the_copy_is_that_of_the_last_update(driver, models):
    """Weights change between two releases; what the first release kept must not come back."""
    call(driver, Release(tags=["weights"]))
    assert_error(driver.update(models[1]), "memory_released")
    call(driver, Resume(tags=["weights"]))
    call(driver, UpdateWeightFromDiskReqInput(model_path=str(models[1])))
    updated, total = generate(driver), checksum(driver)
    call(driver, Release(tags=["weights"]))
    call(driver, Resume(tags=["weights"]))
    assert (generate(driver), checksum(driver)) == (updated, total)
    with EngineDriver(str(models[1]), scripted=False) as cold:
        assert (generate(cold), checksum(cold)) == (updated, total)


def test_an_update_bucket_by_bucket_after_a_resume(driver, models):
    call(driver, Release())
    call(driver, Resume(tags=["weights"]))
    call(driver, PauseGenerationReqInput())
    Sender(driver, models[1]).send_all(flush_cache=False, weight_version="1")
    call(driver, ContinueGenerationReqInput())
    call(driver, Resume())
    total = checksum(driver)
    with EngineDriver(str(models[1]), scripted=False) as cold:
        assert checksum(cold) == total


def test_poisoned_weights_stay_poisoned(driver, models):
    call(driver, WeightsCheckerReqInput(action="reset_tensors"))
    call(driver, Release())
    call(driver, Resume())
    assert driver.status().weights == "poisoned"
    assert_error(driver.call(GenerateReqInput(input_ids=PROMPT)), "weights_poisoned")
    call(driver, UpdateWeightFromDiskReqInput(model_path=str(models[1])))
    assert driver.status().weights == "valid"


def test_nothing_commits_while_the_weights_are_away(driver):
    total = checksum(driver)
    call(driver, Release(tags=["weights"]))
    session = call(driver, BeginWeightUpdateReqInput()).session_id
    assert_error(driver.end(session_id=session, weight_version="new"), "memory_released")
    call(driver, Resume(tags=["weights"]))
    call(driver, EndWeightUpdateReqInput(session_id=session, weight_version="new"))
    assert (checksum(driver), driver.status().weight_version) == (total, "new")


def test_a_copy_that_does_not_fit_leaves_the_weights_where_they_are(driver, monkeypatch):
    before = generate(driver)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host_copy.os, "pwrite", full)
    error = assert_error(driver.release(), "out_of_memory")
    assert "No space left on device" in error.message
    status = driver.status()
    assert (status.memory, status.weights, status.device_memory.weights_backup) == ("resident", "valid", 0)
    assert generate(driver) == before
    monkeypatch.undo()
    call(driver, Release())
    call(driver, Resume())
    assert generate(driver) == before


@pytest.mark.parametrize("where", ["weights", "kv_cache"])
def test_a_resume_that_fails_half_way_keeps_the_copy(driver, monkeypatch, where):
    """The copy cannot be read, or the KV cannot be allocated after the weights have come back."""
    before = generate(driver)
    call(driver, Release())
    manager = driver.engine.residency

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def refuse():
        yield
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(host_copy.os, "preadv", fail)
        else:
            patch.setattr(manager.components["kv_cache"], "resume", refuse)
        tags = ["weights", "kv_cache"]
        assert_error(driver.resume(tags=tags), "out_of_memory")
        status = driver.status()
        assert (status.memory, status.device_memory.weights_backup > 0) == ("released", True)
    call(driver, Resume())
    assert generate(driver) == before


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_scales_and_derived_tensors_come_back(tmp_path, backend, family):
    make_checkpoint(tmp_path / "plain", family, seed=3)
    path = tmp_path / "fp8"
    make_fp8_checkpoint(tmp_path / "plain", path, (16, 16))
    with EngineDriver(str(path), scripted=False, weights_cpu_backup=True) as driver:
        model = driver.engine.model
        storage = {name: tensor.clone() for name, tensor in model.named_storage()}
        before = generate(driver)
        call(driver, Release())
        call(driver, Resume())
        for name, tensor in model.named_storage():
            assert torch.equal(tensor.view(torch.uint8), storage[name].view(torch.uint8)), name
        assert generate(driver) == before


def test_without_a_copy_the_engine_names_the_awaited_update(models):
    with EngineDriver(str(models[0]), scripted=False) as driver:
        call(driver, Release())
        assert driver.status().device_memory.weights_backup == 0
        call(driver, Resume())
        error = assert_error(driver.call(GenerateReqInput(input_ids=PROMPT)), "weights_invalid")
        assert "without a copy" in error.message
        assert "send a complete update" in error.message
        assert "--enable-weights-cpu-backup" in error.message
