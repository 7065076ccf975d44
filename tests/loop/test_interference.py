"""Commands that meet in the middle."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error, one_piece_per_slice

from caesura.client.trainer import SharedTensors, as_frames, buckets, manifest
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from caesura.scheduler.weights.transports.ipc import KEPT


@pytest.fixture
def driver(tiny_model, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


def test_a_flush_that_waits_does_not_commit_half_an_update(driver, other_model):
    driver.generate(list(range(3, 23)), 50)
    driver.tick(3)
    driver.pause("in_place")
    flush = driver.send(FlushCacheReqInput(timeout_s=30.0))
    driver.tick(2)
    update = driver.send(
        UpdateWeightFromDiskReqInput(
            model_path=str(other_model), abort_all_requests=True, weight_version="new"
        )
    )
    answered = []
    for _ in range(200):
        driver.tick()
        answered += [each for each in (update, flush) if each in driver.replies and each not in answered]
        if len(answered) == 2:
            break
    assert answered == [update, flush]
    assert driver.replies[update].committed
    assert isinstance(driver.replies[flush], FlushCacheReqOutput)
    slots = driver.engine.model.weight_slots()
    for name, tensor in load_file(other_model / "model.safetensors").items():
        assert slots[name].read().equal(tensor), name


def test_a_manifest_may_name_skipped_tensors(driver, other_model):
    """A tied model's state dict carries its head; the session must not wait for it."""
    tensors = load_file(other_model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    session_id = driver.begin(manifest=manifest(tensors.items()))
    for part in buckets(tensors.items(), 20_000):
        specs, frames = as_frames(part)
        driver.call(UpdateWeightsFromTensorReqInput(specs=specs, session_id=session_id), buffers=frames)
    reply = driver.end(session_id=session_id)
    assert (reply.committed, reply.skipped_tensors) == (True, 1)


def test_an_answer_may_quote_undecodable_names(driver, tmp_path, other_model):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((other_model / "config.json").read_bytes())
    Path(os.fsdecode(bytes(folder) + b"/a\xff.safetensors")).write_bytes(b"bad")
    error = assert_error(driver.update(folder), "checkpoint_error")
    assert "a\\udcff.safetensors" in error.message


def test_a_session_that_expires_does_not_serve_scrambled_weights(driver, monkeypatch):
    driver.begin(deadline_s=1000.0)
    driver.generate([5, 6, 7], 50)
    reset = driver.send(WeightsCheckerReqInput(action="reset_tensors"))
    driver.tick(2)
    launched = len(driver.runner.launches)
    assert reset not in driver.replies
    driver.engine.updates.expire()
    driver.tick(5)
    assert len(driver.runner.launches) == launched
    assert driver.status().weights == "poisoned"


def test_refused_updates_do_not_gather_mappings(driver, other_model):
    tensors = load_file(other_model / "model.safetensors")
    wrong = {name: tensor[:1] for name, tensor in tensors.items()}
    shared = [SharedTensors(wrong.items()) for _ in range(KEPT + 3)]
    for each in shared:
        message = UpdateWeightsFromIPCReqInput(handle=each.memory.handle, specs=each.specs)
        assert_error(driver.call(message), "weight_mismatch")
    assert len(driver.engine.updates.maps) <= KEPT
    for each in shared:
        each.close()
    driver.engine.updates.collect()
    assert not driver.engine.updates.keeps_memory


def test_a_command_that_waits_is_a_sign_of_life(driver, monkeypatch):
    clock = clock_of(monkeypatch, ["control.engine_state"])
    driver.pause("in_place", owner="trainer", lease_s=5.0)
    driver.send(
        InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2, owner="trainer"
        )
    )
    driver.tick(2)
    assert driver.engine.commands.is_busy
    clock.now += 6.0
    assert driver.sleep_s() > 0
    driver.tick(3)
    assert driver.status().generation == "paused"


def test_a_manifest_must_be_whole(driver, other_model):
    tensors = load_file(other_model / "model.safetensors")
    forgotten = sorted(tensors)[3]
    del tensors[forgotten]
    error = assert_error(
        driver.call(BeginWeightUpdateReqInput(manifest=manifest(tensors.items()))), "weight_mismatch"
    )
    assert error.detail["missing"] == [forgotten]
    assert driver.status().session is None
