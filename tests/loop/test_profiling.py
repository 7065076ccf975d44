"""Traces of steps by torch's profiler: what is recorded, when it ends, and where it may be written."""

import gzip
import json
import threading
from pathlib import Path

import pytest
from support.scripted import EngineDriver, assert_error, tokens_of
from support.waiting import eventually

from caesura.io_struct import GenerateImagesReqInput
from caesura.io_struct import StartProfileReqInput as Start
from caesura.io_struct import StopProfileReqInput as Stop
from caesura.scheduler.control import profiling


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "traces"


@pytest.fixture
def driver(tiny_model, folder):
    with EngineDriver(str(tiny_model), scripted=False, profile_dir=str(folder)) as driver:
        yield driver


def operations(path: str) -> list[dict]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("cat") == "cpu_op"]


def test_a_trace_has_the_operations_of_its_steps(driver, folder):
    started = driver.call(Start(num_steps=3, record_shapes=True))
    assert (started.num_steps, Path(started.path).parent) == (3, folder)
    driver.generate([5, 6, 7], 3)
    ended = driver.call(Stop(wait=True), max_ticks=20_000)
    assert (ended.path, ended.steps) == (started.path, 3)
    found = operations(ended.path)
    assert any("Input Dims" in event["args"] for event in found)
    assert driver.status().step == 3


def test_stop_ends_a_trace_and_says_again_which_it_was(driver):
    started = driver.call(Start())
    driver.generate([5, 6, 7], 50)
    driver.tick(4)
    ended = driver.call(Stop(), max_ticks=20_000)
    assert (ended.path, started.num_steps) == (started.path, 1000)
    assert 4 <= ended.steps < 50
    assert operations(ended.path)
    again = driver.call(Stop())
    assert (again.path, again.steps) == (ended.path, ended.steps)


def test_a_second_trace_begins_when_the_first_is_written(driver):
    paths = []
    for folder in ("first", "first", "second"):
        driver.call(Start(output_dir=folder))
        assert_error(driver.call(Start()), "busy")
        paths.append(Path(driver.call(Stop(), max_ticks=20_000).path))
    assert [path.parent.name for path in paths] == ["first", "first", "second"]
    assert len({path for path in paths if path.exists()}) == 3, "of the same second and step, too"


def test_every_step_of_an_image_counts(tmp_path, folder):
    pytest.importorskip("diffusers")
    from support.pipelines import make_sd3

    path = make_sd3(tmp_path / "sd3")
    with EngineDriver(str(path), scripted=False, profile_dir=str(folder)) as driver:
        started = driver.call(Start(num_steps=3))
        driver.send(GenerateImagesReqInput(prompt="a", width=16, height=16, num_inference_steps=8))
        driver.run_until_idle()
        ended = driver.call(Stop(), max_ticks=20_000)
        assert (ended.path, ended.steps) == (started.path, 3)


def test_steps_go_on_while_the_profiler_is_loaded(driver, monkeypatch):
    loaded = threading.Event()
    monkeypatch.setattr(profiling, "import_module", lambda _: loaded.wait())
    start = driver.send(Start(num_steps=2))
    rid = driver.generate([5, 6, 7], 4)
    driver.tick(20)
    assert start not in driver.replies
    assert len(tokens_of(driver.result(rid))) == 4
    loaded.set()
    eventually(lambda: driver.tick() or start in driver.replies)
    assert_error(driver.call(Start()), "busy")


@pytest.mark.parametrize(
    "wanted", ["/etc", "..", "link", "a\0b", "a/" * 2000], ids=lambda path: ascii(path)[:8]
)
def test_a_folder_outside_is_refused(driver, folder, wanted):
    folder.mkdir()
    (folder / "link").symlink_to("/tmp")
    error = assert_error(driver.call(Start(output_dir=wanted)), "invalid_request")
    assert error.detail["field"] == "output_dir"
    assert_error(driver.call(Start(activities=["GPU"])), "invalid_request")  # there is none
    assert_error(driver.call(Stop()), "invalid_request")


def test_a_trace_that_cannot_be_written_is_an_error(driver, folder):
    driver.call(Start(output_dir="gone"))
    (folder / "gone").rmdir()
    assert "could not be written" in assert_error(driver.call(Stop(), max_ticks=20_000), "internal").message
    driver.call(Start(output_dir="new"))
    assert Path(driver.call(Stop(), max_ticks=20_000).path).exists()


def test_by_default_traces_are_private(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        path = Path(driver.call(Start()).path)
        driver.call(Stop(), max_ticks=20_000)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.unlink()
    path.parent.rmdir()


def test_a_trace_begins_at_its_first_step(driver):
    started = driver.call(Start(num_steps=2, start_step=4, prefix="late"))
    driver.generate([5, 6, 7], 8)
    ended = driver.call(Stop(wait=True), max_ticks=20_000)
    assert (ended.path, ended.steps) == (started.path, 2)
    name = Path(ended.path).name
    assert name.startswith("late-caesura-") and name.endswith("-step4.trace.json.gz")
    assert operations(ended.path)
    driver.call(Start(start_step=10**6))
    assert_error(driver.call(Stop()), "invalid_request")
    driver.call(Start(start_step=1))
    assert Path(driver.call(Stop(), max_ticks=20_000).path).exists()


def test_stages_have_a_file_each_as_sglang_names_them(driver, folder):
    started = driver.call(Start(num_steps=2, stages=["prefill", "decode"], profile_id="7", prefix="p"))
    names = ["p-7-TP-0-EXTEND.trace.json.gz", "p-7-TP-0-DECODE.trace.json.gz"]
    assert started.path == ", ".join(str(folder / name) for name in names)
    assert_error(driver.call(Start()), "busy")
    stop = driver.send(Stop(wait=True))
    # Steps of one request after another, until the first file is written and decode steps come after it.
    while stop not in driver.replies:
        driver.generate([5, 6, 7], 6)
        driver.tick(8)
    ended = driver.replies[stop]
    assert ended.path == started.path
    assert 2 <= ended.steps <= 3  # the prompt is one step, and the next prompt ends the other file
    assert all(operations(str(folder / name)) for name in names)


def test_a_stage_without_steps_is_given_up_at_stop(driver, folder):
    driver.call(Start(stages=["decode"], profile_id="none"))
    assert_error(driver.call(Stop()), "invalid_request")
    driver.call(Start(stages=["decode", "prefill"], profile_id="some"))
    driver.generate([5, 6, 7], 1)
    driver.tick(2)
    ended = driver.call(Stop(), max_ticks=20_000)
    assert ended.path == str(folder / "some-TP-0-EXTEND.trace.json.gz")
