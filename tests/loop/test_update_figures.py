"""Figures of an update: its reply, the log, the history, and status while it runs."""

import logging
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.scripted import EngineDriver, assert_error, one_piece_per_slice
from support.waiting import eventually

from caesura.client.trainer import manifest
from caesura.io_struct import GetMemoryHistoryReqInput, UpdateWeightFromDiskReqInput

STAGES = ("receive", "copy", "derive", "flush")


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("caesura.scheduler.control.weight_updates.monotonic", lambda: now[0])
    return now


def size_of(path: Path) -> tuple[int, int]:
    """Return the numbers of tensors and bytes of a checkpoint."""
    tensors = load_file(path / "model.safetensors").values()
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


def cached(driver: EngineDriver) -> int:
    return driver.status().kv.cached


def last_event(driver: EngineDriver, cause: str):
    events = driver.call(GetMemoryHistoryReqInput()).events
    return [event for event in events if event.cause == cause][-1]


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
    assert last_event(driver, "update_begin").detail == "disk, version 'new'"
    event = last_event(driver, "update_commit")
    assert (event.detail, event.returned) == (f"disk, version 'new', {count} tensors", None)


def test_the_history_has_the_memory_returned_after_an_update(driver, other_model):
    driver.update(other_model, torch_empty_cache=True)
    assert last_event(driver, "update_commit").returned is not None


def test_only_an_update_that_changes_nothing_is_warned_of(driver, tiny_model, other_model, caplog):
    def warned() -> bool:
        found = any("changed no tensor" in line for line in caplog.messages)
        caplog.clear()
        return found

    driver.update(other_model)
    assert not warned()
    driver.update(other_model)
    assert warned()
    driver.end(session_id=driver.begin(), weight_version="label")
    assert not warned(), "a new label alone was not meant to change any"
    assert driver.status().weight_version == "label"


def test_the_end_of_a_session_sums_its_calls(driver, tiny_model, other_model, clock):
    count, nbytes = size_of(other_model)
    clock[0] = 1000.0
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


def test_an_aborted_session_reports_written_tensors_and_keeps_the_folder(
    driver, tiny_model, other_model, caplog
):
    session_id = driver.begin()
    driver.update(other_model, session_id=session_id)
    reply = driver.end(session_id=session_id, commit=False)
    assert (reply.committed, reply.flushed, reply.session_id, reply.weights) == (
        False,
        False,
        None,
        "poisoned",
    )
    assert reply.written_tensors == size_of(other_model)[0]
    status = driver.status()
    assert (status.model_path, status.weights_epoch) == (str(tiny_model), 0)
    assert status.weights_detail == "the session was ended without commit"
    assert last_event(driver, "update_failed").detail == "the session was ended without commit"
    assert [(t.source, t.committed, t.failed) for t in status.totals.updates] == [("disk", 0, 1)]


def test_only_a_flushing_update_drops_the_prefix_cache(driver, other_model):
    driver.complete(list(range(3, 43)), 2)
    assert cached(driver) > 0
    reply = driver.end(session_id=driver.begin())
    assert (reply.committed, reply.flushed) == (True, False)
    assert cached(driver) == 0


def test_an_engine_that_has_mapped_no_memory_keeps_none(driver):
    assert not driver.engine.updates.keeps_memory


def test_status_shows_an_update_that_runs(driver, other_model, monkeypatch, clock):
    one_piece_per_slice(monkeypatch, writes=True)
    _, nbytes = size_of(other_model)
    assert driver.status().update is None
    message_id = driver.send(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    eventually(lambda: (found := driver.status().update) is not None and found.written_bytes > 0)
    clock[0] += 1500.0
    update = driver.status().update
    assert (update.source, update.total_bytes, update.age_s) == ("disk", nbytes, 1500.0)
    eventually(lambda: driver.tick() or message_id in driver.replies)
    assert driver.status().update is None
    reply = driver.replies.pop(message_id)
    assert 1500.0 <= reply.stages.total < 1501.0


@pytest.mark.parametrize("load_format", ["pt", "", "dummy"])
def test_other_formats_are_refused_by_name(driver, other_model, load_format):
    error = assert_error(driver.update(other_model, load_format=load_format), "invalid_request")
    assert error.detail == {"field": "load_format", "value": load_format}
    assert error.message == f"load_format {load_format!r}: only safetensors is read"


@pytest.mark.parametrize("load_format", [None, "auto", "safetensors"])
def test_safetensors_by_any_name_is_read(driver, other_model, load_format):
    reply = driver.update(other_model, load_format=load_format)
    assert reply.committed


def test_a_manifest_must_be_fulfilled_by_name(driver, other_model):
    tensors = load_file(other_model / "model.safetensors")
    session_id = driver.begin(manifest=manifest(tensors.items()))
    error = assert_error(driver.end(session_id=session_id), "weight_mismatch")
    assert error.message == f"the session lacks {len(tensors)} tensors"
    assert error.detail["missing"] == sorted(tensors)
    driver.update(other_model, session_id=session_id)
    assert driver.end(session_id=session_id).committed


@pytest.mark.parametrize("now,late", [(1999.9, False), (2000.0, True), (2000.1, True)])
def test_an_abandoned_session_says_why(driver, other_model, clock, now, late):
    session_id = driver.begin(deadline_s=600.0)
    driver.update(other_model, session_id=session_id)
    updates = driver.engine.updates
    driver.engine.sessions.current.deadline = 2000.0
    clock[0] = now
    updates.expire()
    status = driver.status()
    expected = "the session's deadline passed" if late else "its client is gone"
    assert (status.weights, status.weights_detail, status.session) == ("poisoned", expected, None)


def test_a_session_without_a_deadline_is_abandoned_for_its_client_alone(driver, other_model, clock):
    session_id = driver.begin(deadline_s=600.0)
    driver.update(other_model, session_id=session_id)
    updates = driver.engine.updates
    driver.engine.sessions.current.deadline = None
    updates.expire()
    assert driver.status().weights_detail == "its client is gone"


def test_frozen_requests_refuse_a_flush_and_are_counted(driver, other_model):
    driver.generate([5] * 4, 100)
    driver.tick(4)
    driver.pause("in_place")
    error = assert_error(driver.update(other_model), "not_idle")
    assert error.detail == {"running": 1, "prefilling": 0, "waiting": 0, "held_tokens": 16}
    status = driver.status()
    assert (status.weights, status.session) == ("valid", None)
    assert driver.update(other_model, abort_all_requests=True).committed is True
    assert driver.status().running_requests == 0
