"""The rollout benchmark runs against a real scheduler and finds what it should."""

from pathlib import Path

from checkpoints import write_checkpoint
from harness import engines
from harness.workload import Workload

SMALL = Workload(
    model="tiny",
    shape="tiny",
    requests=4,
    prompt_tokens=8,
    new_tokens=8,
    rollouts=2,
    pause_cycles=4,
    updates=1,
    load_new_tokens=100,
    vocab_size=4096,
    kv_bytes_per_token=3072,
)


def test_every_figure_is_measured_on_a_real_engine(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    stages: list[str] = []
    run = engines.measure(
        engines.caesura(1),
        SMALL,
        folders,
        threads=1,
        repeat=0,
        log=tmp_path / "log",
        progress=stages.append,
    )
    assert run["error"] is None
    assert [rollout["tokens"] for rollout in run["rollouts"]] == [SMALL.requests * SMALL.new_tokens] * 2
    assert run["cold_start_s"] > 0
    assert len(run["pauses"]["pause_s"]) == SMALL.pause_cycles
    assert {name: len(times) for name, times in run["pauses"]["resume_s"].items()} == {
        "empty-cache": 2,
        "plain": 2,
    }
    assert run["pauses"]["late_tokens"] == 0
    assert run["updates"]["changed"]
    assert run["updates"]["restored"]
    assert stages == ["starting", "rollout", "pause and resume", "disk update"]
