"""Baselines: which figures count as slower, what an update records, and the workload at a small size."""

import json
from itertools import repeat

import check_baselines
import pytest
from check_baselines import HISTORY, RESEMBLES, WORKLOAD, Verdict
from checkpoints import write_checkpoint
from harness.yardstick import KINDS

YARDSTICKS = {"interpreter": 4.0, "product": 40.0, "copy": 5.0}


@pytest.mark.parametrize(
    "name,baseline,measured,word,regression",
    [
        ("stage.pause", 1.0, 1.5, "ok", False),
        ("stage.pause", 1.0, 1.6, "slower", False),
        ("stage.pause", 1.0, 3.1, "much slower", True),
        ("stage.decode", 1000.0, 1500.0, "ok", False),
        ("stage.decode", 1000.0, 3000.0, "slower", False),
        ("stage.decode", 1000.0, 3001.0, "much slower", True),
        ("stage.decode", 1000.0, 660.0, "faster: update?", False),
        ("stage.new", None, 5.0, "new", False),
        ("stage.gone", 5.0, None, "gone", True),
        ("images.stage.schedule", 3.0, 9.0, "slower", False),
        ("images.stage.schedule", 3.0, 9.1, "much slower", True),
        ("images.stage.decode", 100.0, 301.0, "much slower", True),
    ],
)
def test_a_verdict(name, baseline, measured, word, regression):
    verdict = Verdict(name, baseline, measured)
    assert (verdict.word, verdict.is_regression) == (word, regression)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "baselines.json"


def check(path, times, *arguments, speed=1.0):
    yardsticks = {kind: value / speed for kind, value in YARDSTICKS.items()}
    found = {name: value / speed for name, value in times.items()}, yardsticks
    return check_baselines.main(["--baselines", str(path), *arguments], lambda: repeat(found), lambda: 0.0)


@pytest.mark.parametrize("speed", [1.0, 0.3, 4.0])
def test_the_life_of_a_baseline(path, capsys, speed):
    times = {"stage.pause": 10.0, "stage.decode": 1000.0}
    assert check(path, times) == 2, "there is nothing to compare with"
    assert check(path, times, "--update", "--reason", "first") == 0
    assert check(path, {"stage.pause": 29.0, "stage.decode": 2900.0}, speed=speed) == 0
    slower = {"stage.pause": 31.0, "stage.decode": 1000.0}
    assert check(path, slower, speed=speed) == 1
    assert "much slower or gone: stage.pause" in capsys.readouterr().out
    assert json.loads(path.read_text())["history"][0]["times_ms"] == times, "a check changes nothing"
    assert check(path, slower, "--update", "--reason", "a pause does more now", speed=speed) == 0
    assert check(path, slower) == 0
    found = json.loads(path.read_text())["history"]
    assert [entry["reason"] for entry in found] == ["a pause does more now", "first"]
    assert (found[1]["times_ms"], found[1]["yardsticks_ms"]) == (times, YARDSTICKS), "the history is kept"
    assert check(path, {"stage.pause": 31.0}) == 1, "a stage that is gone"
    for number in range(HISTORY):
        assert check(path, times, "--update", "--reason", str(number)) == 0
    assert len(json.loads(path.read_text())["history"]) == HISTORY


def recorded():
    return json.loads(check_baselines.BASELINES.read_text())["history"]


def test_recorded_baselines_are_of_this_workload():
    newest = recorded()[0]
    assert newest["workload"] == WORKLOAD
    assert all(entry["reason"] for entry in recorded())
    assert set(newest["yardsticks_ms"]) == set(KINDS)
    assert RESEMBLES.keys() <= newest["times_ms"].keys()


def test_the_workload_measures_every_stage(tmp_path):
    small = {"requests": 4, "prompt_tokens": 16, "new_tokens": 8, "cycles": 2}
    small |= {"load_requests": 2, "releases": 1}
    folders = [write_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    times = check_baselines.measure(folders, WORKLOAD | small)
    known = set(recorded()[0]["times_ms"])
    assert set(times) == {name for name in known if not name.startswith("images.")}
    assert all(value >= 0 for value in times.values())
    assert times["stage.decode"] > 0


def test_the_workload_measures_every_stage_of_an_image(tmp_path):
    pytest.importorskip("diffusers")
    small = WORKLOAD["images"] | {"requests": 2, "samples": 2, "steps": 2}
    pipelines = check_baselines.image_pipelines()
    path = pipelines.write_pipeline(tmp_path / "pipeline", pipelines.SHAPES["tiny"])
    times = check_baselines.measure_images(path, WORKLOAD | {"images": small})
    assert set(times) == {name for name in recorded()[0]["times_ms"] if name.startswith("images.")}
    stages = ("encode", "denoise", "decode", "components.arrive", "components.leave")
    assert all(times[f"images.stage.{name}"] > 0 for name in stages)
