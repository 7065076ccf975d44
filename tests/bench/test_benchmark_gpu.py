"""The GPU benchmark runs as a whole, at a toy size on the CPU, and its limits count what they say."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Shape
from harness.limits import (
    Ceilings,
    kv_bytes_per_token,
    least_seconds,
    prefill_flops,
    streamed_weight_bytes,
)
from harness.workload import WORKLOADS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def shape(**changes: object) -> Shape:
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return Shape(**{**sizes, **changes})


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_once_but_for_a_gathered_table(tied):
    made = shape(tie_word_embeddings=tied)
    total = sum(torch.Size(size).numel() for size in made.tensor_shapes().values())
    read = streamed_weight_bytes(made, 2)
    assert read == 2 * (total if tied else total - 50 * 8), "a tied table is read as the head"
    assert kv_bytes_per_token(made, 2) == 2 * 3 * 2 * 6 * 2


def test_prefill_counts_each_product_once():
    """By hand for one layer: projections 8 -> 24 + 12 + 12, 24 -> 8, mlp 3 * 8 * 24, scores and values, head once."""
    made = shape(num_hidden_layers=1, tie_word_embeddings=False)
    weights = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 24
    pairs = 5 * 6 // 2
    assert prefill_flops(made, 2, 5) == 2 * (2 * weights * 5 + 2 * 2 * 24 * pairs + 2 * 50 * 8)


def test_the_limit_is_the_better_bandwidth():
    assert Ceilings(2.0, 3.0, 1.0).bandwidth == 3.0


def test_a_rollout_takes_its_prompts_once_and_each_step_the_slower_of_reading_and_computing():
    made = shape()
    work = replace(WORKLOADS["rl"], requests=2, samples=3, prompt_tokens=5, new_tokens=3)
    prompts, weights = prefill_flops(made, 2, 5), streamed_weight_bytes(made, 2)
    kv = kv_bytes_per_token(made, 2)
    reading = least_seconds(work, made, Ceilings(10.0, 1.0, 1e30))
    assert reading == pytest.approx((2 * weights + kv * (2 * 2 * 5 + 6 * (1 + 2))) / 10)
    computing = least_seconds(work, made, Ceilings(1e30, 1.0, 100.0))
    scores = 4 * 4 * 6 * 3 * (5 + 1 + 5 + 2)
    assert computing == pytest.approx((prompts + 6 * (2 * weights + scores)) / 100)


def test_without_a_card_only_the_smoke_run_starts():
    if torch.cuda.is_available():
        return
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--smoke" in done.stderr


@pytest.mark.slow
def test_the_smoke_run_measures_everything(tmp_path):
    found_at = tmp_path / "found.json"
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--smoke",
            "--json",
            str(found_at),
            "--work-dir",
            str(tmp_path / "work"),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(found_at.read_text())
    assert [row["batch"] for row in found["decode"]] == [1, 3]
    for row in found["decode"]:
        assert row["share"] == pytest.approx(row["limit_s"] / row["step_s"])
        assert row["kv_tokens"] > row["batch"] * 24
    assert found["prefill"]["seconds"] > 0
    assert len(found["pauses"]["pause_s"]) == 4
    assert found["pauses"]["late_tokens"] == 0
    assert found["updates"]["changed"]
    assert found["updates"]["restored"]
    assert len(found["growth"]["reserved"]) == found["growth"]["updates"] == 14
    assert set(found["transformers"]["eager"]["step_s"]) == {"1", "3"}
    assert found["transformers"]["continuous"]["rollout_tokens_per_s"] > 0
    assert any("attention by" in line for line in found["engine_says"])
    assert "of the limit" in done.stdout
