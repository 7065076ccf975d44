"""The GPU benchmark runs section by section, at a toy size on the CPU, and its limits count what they say."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import Shape
from gpu import fetch_wheels
from gpu.__main__ import SECTIONS
from gpu.plan import SMOKE, step_bytes
from gpu.run import Run, Section
from gpu.session import run_session
from gpu.tables import tables
from harness.limits import Ceilings, kv_bytes_per_token, least_seconds, prefill_flops, streamed_weight_bytes
from harness.workload import WORKLOADS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu"
CONSTRAINTS = ROOT / "constraints.txt"


MADE = Shape(
    num_hidden_layers=3, hidden_size=8, intermediate_size=24, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, vocab_size=50, max_position_embeddings=64, bos_token_id=0,
    eos_token_id=1,
)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_once_but_for_a_gathered_table(tied):
    made = replace(MADE, tie_word_embeddings=tied)
    total = sum(torch.Size(size).numel() for size in made.tensor_shapes().values())
    read = streamed_weight_bytes(made, 2)
    assert read == 2 * (total if tied else total - 50 * 8), "a tied table is read as the head"
    assert kv_bytes_per_token(made, 2) == 2 * 3 * 2 * 6 * 2


def test_a_step_takes_the_slower_of_reading_and_computing():
    made = MADE
    work = replace(WORKLOADS["rl"], requests=2, samples=3, prompt_tokens=5, new_tokens=3)
    prompts, weights = prefill_flops(made, 2, 5), streamed_weight_bytes(made, 2)
    kv = kv_bytes_per_token(made, 2)
    reading = least_seconds(work, made, Ceilings(10.0, 1.0, 1e30))
    assert reading == pytest.approx((2 * weights + kv * (2 * 2 * 5 + 6 * (1 + 2))) / 10)
    computing = least_seconds(work, made, Ceilings(1e30, 1.0, 100.0))
    scores = 4 * 4 * 6 * 3 * (5 + 1 + 5 + 2)
    assert computing == pytest.approx((prompts + 6 * (2 * weights + scores)) / 100)


def test_a_hybrid_has_kv_in_each_fourth_layer():
    made, work = ARCHITECTURES["hybrid"], WORKLOADS["hybrid"]
    assert kv_bytes_per_token(made, 2) == work.kv_bytes_per_token
    without, states = replace(made, linear_key_head_dim=1), 4 * 6 * 8 * 64 * 64
    assert made.state_bytes == states == 64 * without.state_bytes
    longer, shorter = (prefill_flops(made, 1, length) for length in (2, 1))
    head = 2 * 32_000 * 512
    assert longer - 2 * (shorter - head) - head == 2 * 2 * 2 * 8 * 64
    least = least_seconds(replace(work, requests=3, new_tokens=2), made, Ceilings(10.0, 1.0, 1e30))
    kv = work.kv_bytes_per_token * 3 * (work.prompt_tokens + 1)
    assert least == pytest.approx((streamed_weight_bytes(made, 2, 3) + kv + 2 * 3 * states) / 10)


def test_one_latent_is_cached_for_all_heads():
    made = ARCHITECTURES["mla-0.2b"]
    assert kv_bytes_per_token(made, 2) == WORKLOADS["mla"].kv_bytes_per_token
    experts = 2 * 7 * 32 * 3 * 256 * 512
    everything, one = (streamed_weight_bytes(made, 2, rows) for rows in (10_000, 1))
    assert one == pytest.approx(everything - experts * 28 / 32)
    longer, shorter = (prefill_flops(made, 1, length) for length in (2, 1))
    head = 2 * 32_000 * 512
    assert longer - 2 * (shorter - head) - head == 8 * 2 * 16 * (64 + 32 + 64), (
        "one pair more than two single tokens"
    )


def test_a_step_reads_the_experts_that_its_rows_meet():
    dense, experts = SMOKE.shape, SMOKE.experts
    assert step_bytes(dense, 1) == step_bytes(dense, 64) == streamed_weight_bytes(dense, 2)
    sizes = {name: torch.Size(size).numel() for name, size in experts.tensor_shapes().items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    everything = streamed_weight_bytes(experts, 2, rows=10_000)
    share = experts.num_experts_per_tok / experts.num_experts
    assert step_bytes(experts, 1) == pytest.approx(everything - 2 * (1 - share) * of_experts)
    assert step_bytes(experts, 1000) == pytest.approx(everything)
    projections = {name: torch.Size(size).numel() for name, size in SMOKE.fp8.tensor_shapes().items()}
    quantised = sum(size for name, size in projections.items() if name.endswith("_proj.weight"))
    scales = sum(size for name, size in projections.items() if "_scale" in name)
    assert step_bytes(SMOKE.fp8, 1) == step_bytes(dense, 1) - quantised + 4 * scales


def smoking(tmp_path: Path, *sections: str) -> list[str]:
    options = ["--smoke", "--json", f"{tmp_path}/found.json", "--work-dir", f"{tmp_path}/work"]
    return [sys.executable, str(SCRIPT), *options, "--only", *sections]


def make_run(tmp_path: Path, **options: float) -> Run:
    return Run(SMOKE, torch.device("cpu"), tmp_path, tmp_path / "found.json", **options)


def test_the_next_section_runs_after_a_failure_or_a_timeout(tmp_path):
    run, never = make_run(tmp_path), threading.Event()
    run.section("breaks", Section(lambda run: 1 // 0, 60))
    run.section("hangs", Section(lambda run: never.wait(), 1))
    run.section("works", Section(lambda run: {"found": 1}, 60))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["breaks"]["error"].startswith("ZeroDivisionError")
    assert "1 // 0" in found["breaks"]["traceback"]
    assert found["hangs"]["error"] == "TimeoutError: not done after 1 s"
    assert found["works"] == {"found": 1}
    assert any("ZeroDivisionError" in cell for cell in tables(found)[-1].columns[2]._cells)


PARTS = """
import os, signal, sys, threading
from pathlib import Path
import torch
from gpu.plan import SMOKE
from gpu.run import Run, Section, read

