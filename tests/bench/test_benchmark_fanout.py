"""The model of a fan-out is what a simulation of its links says, and the benchmark measures what it names."""

import json
import math
import re
import socket
import sys
from pathlib import Path

import fanout
import pytest
from harness.fan_out_model import ROADS, FanOut, best_bucket
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

SIZES = {"weights": 64.0, "link": 2.0}


def simulated(parents: list[int], buckets: int, bucket_s: float) -> float:
    """When the last engine has the last bucket. Host 0 is the trainer; ``parents`` are those of hosts 1, 2, …

    Each host sends one bucket at a time, to its children in turn, in the order of the buckets, when it has
    the bucket.
    """
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
def test_a_chain_takes_what_its_links_take(engines, buckets, hop_s):
    update = FanOut(engines=engines, bucket=SIZES["weights"] / buckets, hop_s=hop_s, **SIZES)
    assert update.chain() == pytest.approx(simulated(list(range(engines)), buckets, update.bucket_s))


@settings(max_examples=examples(60))
@given(engines=st.integers(1, 70), buckets=st.integers(1, 30))
def test_a_tree_takes_what_its_links_take(engines, buckets):
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


def test_copies_that_leave_the_trainer():
    update = FanOut(engines=1000, bucket=1.0, hop_s=0.0, **SIZES)
    assert [update.trainer_sends(road) / update.weights for road in ROADS] == [1000, 10, 1, 1]
    assert update.seconds("one by one") > update.seconds("binomial") > update.seconds("tree")


def test_the_page_says_what_the_model_says():
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) MiB \| ([\d,.]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert [road for road, *_ in rows] == [*ROADS, "chain"]
    for road, mib, seconds, copies in rows:
        update = FanOut(weights=141e9, engines=1000, link=50e9, bucket=int(mib) * 2**20, hop_s=0.8e-3)
        assert f"{update.seconds(road):,.1f}" == seconds
        assert f"{update.trainer_sends(road) / update.weights:,.0f}" == copies
    assert round(best_bucket(141e9, 1000, 50e9, 0.8e-3) / 2**20) == int(rows[-1][1])


def test_acknowledged_bytes_are_those_that_a_connection_has_sent():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        before = fanout.acknowledged_bytes()
        sender.sendall(b"x" * 100_000)
        left = 100_000
        while left:
            left -= len(receiver.recv(left))
        receiver.sendall(b"!")  # which carries the last acknowledgement
        sender.recv(1)
        assert fanout.acknowledged_bytes() - before == pytest.approx(100_001, abs=2)


def test_a_run_measures_every_route(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    roads = ["shared", "chain", "broadcast", "clone"]
    arguments = [
        "--model", "tiny", "--engines", "1", "2", "--turns", "1", "--json", str(out), "--roads", *roads,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["fanout.py", *arguments])
    fanout.main()
    found = json.loads(out.read_text())
    sent = {road: {n: each["sent_copies"] for n, each in by.items()} for road, by in found["roads"].items()}
    for number in ("1", "2"):
        assert sent["chain"][number] == [pytest.approx(1, abs=0.1)]
        assert sent["shared"][number] == [pytest.approx(0, abs=0.1)]
    assert sent["broadcast"]["2"] == [pytest.approx(2, abs=0.1)]
    assert sent["clone"] == {"1": [pytest.approx(0, abs=0.1)], "2": []}
