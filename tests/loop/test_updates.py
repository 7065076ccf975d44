"""Updates, tick by tick: checks and warnings of a commit, and the figures that tell of it."""

import logging
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.clock import clock_of
from support.scripted import EngineDriver, assert_error, one_piece_per_slice
from support.waiting import eventually

from caesura.client.trainer import SharedTensors, as_frames, buckets, manifest
from caesura.io_struct import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetStatusReqInput,
    UpdateTotal,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from caesura.scheduler.weights import reading
from caesura.scheduler.weights.transports.ipc import KEPT

NORM = "model.norm.weight"


@pytest.fixture
def checking(tiny_model, monkeypatch):
    monkeypatch.setattr(reading, "_SLICE_ELEMENTS", 2000)
    one_piece_per_slice(monkeypatch)
    with EngineDriver(str(tiny_model), check_finite=True) as driver:
        yield driver


def labels_warned_of(caplog) -> list[str]:
    found = [message for message in caplog.messages if "left the label at" in message]
    caplog.clear()
    return found


def test_new_weights_under_the_old_label_are_warned_of(driver, tiny_model, other_model, caplog):
    def update(path, **fields):
        driver.update(path, **fields)
        changed_nothing = any("changed no tensor" in line for line in caplog.messages)
        return labels_warned_of(caplog), changed_nothing

    (message,), changed_nothing = update(other_model)
    assert "tensors and left the label at 'default' (epoch 1)" in message
    assert not changed_nothing
    assert update(tiny_model, weight_version="7") == ([], False)
    assert len(update(other_model, weight_version="7")[0]) == 1, "the same label again is no change"
    assert update(other_model) == ([], True)
    driver.end(session_id=driver.begin(), weight_version="8")
    assert caplog.messages == [], "a new label alone was not meant to change any"
    assert driver.status().weight_version == "8"


def test_an_implicit_session_is_warned_of_once(driver, other_model, caplog):
    driver.pause("abort")
    replies = Sender(driver, other_model).send_all()
    assert [reply.committed for reply in replies] == [False] * (len(replies) - 1) + [True]
    (message,) = labels_warned_of(caplog)
    assert f"changed {sum(reply.changed_tensors for reply in replies)} tensors" in message


def test_status_is_answered_while_a_commit_is_checked(checking, other_model):
    update = checking.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    states = []
    while update not in checking.replies:
        status = checking.send(GetStatusReqInput())
        checking.tick()
        states.append(checking.replies.pop(status))
    written = [status for status in states if status.update is None and status.weights == "updating"]
    assert len(written) > 10, "many ticks between the last byte and the commit"
    assert {status.weights_epoch for status in written} == {0}
    assert checking.replies.pop(update).weights_epoch == 1


def test_a_session_that_expires_in_its_check_is_no_commit(checking, other_model):
    session_id = checking.begin()
    checking.update(other_model, session_id=session_id)
    end = checking.send(EndWeightUpdateReqInput(session_id=session_id))
    checking.tick(3)
    assert end not in checking.replies
    checking.engine.sessions.current.deadline = 0.0
    checking.tick(2)
    assert_error(checking.replies.pop(end), "deadline_exceeded")
    checking.assert_status(weights="poisoned", weights_epoch=0, session=None)
    assert checking.update(other_model).weights == "valid"


def test_a_refused_commit_counts_as_a_failed_update(checking, tiny_model):
    norm = load_file(tiny_model / "model.safetensors")[NORM]
    norm[3] = float("nan")
    specs, frames = as_frames(next(iter(buckets([(NORM, norm)], 1 << 20))))
    message = UpdateWeightsFromTensorReqInput(specs=specs)
    rid = checking.generate([5, 6, 7], 20)
    checking.tick(2)
    error = assert_error(checking.call(message, buffers=frames), "weights_not_finite")
    assert error.detail["non_finite"] == [{"name": NORM, "count": 1, "total": norm.numel()}]
    status = checking.status()
    assert status.totals.updates == [UpdateTotal(source="tensor", committed=0, failed=1)]
    assert status.generated_tokens < 20, "the request waits"
    checking.update(tiny_model)
    checking.run_until_idle()
    assert checking.result(rid).finish_reason.type == "length"