path = Path(sys.argv[1])

def crash(run):
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(run):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()

def leave(run):
    os._exit(3)

run = Run(SMOKE, torch.device("cpu"), path.parent, path)
run.take_over(read(path))
for name, section in {
    "first": Section(lambda run: {"found": os.getpid()}, 60),
    "crashes": Section(crash, 60),
    "hangs": Section(hang, 1),
    "leaves": Section(leave, 60),
    "last": Section(lambda run: {"found": os.getpid()}, 60),
}.items():
    if name not in run.found:
        run.section(name, section)
"""


def test_sections_after_one_that_ends_the_process_run(tmp_path):
    (tmp_path / "parts.py").write_text(f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n{PARTS}")
    json_path = tmp_path / "found.json"
    command = [sys.executable, str(tmp_path / "parts.py"), str(json_path)]
    found = run_session(command, json_path, grace_s=0.2)
    assert found == json.loads(json_path.read_text())
    assert found["crashes"] == {"error": "its process was killed by SIGSEGV"}
    assert found["leaves"] == {"error": "its process ended with status 3"}
    assert found["hangs"] == {"error": "killed 0.2 s after its time was up"}
    assert found["first"]["found"] != found["last"]["found"]
    assert set(found["seconds"]) == {"first", "crashes", "hangs", "leaves", "last"}
    assert "running" not in found
    assert "error: its process was killed by SIGSEGV" in tables(found)[-1].columns[2]._cells


def test_a_further_session_runs_what_was_left_out(tmp_path):
    before = {"versions": {"found": "kept"}, "ceilings": {"left_out": "the time was up"}, "seconds": {}}
    killed = {"running": {"section": "tests", "began": 0, "until": 1, "cut": False}}
    (tmp_path / "found.json").write_text(json.dumps(before | killed))
    others = [name for name in SECTIONS if name not in ("versions", "ceilings", "tests")]
    further = [*smoking(tmp_path)[:-1], "--resume", "--skip", *others]
    subprocess.run(further, check=True, capture_output=True)
    again = json.loads((tmp_path / "found.json").read_text())
    assert again["ceilings"]["flops"] > 0
    assert again["versions"]["found"] == "kept"
    assert again["tests"] == {"error": "the session ended in it"}


def test_wheels_are_fetched_for_the_other_machine():
    line = fetch_wheels.command([Path("requirements.txt")], Path("wheels"), "3.12", "x86_64")
    assert line[line.index("--python-version") + 1] == "3.12"
    assert {"--no-deps", "--only-binary=:all:"} <= set(line)
    assert "manylinux_2_28_x86_64" in line
    pinned = {wheel.lower() for wheel in CONSTRAINTS.read_text().split()}
    lists = [SCRIPT / "requirements.txt", SCRIPT / "requirements-transformers.txt"]
    rows = [row for path in lists for row in path.read_text().splitlines()]
    wanted = {row for row in rows if row and not row.startswith("#")}
    missing = {
        row for row in wanted if row.replace("_", "-") not in {each.replace("_", "-") for each in pinned}
    }
    assert not missing, "the versions that everything else is tested with"


def smoke(tmp_path: Path, *sections: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(smoking(tmp_path, *sections), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    errors = {name: found[name] for name in sections if "error" in found[name]}
    assert not errors
    return found, done.stdout


@pytest.mark.slow
def test_the_smoke_run_covers_the_installed_parts(tmp_path):
    found, _ = smoke(tmp_path, "versions", "ceilings", "sdpa", "flashinfer", "tests")
    assert found["versions"]["packages"]["torch"] == torch.__version__
    assert found["versions"]["why_not"]["triton"]
    assert found["sdpa"]["tokens"] == 8
    assert "flashinfer" in found["flashinfer"]["why_not"]
    assert found["ceilings"]["host_to_device"] > 0
    assert found["tests"]["exit_status"] == 0


@pytest.mark.slow
def test_the_smoke_run_of_one_process(tmp_path):
    found, printed = smoke(tmp_path, "graphs", "nccl", "residency", "profile")
    for batch in ("1", "3"):
        assert found["graphs"][batch]["equal"]
        assert found["graphs"][batch]["agreed"] == found["graphs"][batch]["tokens"] == 12 * int(batch)
    assert found["residency"]["addresses_kept"]
    assert found["residency"]["outputs_kept"]
    assert found["profile"]["steps"] >= 20
    assert len(found["nccl"]["broadcast_s"]) == 2
    assert "captured against eager, 3 rows" in printed


@pytest.mark.slow
def test_the_smoke_run_of_serving(tmp_path):
    found, printed = smoke(tmp_path, "ceilings", "serving", "experts", "fp8")
    served = found["serving"]
    decoded = [found[name]["decode"] for name in ("serving", "experts", "fp8")]
    for rows in (*decoded, served["filtered"], served["raw"]):
        assert [row["batch"] for row in rows] == [1, 3]
        for row in rows:
            assert row["step_s"] != 0  # of so short runs the difference may have any sign
            assert row["share"] == pytest.approx(row["limit_s"] / row["step_s"])
            assert row["kv_tokens"] > row["batch"] * 24
    assert served["prefill"]["seconds"] > 0
    assert len(served["pauses"]["pause_s"]) == 4
    assert served["pauses"]["late_tokens"] == 0
    assert served["updates"]["changed"]
    assert served["updates"]["restored"]
    assert any("attention by" in line for line in served["engine_says"])
    assert "of the limit" in printed


@pytest.mark.slow
def test_the_smoke_run_of_updates(tmp_path):
    found, printed = smoke(tmp_path, "ceilings", "transports", "growth")
    for name in ("disk", "tensor", "ipc", "ipc-shared", "distributed"):
        row = found["transports"][name]
        assert row["share"] == pytest.approx(
            row["bytes"] / min(row["seconds"]) / found["ceilings"]["host_to_device"]
        )
    assert len(found["growth"]["reserved"]) == found["growth"]["updates"] == 14
    assert "of the link" in printed


@pytest.mark.slow
def test_the_smoke_run_of_peers(tmp_path):
    found, _ = smoke(tmp_path, "transformers", "servers")
    assert set(found["transformers"]["eager"]["step_s"]) == {"1", "3"}
    assert found["transformers"]["continuous"]["rollout_tokens_per_s"] > 0
    assert found["servers"]["vllm"] == {"left_out": "not installed"}
