"""The update benchmarks measure what they say."""

import argparse
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fanout
import pytest
import torch
import weight_update
from checkpoints import SHAPES, write_checkpoint
from harness import engines
from harness.bare import BareGloo, BareZeroMQ, flat_bytes
from harness.fan_out_model import ROADS, FanOut, best_bucket
from harness.transports import TRANSPORTS
from harness.workload import WORKLOADS
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.rand(rows, 7, generator=generator) for name, rows in (("a", 300), ("b", 1), ("c", 41))}
        for _ in range(2)
    ]


@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("kind", ["zeromq", "gloo"])
def test_references_put_every_byte_into_its_place(weights, kind, bucket_bytes, tmp_path):
    bare = BareGloo(weights, bucket_bytes) if kind == "gloo" else BareZeroMQ(tmp_path, weights, bucket_bytes)
    try:
        for which in (0, 1):
            assert bare.seconds(which) > 0
            assert torch.equal(bare.memory, flat_bytes(weights[which]))
    finally:
        bare.close()


@pytest.mark.slow
def test_every_transport_is_measured():
    options = argparse.Namespace(
        threads=1, transports=TRANSPORTS, bucket_bytes=4 << 20, repeats=1, quantization="auto"
    )
    size = weight_update.run_model("dense", options, SHAPES["tiny"])
    assert tuple(size["rows"]) == TRANSPORTS
    for transport, row in size["rows"].items():
        assert row["update_ms"] > 0 and row["reference_ms"] > 0, transport
        assert 0 < row["copy_ms"] < row["total_ms"], transport
    # The tensor transport cannot do without the message that it came in, nor can disk without its bucket.
    assert size["rows"]["tensor"]["peak_mb"] > 1
    assert size["commit"]["commit_ms"] > 0
    assert weight_update.as_table("dense", size, 1).row_count == len(TRANSPORTS)


LENGTHS = {"prompt_tokens": 8, "new_tokens": 8, "load_new_tokens": 100}
SMALL = replace(WORKLOADS["tiny"], requests=4, rollouts=2, pause_cycles=4, updates=1, **LENGTHS)


def test_every_figure_is_measured_on_a_real_engine(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    stages: list[str] = []
    how = {"threads": 1, "repeat": 0, "log": tmp_path / "log", "progress": stages.append}
    run = engines.measure(engines.caesura(1), SMALL, folders, **how)
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


SIZES = {"weights": 64.0, "link": 2.0}


def simulated(parents: list[int], buckets: int, bucket_s: float) -> float:
    """Return the second in which the last engine has the last bucket. Host 0 is the trainer."""
    has = {0: [0.0] * buckets}
    free = [0.0] * (len(parents) + 1)
    children: dict[int, list[int]] = {}
    for child, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(child)
        has[child] = [0.0] * buckets
    waiting = [0]
    while waiting:
        host = waiting.pop(0)
        for bucket in range(buckets):
            for child in children.get(host, []):
                free[host] = max(free[host], has[host][bucket]) + bucket_s
                has[child][bucket] = free[host]
        waiting += children.get(host, [])
    return max(times[-1] for times in has.values())


@settings(max_examples=examples(60))
@given(engines=st.integers(1, 40), buckets=st.integers(1, 30), hop_s=st.floats(0, 3))
def test_a_chain_takes_as_long_as_its_links(engines, buckets, hop_s):
    update = FanOut(engines=engines, bucket=SIZES["weights"] / buckets, hop_s=hop_s, **SIZES)
    assert update.chain() == pytest.approx(simulated(list(range(engines)), buckets, update.bucket_s))


@settings(max_examples=examples(60))
@given(engines=st.integers(1, 70), buckets=st.integers(1, 30))
def test_a_tree_takes_as_long_as_its_links(engines, buckets):
    """Exactly where it is full; else at most that."""
    update = FanOut(engines=engines, bucket=SIZES["weights"] / buckets, hop_s=0.5, **SIZES)
    parents = [0, *((number + 2) // 2 for number in range(engines - 1))]
    taken = simulated(parents, buckets, update.bucket_s)
    if math.log2(engines + 1).is_integer():
        assert update.tree() == pytest.approx(taken)
    else:
        assert taken <= update.tree() + 1e-9


@settings(max_examples=examples(60))
@given(engines=st.integers(2, 2000), hop_s=st.floats(1e-3, 1.0), other=st.floats(0.1, 10.0))
def test_no_bucket_is_better_than_the_best(engines, hop_s, other):
    best = best_bucket(engines=engines, hop_s=hop_s, **SIZES)

    def chain_s(bucket: float) -> float:
        return (SIZES["weights"] / bucket + engines - 1) * (bucket / SIZES["link"] + hop_s)

    assert chain_s(best) <= chain_s(min(best * other, SIZES["weights"])) * (1 + 1e-9)


def test_the_page_agrees_with_the_model():
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) MiB \| ([\d,.]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert [road for road, *_ in rows] == [*ROADS, "chain"]
    for road, mib, seconds, copies in rows:
        update = FanOut(weights=141e9, engines=1000, link=50e9, bucket=int(mib) * 2**20, hop_s=0.8e-3)
        assert f"{update.seconds(road):,.1f}" == seconds
        assert f"{update.trainer_sends(road) / update.weights:,.0f}" == copies
    assert round(best_bucket(141e9, 1000, 50e9, 0.8e-3) / 2**20) == int(rows[-1][1])


def test_a_run_measures_every_route(tmp_path):
    out = tmp_path / "out.json"
    roads = ["shared", "chain", "broadcast", "clone"]
    arguments = [
        "--model", "tiny", "--engines", "1", "2", "--turns", "1", "--json", str(out), "--roads", *roads,
    ]  # fmt: skip
    subprocess.run([sys.executable, fanout.__file__, *arguments], check=True)
    found = json.loads(out.read_text())
    sent = {road: {n: each["sent_copies"] for n, each in by.items()} for road, by in found["roads"].items()}
    for number in ("1", "2"):
        assert sent["chain"][number] == [pytest.approx(1, abs=0.1)]
        assert sent["shared"][number] == [pytest.approx(0, abs=0.1)]
    assert sent["broadcast"]["2"] == [pytest.approx(2, abs=0.1)]
    assert sent["clone"] == {"1": [pytest.approx(0, abs=0.1)], "2": []}