def test_continue_waits_for_the_check(checking, other_model):
    checking.pause("retract")
    sender = Sender(checking, other_model)
    assert not sender.send(0).committed
    going_on = checking.send(ContinueGenerationReqInput())
    checking.tick()
    assert checking.status().generation == "paused"
    checking.tick(200)
    assert checking.replies.pop(going_on).was_paused
    assert checking.status().weights_epoch == 1


def test_a_flush_that_waited_commits_with_a_sliced_check(checking, other_model):
    rid = checking.generate([5, 6, 7], max_new_tokens=100)
    checking.tick(3)
    checking.pause("in_place")
    weights = load_file(other_model / "model.safetensors")
    half = dict(list(weights.items())[: len(weights) // 2])
    specs, frames = as_frames(next(buckets(half)))
    update = checking.send(UpdateWeightsFromTensorReqInput(specs=specs, flush_cache=False), buffers=frames)
    checking.tick(50)
    assert not checking.replies.pop(update).committed
    flush = checking.send(FlushCacheReqInput(timeout_s=600.0))
    checking.tick(2)
    assert flush not in checking.replies
    checking.abort(rid)
    checking.tick(200)
    assert flush in checking.replies
    assert checking.status().weights_epoch == 1


STAGES = ("receive", "copy", "derive", "flush")


@pytest.fixture
def clock(monkeypatch):
    return clock_of(monkeypatch, ["control.weight_updates"])


def size_of(path: Path) -> tuple[int, int]:
    """Return the numbers of tensors and bytes of a checkpoint."""
    tensors = load_file(path / "model.safetensors").values()
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


def cached(driver: EngineDriver) -> int:
    return driver.status().kv.cached


@pytest.mark.parametrize("flush", [False, True])
def test_the_reply_to_a_whole_update(driver, other_model, clock, caplog, flush):
    count, nbytes = size_of(other_model)
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.update(other_model, weight_version="new", flush_cache=flush)
    assert (reply.committed, reply.session_id, reply.flushed) == (True, None, flush)
    assert (reply.weights, reply.weights_epoch, reply.weight_version) == ("valid", 1, "new")
    assert (reply.written_tensors, reply.written_bytes, reply.cast_tensors) == (count, nbytes, 0)
    assert 0 < reply.changed_tensors <= count
    assert all(getattr(reply.stages, name) > 0 for name in STAGES)
    assert 0 < reply.stages.total <= reply.stages.receive, "the folder was opened before this clock was read"
    line = next(line for line in caplog.messages if line.startswith("weight update"))
    megabytes, milliseconds = (float(re.search(rf"([\d.]+) {unit}", line)[1]) for unit in ("MiB", "ms"))
    assert f"{count} tensors" in line
    assert f"{reply.changed_tensors} changed, committed, epoch 1, version 'new'" in line
    assert megabytes == pytest.approx(nbytes / 2**20, abs=0.05)
    assert milliseconds == pytest.approx(1e3 * reply.stages.total, abs=0.05)
    assert driver.status().totals.updates == [UpdateTotal(source="disk", committed=1, failed=0)]
    assert driver.last_event("update_begin").detail == "disk, version 'new'"
    event = driver.last_event("update_commit")
    assert (event.detail, event.returned) == (f"disk, version 'new', {count} tensors", None)


def test_the_end_of_a_session_sums_its_calls(driver, tiny_model, other_model, clock):
    count, nbytes = size_of(other_model)
    session_id = driver.begin()
    for path in (tiny_model, other_model):
        fields = {"session_id": session_id, "flush_cache": False}
        reply = driver.update(path, **fields)
        assert (reply.committed, reply.session_id, reply.weights) == (False, session_id, "updating")
        assert (reply.written_tensors, reply.written_bytes, reply.flushed) == (count, nbytes, False)
    reply = driver.end(session_id=session_id)
    assert (reply.committed, reply.session_id, reply.weights_epoch) == (True, None, 1)
    assert (reply.written_tensors, reply.written_bytes) == (2 * count, 2 * nbytes)
    assert driver.status().model_path == str(other_model)


def test_an_aborted_session_reports_what_it_wrote(driver, tiny_model, other_model):
    session_id = driver.begin()
    driver.update(other_model, session_id=session_id)
    reply = driver.end(session_id=session_id, commit=False)
    assert (reply.committed, reply.flushed, reply.session_id) == (False, False, None)
    assert reply.weights == "poisoned"
    assert reply.written_tensors == size_of(other_model)[0]
    status = driver.status()
    assert (status.model_path, status.weights_epoch) == (str(tiny_model), 0)
    assert status.weights_detail == "the session was ended without commit"
    assert driver.last_event("update_failed").detail == "the session was ended without commit"
    assert status.totals.updates == [UpdateTotal(source="disk", committed=0, failed=1)]


def test_status_shows_an_update_that_runs(driver, other_model, monkeypatch, clock):
    one_piece_per_slice(monkeypatch, writes=True)
    _, nbytes = size_of(other_model)
    assert driver.status().update is None
    message_id = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    eventually(lambda: (found := driver.status().update) is not None and found.written_bytes > 0)
    clock.now += 1500.0
    update = driver.status().update
    assert (update.source, update.total_bytes, update.age_s) == ("disk", nbytes, 1500.0)
    eventually(lambda: driver.tick() or message_id in driver.replies)
    assert driver.status().update is None
    reply = driver.replies.pop(message_id)
    assert 1500.0 <= reply.stages.total < 1501.0


def test_other_formats_than_safetensors_are_refused(driver, other_model):
    for load_format in (None, "auto", "safetensors"):
        assert driver.update(other_model, load_format=load_format).committed
    for load_format in ("pt", "", "dummy"):
        error = assert_error(driver.update(other_model, load_format=load_format), "invalid_request")
        assert error.detail == {"field": "load_format", "value": load_format}
        assert error.message == f"load_format {load_format!r}: only safetensors is read"


@pytest.mark.parametrize(
    ("now", "deadline", "late"),
    [(1999.9, 2000.0, False), (2000.0, 2000.0, True), (2000.1, 2000.0, True), (2000.0, None, False)],
)
def test_an_abandoned_session_says_why(driver, other_model, clock, now, deadline, late):
    session_id = driver.begin(deadline_s=600.0)
    driver.update(other_model, session_id=session_id)
    driver.engine.sessions.current.deadline = deadline
    clock.now = now
    driver.engine.updates.expire()
    status = driver.status()
    expected = "the session's deadline passed" if late else "its client is gone"
    assert (status.weights, status.weights_detail, status.session) == ("poisoned", expected, None)


def test_frozen_requests_refuse_a_flush_and_are_counted(driver, other_model):
    driver.generate([5] * 4, 100)
    driver.tick(4)
    driver.pause("in_place")
    error = assert_error(driver.update(other_model), "not_idle")
    assert error.detail == {"running": 1, "prefilling": 0, "waiting": 0, "held_tokens": 16}
    driver.assert_status(weights="valid", session=None)
    assert driver.update(other_model, abort_all_requests=True).committed is True
    assert driver.status().running_requests == 0


# -- commands that meet in the middle ------------------------------------------------------------------------


@pytest.fixture
def sliced(driver, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    return driver


def test_a_flush_that_waits_does_not_commit_half_an_update(sliced, other_model):
    sliced.generate(list(range(3, 23)), 50)
    sliced.tick(3)
    sliced.pause("in_place")
    flush = sliced.send(FlushCacheReqInput(timeout_s=30.0))
    sliced.tick(2)
    update = sliced.send(
        UpdateWeightFromDiskReqInput(
            model_path=str(other_model), abort_all_requests=True, weight_version="new"
        )
    )
    answered = []
    for _ in range(200):
        sliced.tick()
        answered += [each for each in (update, flush) if each in sliced.replies and each not in answered]
        if len(answered) == 2:
            break
    assert answered == [update, flush]
    assert sliced.replies[update].committed
    assert isinstance(sliced.replies[flush], FlushCacheReqOutput)
    slots = sliced.engine.model.weight_slots()
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


def test_an_expired_session_serves_no_scrambled_weights(sliced):
    sliced.begin(deadline_s=1000.0)
    sliced.generate([5, 6, 7], 50)
    reset = sliced.send(WeightsCheckerReqInput(action="reset_tensors"))
    sliced.tick(2)
    launched = len(sliced.runner.launches)
    assert reset not in sliced.replies
    sliced.engine.updates.expire()
    sliced.tick(5)
    assert len(sliced.runner.launches) == launched
    assert sliced.status().weights == "poisoned"


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
