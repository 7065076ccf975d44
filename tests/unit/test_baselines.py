"""What counts as slower, what an update of the baselines records, and the workload itself at a small size."""

import json

import check_baselines
import pytest
from check_baselines import REASONS, WORKLOAD, Verdict, best_times, compare, tolerance_ms, updated
from checkpoints import write_checkpoint

MACHINE = {"cpu": "abacus", "isa": "beads", "cores": 2, "memory_gb": 0.1, "torch": "2", "python": "3"}


@pytest.mark.parametrize(
    "name,baseline,tolerance",
    [
        ("stage.schedule", 0.0, 120.0),
        ("stage.schedule", 10_000.0, 120.0),
        ("stage.update.copy", 300.0, 120.0),
        ("end_to_end.cycles", 5_000.0, 120.0),
        ("end_to_end.rollout", 5_000.0, 4_500.0),
        ("stage.decode", 0.0, 250.0),
        ("stage.decode", 277.0, 250.0),
        ("stage.decode", 278.0, 250.2),
        ("stage.decode", 2_000.0, 1_800.0),
        ("stage.prefill", 100.0, 250.0),
        ("stage.sample", 100.0, 250.0),
    ],
)
def test_the_tolerance(name, baseline, tolerance):
    assert tolerance_ms(name, baseline) == pytest.approx(tolerance)


@pytest.mark.parametrize(
    "name,baseline,measured,word,regression",
    [
        ("stage.pause", 50.0, 170.0, "ok", False),
        ("stage.pause", 50.0, 170.1, "slower", True),
        ("stage.pause", 50.0, 0.0, "ok", False),
        ("stage.pause", 500.0, 379.9, "faster: update?", False),
        ("stage.pause", 500.0, 380.0, "ok", False),
        ("stage.decode", 1000.0, 1900.0, "ok", False),
        ("stage.decode", 1000.0, 1900.1, "slower", True),
        ("stage.decode", 1000.0, 99.0, "faster: update?", False),
        ("stage.new", None, 5.0, "new", False),
        ("stage.gone", 5.0, None, "gone", True),
    ],
)
def test_a_verdict(name, baseline, measured, word, regression):
    verdict = Verdict(name, baseline, measured)
    assert (verdict.word, verdict.is_regression) == (word, regression)


def test_every_time_of_either_side_gets_a_verdict():
    found = compare({"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0})
    assert [(v.name, v.baseline, v.measured) for v in found] == [
        ("a", 1.0, None),
        ("b", 2.0, 3.0),
        ("c", None, 4.0),
    ]


def test_the_best_of_each_time_counts():
    assert best_times([{"a": 3.0, "b": 9.0}, {"a": 5.0}, {"a": 2.0, "b": 10.0}]) == {"a": 2.0, "b": 9.0}


def test_an_update_records_why_and_forgets_no_reason_before():
    first = updated({}, {"stage.decode": 1.04}, reason="the beginning", machine=MACHINE, today="2026-01-01")
    second = updated(first, {"stage.decode": 2.0}, reason="slower beads", machine=MACHINE, today="2026-02-01")
    assert first["times_ms"] == {"stage.decode": 1.0}
    assert second["times_ms"] == {"stage.decode": 2.0}
    assert [(entry["date"], entry["reason"]) for entry in second["reasons"]] == [
        ("2026-02-01", "slower beads"),
        ("2026-01-01", "the beginning"),
    ]
    assert "abacus" in second["machine"]
    for number in range(2 * REASONS):
        second = updated(second, {}, reason=str(number), machine=MACHINE, today="2026-03-01")
    assert len(second["reasons"]) == REASONS


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(check_baselines, "busy_share", lambda: 0.0)
    return tmp_path / "baselines.json"


def check(path, times, *arguments):
    return check_baselines.main(["--baselines", str(path), *arguments], measure_all=lambda repeats: times)


def test_the_life_of_a_baseline(path, capsys):
    times = {"stage.pause": 10.0, "stage.decode": 1000.0}
    assert check(path, times) == 2, "there is nothing to compare with"
    assert check(path, times, "--update", "--reason", "first") == 0
    assert check(path, {"stage.pause": 100.0, "stage.decode": 1800.0}) == 0
    slower = {"stage.pause": 131.0, "stage.decode": 1000.0}
    assert check(path, slower) == 1
    assert "slower or gone: stage.pause" in capsys.readouterr().out
    assert json.loads(path.read_text())["times_ms"] == times, "a check changes nothing"
    assert check(path, slower, "--update", "--reason", "a pause does more now") == 0
    assert check(path, slower) == 0
    found = json.loads(path.read_text())
    assert [entry["reason"] for entry in found["reasons"]] == ["a pause does more now", "first"]
    assert check(path, {"stage.pause": 131.0}) == 1, "a stage that is gone"


def test_baselines_of_another_workload_are_none(path, monkeypatch, capsys):
    assert check(path, {"stage.pause": 10.0}, "--update", "--reason", "first") == 0
    monkeypatch.setattr(check_baselines, "WORKLOAD", WORKLOAD | {"cycles": 1})
    assert check(path, {"stage.pause": 10.0}) == 2
    assert check(path, {"stage.pause": 999.0}, "--update", "--reason", "fewer cycles") == 0
    assert "slower" not in capsys.readouterr().out


def test_baselines_of_another_machine_say_so(path, monkeypatch, capsys):
    check(path, {"stage.pause": 10.0}, "--update", "--reason", "first")
    monkeypatch.setattr(check_baselines, "machine_facts", lambda: MACHINE)
    assert check(path, {"stage.pause": 10.0}) == 0
    assert "of another machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--update",),
        ("--update", "--reason", "  "),
        ("--reason", "because"),
        ("--repeats", "0"),
    ],
)
def test_an_update_needs_a_reason(path, capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        check(path, {}, *arguments)
    assert exit.value.code == 2
    assert not path.exists()


def test_the_recorded_baselines_are_of_this_workload_and_carry_a_reason():
    recorded = json.loads(check_baselines.BASELINES.read_text())
    assert recorded["workload"] == WORKLOAD
    assert recorded["reasons"][0]["reason"]
    assert {"stage.decode", "stage.pause", "stage.update.copy", "end_to_end.rollout"} <= set(
        recorded["times_ms"]
    )


def test_the_workload_measures_every_stage(tmp_path, monkeypatch):
    small = {
        "requests": 4,
        "prompt_tokens": 16,
        "new_tokens": 8,
        "cycles": 2,
        "load_requests": 2,
        "releases": 1,
    }
    monkeypatch.setattr(check_baselines, "WORKLOAD", WORKLOAD | small)
    folders = [write_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    times = check_baselines.measure(folders)
    assert set(times) == set(json.loads(check_baselines.BASELINES.read_text())["times_ms"])
    assert all(value >= 0 for value in times.values())
    assert times["stage.decode"] > 0
