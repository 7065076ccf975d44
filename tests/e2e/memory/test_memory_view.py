"""Memory events of an engine while it is paused, updated, flushed and released."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from support.clock import clock_of
from support.scripted import EngineDriver

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.memory_view.record import fetch
from caesura.client.serve.pages.document import PageData
from caesura.io_struct import (
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    GetMemoryHistoryReqInput,
    MemoryEvent,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from caesura.scheduler.memory.device_module import device_module_for
from caesura.scheduler.observability.memory_history import SAMPLE_S

CAESURA = [str(Path(sys.executable).with_name("caesura")), "memory"]
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
    driver.call(PauseGenerationReqInput(mode="in_place"))
    driver.call(
        UpdateWeightFromDiskReqInput(model_path=str(other_model), flush_cache=False, weight_version="seven")
    )
    reply = driver.call(ContinueGenerationReqInput())
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


def test_a_continue_that_empties_nothing_returns_nothing(driver):
    driver.call(PauseGenerationReqInput())
    driver.call(ContinueGenerationReqInput(torch_empty_cache=False))
    event = history(driver)[-1]
    assert (event.cause, event.returned) == ("continue", None)
    assert event.residual is not None


def test_an_update_that_fails_and_one_that_empties(driver, other_model, monkeypatch):
    def broken() -> None:
        raise RuntimeError("no derivation today")

    model = driver.engine.model
    with monkeypatch.context() as patch:
        patch.setattr(model, "finalize_weights", broken)
        driver.call(UpdateWeightFromDiskReqInput(model_path=str(other_model)))
    driver.call(UpdateWeightFromDiskReqInput(model_path=str(other_model), torch_empty_cache=True))
    first, failed, emptied, second, commit = history(driver, after=1)
    assert (first.cause, second.cause, commit.cause) == ("update_begin", "update_begin", "update_commit")
    assert (emptied.cause, emptied.detail) == ("failure", "UpdateWeightFromDiskReqInput")
    assert (failed.cause, failed.detail) == ("update_failed", "the commit failed: no derivation today")
    assert failed.returned is None
    assert commit.returned is not None


def test_a_refused_update_is_no_event(driver):
    driver.call(UpdateWeightFromDiskReqInput(model_path="/nowhere"))
    driver.call(EndWeightUpdateReqInput())
    assert [event.cause for event in history(driver)] == ["start"]


def test_flush_release_and_resume(driver, tiny_model):
    driver.generate([5, 6, 7] * 10, 4)
    driver.run_until_idle()
    driver.call(FlushCacheReqInput())
    driver.call(PauseGenerationReqInput())
    released = driver.call(ReleaseMemoryOccupationReqInput(tags=["weights", "kv_cache"]))
    driver.call(ReleaseMemoryOccupationReqInput(tags=["weights"]))  # already gone: nothing happens
    driver.call(ResumeMemoryOccupationReqInput())
    driver.call(UpdateWeightFromDiskReqInput(model_path=str(tiny_model)))
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


def test_steps_are_sampled(driver, monkeypatch):
    now = [monotonic()]
    monkeypatch.setattr("caesura.scheduler.observability.memory_history.monotonic", lambda: now[0])
    driver.call(PauseGenerationReqInput())
    driver.call(ContinueGenerationReqInput())
    now[0] += SAMPLE_S
    driver.tick(5)
    assert history(driver)[-1].cause == "continue", "an idle engine is not looked at"
    driver.generate([5, 6, 7], 6)
    driver.run_until_idle()
    events = driver.call(GetMemoryHistoryReqInput()).events
    assert [event.cause for event in events[-2:]] == ["continue", "sample"]
    assert events[-1].step == 1


def test_a_failed_step(driver):
    driver.generate([5, 6, 7], 20)
    driver.tick(3)
    driver.runner.fail_next = True
    driver.run_until_idle()
    event = history(driver)[-1]
    assert event.cause == "failure"
    assert event.detail == "RuntimeError: scripted failure of a batch"
    assert event.returned is not None


def test_idleness_is_noted_once(driver, monkeypatch):
    clock = clock_of(monkeypatch, ["runtime.loop"])
    driver.generate([5, 6, 7], 4)
    driver.run_until_idle()
    for _ in range(3):
        clock.now += driver.config.idle_empty_s + 1
        driver.tick(3)
    assert [event.cause for event in history(driver)].count("idle") == 1


def test_a_lease_that_expires(driver, monkeypatch):
    driver.call(PauseGenerationReqInput(owner="me", lease_s=0.01))
    lifecycle = driver.engine.state
    monkeypatch.setattr(lifecycle.ownership.lease, "expires", 0.0)
    driver.tick(2)
    event = history(driver)[-1]
    assert (event.cause, event.detail) == ("lease_expiry", "of 'me'")
    assert event.returned is not None
    assert event.residual is not None


def test_the_stages_of_everything_are_in_status(driver, other_model):
    driver.generate([5, 6, 7] * 10, 6)
    driver.run_until_idle()
    driver.call(PauseGenerationReqInput())
    driver.call(ReleaseMemoryOccupationReqInput(tags=["weights"]))
    driver.call(ResumeMemoryOccupationReqInput())
    driver.call(UpdateWeightFromDiskReqInput(model_path=str(other_model), torch_empty_cache=True))
    driver.call(ContinueGenerationReqInput())
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


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = launch_scheduler(
        tiny_model, dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=1024, log_level="WARNING"
    )
    with engine as client:
        client.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        client.pause("in_place")
        client.continue_generation()
        yield client


def run_memory(engine, *arguments, **options):
    command = [*CAESURA, "--endpoint", engine.endpoint, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_a_real_step_counts_its_sampling(engine):
    stages = {stage.name: stage for stage in engine.status().stages}
    assert stages["sample"].count == stages["prefill"].count + stages["decode"].count
    assert stages["sample"].total_s < stages["prefill"].total_s + stages["decode"].total_s


def test_the_command_writes_a_page(engine, tmp_path):
    page = tmp_path / "memory.html"
    done = run_memory(engine, "--html", str(page))
    assert (done.returncode, done.stderr) == (0, "")
    (told,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    data = msgspec.json.decode(told, type=PageData)
    assert data.status.pid == engine.status().pid
    assert [event.cause for event in data.history.events if event.cause != "sample"][:3] == [
        "start",
        "pause",
        "continue",
    ]


def test_the_live_view_ends_with_ctrl_c(engine):
    command = [*CAESURA, "--endpoint", engine.endpoint, "--live", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        lines = [viewer.stdout.readline() for _ in range(3)]
        viewer.send_signal(signal.SIGINT)
        _, errors = viewer.communicate()
    assert lines[0].startswith("time")
    assert "running" in lines[2]
    assert (viewer.returncode, errors) == (0, "")


def test_a_page_of_history_at_a_time(tiny_model):
    with launch_scheduler(
        tiny_model, device="cpu", num_threads=1, kv_pool_tokens=256, log_level="ERROR"
    ) as client:
        for _ in range(150):
            client.pause()
            client.continue_generation()
        first = client.memory_history()
        assert (len(first.events), first.more) == (256, True)
        events = fetch(client, timeout=None).events
    assert [event.seq for event in events] == list(range(1, 302))
