"""The update benchmarks measure what they say."""

import argparse
import os

import pytest
import torch
import weight_update
from checkpoints import SHAPES
from harness.bare import BareGloo, BareZeroMQ, flat_bytes
from harness.process_memory import MB, read_memory, reset_peak
from harness.transports import TRANSPORTS


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


def test_a_peak_is_seen_after_it_has_passed_and_forgotten_at_a_reset():
    pid = os.getpid()
    reset_peak(pid)
    before = read_memory(pid).resident
    block = bytearray(64 * MB)
    del block
    after = read_memory(pid)
    assert after.peak - before >= 60 * MB > after.resident - before
    reset_peak(pid)
    assert read_memory(pid).peak - before < 60 * MB


@pytest.mark.slow
def test_every_transport_is_measured(monkeypatch):
    monkeypatch.setitem(weight_update.MODELS, "dense", SHAPES["tiny"])
    options = argparse.Namespace(threads=1, transports=TRANSPORTS, bucket_bytes=4 << 20, repeats=1)
    size = weight_update.run_model("dense", options)
    assert tuple(size["rows"]) == TRANSPORTS
    for transport, row in size["rows"].items():
        assert row["update_ms"] > 0 and row["reference_ms"] > 0, transport
        assert 0 < row["copy_ms"] < row["total_ms"], transport
    # The tensor transport cannot do without the message that it came in, nor can disk without its bucket.
    assert size["rows"]["tensor"]["peak_mb"] > 1
    assert size["commit"]["commit_ms"] > 0
    assert weight_update.as_table("dense", size, 1).row_count == len(TRANSPORTS)
