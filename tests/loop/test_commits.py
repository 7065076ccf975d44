"""Checks and warnings of a commit, tick by tick."""

import pytest
from safetensors.torch import load_file
from support.buckets_by_hand import Sender
from support.scripted import EngineDriver, assert_error

from caesura.client.trainer.buckets import as_frames, buckets
from caesura.io_struct import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GetStatusReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from caesura.scheduler.weights import reading

NORM = "model.norm.weight"


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


@pytest.fixture
def checking(tiny_model, monkeypatch):
    monkeypatch.setattr(reading, "_SLICE_ELEMENTS", 2000)
    monkeypatch.setattr("caesura.scheduler.messaging.command_queue.SLICE_S", 0.0)
    with EngineDriver(str(tiny_model), check_finite=True) as driver:
        yield driver


def labels_warned_of(caplog) -> list[str]:
    found = [message for message in caplog.messages if "left the label at" in message]
    caplog.clear()
    return found


def test_new_weights_under_the_old_label_are_warned_of(driver, tiny_model, other_model, caplog):
    def update(path, **fields):
        driver.update(path, **fields)
        return labels_warned_of(caplog)

    (message,) = update(other_model)
    assert "tensors and left the label at 'default' (epoch 1)" in message
    assert update(tiny_model, weight_version="7") == []
    assert len(update(other_model, weight_version="7")) == 1, "the same label again is no change"
    assert update(other_model) == [], "nothing changed, which is warned of otherwise"
    driver.end(session_id=driver.begin(), weight_version="8")
    assert labels_warned_of(caplog) == []


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


def test_a_session_that_expires_during_the_check_is_not_committed(checking, other_model):
    session_id = checking.begin()
    checking.update(other_model, session_id=session_id)
    end = checking.send(EndWeightUpdateReqInput(session_id=session_id))
    checking.tick(3)
    assert end not in checking.replies
    checking.engine.sessions.current.deadline = 0.0
    checking.tick(2)
    assert_error(checking.replies.pop(end), "deadline_exceeded")
    status = checking.status()
    assert (status.weights, status.weights_epoch, status.session) == ("poisoned", 0, None)
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
    assert [(each.source, each.committed, each.failed) for each in status.totals.updates] == [
        ("tensor", 0, 1)
    ]
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


def test_a_flush_that_waited_commits_with_a_check_that_takes_slices(checking, other_model):
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
