"""Memory events of an engine while it is paused, updated, flushed and released."""

import pytest
from support.scripted import EngineDriver
from support.waiting import eventually

from caesura.io_struct import GetMemoryHistoryReqInput, MemoryEvent, SamplingParams
from caesura.scheduler.memory.device_module import device_module_for

pytestmark = pytest.mark.skipif(
    device_module_for("cpu").memory_reserved() == 0, reason="reserved memory is read from /proc"
)


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


def history(driver, after=0) -> list[MemoryEvent]:
    events = driver.call(GetMemoryHistoryReqInput(after=after)).events
    return [event for event in events if event.cause != "sample"]


def test_the_start_is_the_first_event(driver, tiny_model):
    (event,) = history(driver)
    assert (event.seq, event.cause, event.detail) == (1, "start", str(tiny_model)[:96])
    parts = event.by_tag
    assert parts.weights == pytest.approx(driver.status().device_memory.weights, rel=0.5)
    pool = driver.status().device_memory.kv_cache
    assert parts.kv == pytest.approx(pool, rel=0.02), "a warm engine holds the first pages, here all"
    assert parts.answers == driver.engine.answers.nbytes > driver.config.result_bytes, "there from the start"
    assert sum(getattr(parts, tag) for tag in parts.__struct_fields__) == event.reserved


def test_a_cycle_is_recorded_with_the_cause_of_each_reading(driver, other_model):
    driver.generate([5, 6, 7], 50)
    driver.tick(3)
    driver.pause("in_place")
    driver.update(other_model, flush_cache=False, weight_version="seven")
    reply = driver.go_on()
    pause, begin, commit, end = history(driver, after=1)
    assert (pause.cause, pause.detail) == ("pause", "in_place, 1 requests hold KV")
    assert (begin.cause, begin.detail, begin.weights_epoch) == ("update_begin", "disk, version 'seven'", 0)
    assert (commit.cause, commit.weights_epoch) == ("update_commit", 1)
    assert commit.detail.startswith("disk, version 'seven', ")
    assert commit.returned is None
    assert (end.cause, end.detail, end.returned) == ("continue", "in_place", reply.freed)
    assert end.residual == end.reserved - pause.reserved
    assert pause.step == begin.step == commit.step == end.step
    assert pause.at <= begin.at <= commit.at <= end.at


def test_an_update_that_fails_and_one_that_empties(driver, other_model):
    def broken() -> None:
        raise RuntimeError("no derivation today")

    model = driver.engine.model
    model.finalize_weights = broken
    driver.update(other_model)
    del model.finalize_weights
    driver.update(other_model, torch_empty_cache=True)
    first, failed, emptied, second, commit = history(driver, after=1)
    assert (first.cause, second.cause, commit.cause) == ("update_begin", "update_begin", "update_commit")
    assert (emptied.cause, emptied.detail) == ("failure", "UpdateWeightFromDiskReqInput")
    assert (failed.cause, failed.detail) == ("update_failed", "the commit failed: no derivation today")
    assert failed.returned is None
    assert commit.returned is not None


def test_a_refused_update_is_no_event(driver):
    driver.update("/nowhere")
    driver.end()
    assert [event.cause for event in history(driver)] == ["start"]


def test_flush_release_and_resume(driver, tiny_model):
    driver.generate([5, 6, 7] * 10, 4)
    driver.run_until_idle()
    driver.flush()
    driver.pause()
    released = driver.release("weights", "kv_cache")
    driver.release("weights")  # already gone: nothing happens
    driver.resume()
    driver.update(tiny_model)
    events = {event.cause: event for event in history(driver)}
    causes = [event.cause for event in history(driver)]
    assert causes == ["start", "flush", "pause", "release", "resume", "update_begin", "update_commit"]
    assert events["flush"].detail == "32 tokens"
    assert events["flush"].returned is not None
    assert events["release"].detail == "kv_cache, weights"
    assert events["release"].returned == released.reserved_before - released.reserved_after
    for cause in ("release", "resume", "update_begin"):
        assert (events[cause].by_tag.weights, events[cause].by_tag.kv) == (0, 0), cause
    assert events["update_commit"].by_tag.weights == events["start"].by_tag.weights > 0


def test_failed_steps_leases_and_idleness_are_events(tiny_model):
    with EngineDriver(str(tiny_model), idle_empty_s=0.01) as driver:
        driver.generate([5, 6, 7], 20)
        driver.tick(3)
        driver.runner.fail_next = True
        driver.run_until_idle()
        driver.pause(owner="me", lease_s=60.0)
        driver.engine.state.ownership.lease.expires = 0.0
        driver.tick(2)
        eventually(lambda: driver.tick() or history(driver)[-1].cause == "idle")
        emptied = [event for event in history(driver, after=1) if event.returned is not None]
        assert [(event.cause, event.detail) for event in emptied][:2] == [
            ("failure", "RuntimeError: scripted failure of a batch"),
            ("lease_expiry", "of 'me'"),
        ]


def test_the_stages_of_everything_are_in_status(driver, other_model):
    driver.generate([5, 6, 7] * 10, 6)
    driver.run_until_idle()
    driver.pause()
    driver.release("weights")
    driver.resume()
    driver.update(other_model, torch_empty_cache=True)
    driver.go_on()
    stages = {stage.name: stage for stage in driver.status().stages}
    assert set(stages) >= {
        "receive", "schedule", "prefill", "decode", "process", "pause", "continue", "update.receive",
        "update.copy",
        "update.derive", "update.flush", "release.weights", "release.empty_cache",
    }  # fmt: skip
    assert (stages["prefill"].count, stages["decode"].count, stages["pause"].count) == (1, 5, 1)
    assert stages["process"].count == 6
    for stage in stages.values():
        assert 0 <= stage.median_s <= stage.longest_s <= stage.total_s


def test_a_real_step_counts_its_sampling(tiny_model):
    # Log-probabilities of edited logits are not those of the one call.
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logit_bias={5: 1.0})
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        driver.generate([5, 6, 7], sampling_params=params, return_logprob=True, top_logprobs_num=1)
        driver.run_until_idle()
        stages = {stage.name: stage for stage in driver.status().stages}
    assert stages["sample"].count == stages["prefill"].count + stages["decode"].count
    assert stages["sample"].total_s < stages["prefill"].total_s + stages["decode"].total_s
