"""The demo, quick: all of the loop against a real engine and a real trainer."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
CHILDREN = {"engine": b"caesura.scheduler", "trainer": b"spawn_main"}
"""Words of the command lines of the demo's processes."""
FIELDS = {
    "reward_first", "reward_last", "ess_min", "updates", "pause_ms_p50", "pause_ms_max", "update_ms_p50",
    "reserved_mb_first", "reserved_mb_last", "tokens_per_s", "max_logprob_gap", "requests_lost",
    "transport", "update_stages_ms",
}  # fmt: skip


def start_demo(out: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "examples"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--quick", "--out", str(out), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pid_of(demo: subprocess.Popen[str], process: str) -> int:
    if process == "demo":
        return demo.pid
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    for child in children:
        if CHILDREN[process] in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"no {process} among {children}")


def assert_ended(demo: subprocess.Popen[str], victim: str, number: int, status: int, told: str) -> None:
    """Signal a process of a run after its first update: all must end, and the demo must tell why."""
    try:
        read_until(demo, "update   0")
        engine = pid_of(demo, "engine")
        os.kill(pid_of(demo, victim), number)
        output, _ = demo.communicate()
    finally:
        demo.kill()
    assert demo.returncode == status
    assert told in output
    assert "Traceback" not in output
    eventually(lambda: not Path(f"/proc/{engine}").exists())


def read_until(demo: subprocess.Popen[str], text: str) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never printed")


def finish_demo(out: Path, *arguments: str) -> Path:
    demo = start_demo(out, *arguments)
    try:
        output, _ = demo.communicate()
    finally:
        demo.kill()
    assert demo.returncode == 0, output
    return out


def summary_in(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def summary(finished):
    return summary_in(finished)


@pytest.mark.slow
def test_summary_has_its_fields_and_nothing_was_lost(summary):
    assert set(summary) == FIELDS
    assert summary["updates"] == 6
    assert summary["requests_lost"] == 0
    assert summary["transport"] == "ipc"
    assert set(summary["update_stages_ms"]) == {"receive", "copy", "derive", "flush"}
    assert summary["update_stages_ms"]["copy"] > 0
    assert 0.0 < summary["max_logprob_gap"] <= 1e-3
    assert 0.5 < summary["ess_min"] <= 1.0
    assert 0.0 <= summary["reward_first"] <= 1.0
    assert summary["tokens_per_s"] > 0
    assert 0 < summary["pause_ms_p50"] <= summary["pause_ms_max"]
    assert summary["reserved_mb_last"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "family"), [("moe", "Qwen3-MoE"), ("mla", "DeepSeek V3")])
def test_policies_with_experts_or_latents_learn_too(tmp_path, policy, family):
    summary = summary_in(finish_demo(tmp_path, "--updates", "3", "--policy", policy))
    assert (summary["updates"], summary["requests_lost"]) == (3, 0)
    assert 0 < summary["max_logprob_gap"] < 1e-3
    assert f"-parameter {family} learns" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_every_other_transport_brings_the_weights_of_each_update(tmp_path, transport):
    summary = summary_in(finish_demo(tmp_path, "--updates", "2", "--transport", transport))
    assert (summary["transport"], summary["updates"], summary["requests_lost"]) == (transport, 2, 0)
    assert 0.0 < summary["max_logprob_gap"] <= 1e-3
    assert transport in (tmp_path / "report.html").read_text()
    assert (tmp_path / "trainer.log").read_text() == "", "the trainer process did not end well"


@pytest.mark.parametrize("transport", ["tensor", pytest.param("disk", marks=pytest.mark.long)])
def test_the_policy_learns_from_two_replicas_behind_one_port(tmp_path, transport):
    arguments = ("--updates", "2", "--replicas", "2", "--transport", transport)
    summary = summary_in(finish_demo(tmp_path, *arguments))
    assert (summary["transport"], summary["updates"], summary["requests_lost"]) == (transport, 2, 0)
    assert 0.0 < summary["max_logprob_gap"] <= 1e-3
    log = (tmp_path / "engine.log").read_text()
    assert log.count("scheduler.runtime.process: serving") == 2
    assert log.count("committed, epoch 3, version '2'") == 2
    page = (tmp_path / "report.html").read_text()
    assert "sampled, 2 engines of one thread each" in page
    assert "engines&#39; allocators together" in page
    assert "socket" not in page
    assert (tmp_path / "trainer.log").read_text() == "", "the trainer process did not end well"


@pytest.mark.slow
def test_report_needs_no_network(finished):
    page = (finished / "report.html").read_text()
    assert "<svg" in page
    assert not re.findall(r"https?:|@import|url\((?!#)|<script|<link|(?:src|href)=[\"'](?!#)", page)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine through /proc")
@pytest.mark.parametrize(
    ("victim", "number", "status", "told"),
    [
        ("engine", signal.SIGKILL, 1, "error: engine: the scheduler process was killed by signal 9"),
        ("demo", signal.SIGINT, 130, "interrupted after"),
    ],
)
def test_an_end_in_the_middle_is_told_and_leaves_no_engine(tmp_path, victim, number, status, told):
    assert_ended(start_demo(tmp_path, "--updates", "1000"), victim, number, status, told)
