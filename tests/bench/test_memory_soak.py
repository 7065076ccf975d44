"""The soak shows what it is for: without the empty-cache step a fragmenting derivation makes memory grow, with it none does."""

import json
from dataclasses import replace

import memory_soak
import pytest
import torch
from checkpoints import SHAPES, write_checkpoint
from harness import soak
from harness.load import Around, Feeder
from harness.process_memory import MB
from harness.soak_engine import SCRATCH_TENSORS, SURVIVOR_BYTES, SURVIVORS, SURVIVORS_REPLACED, Scratch
from memory_over_updates import SETTLED

from caesura.io_struct import BatchTokenOutput, StreamDelta, encode
from caesura.scheduler.memory.host import HOST

SMALL = replace(memory_soak.SOAKED, requests=4, vocab_size=512)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], num_hidden_layers=1, vocab_size=512))
    monkeypatch.setattr(memory_soak, "SOAKED", SMALL)
    monkeypatch.setitem(
        memory_soak.COSTED, "tiny", replace(memory_soak.COSTED["tiny"], requests=4, vocab_size=512)
    )
    monkeypatch.setattr(soak, "WARM_UP_BATCHES", 1)


def test_growth_is_counted_from_the_tenth_cycle():
    values = [1000, *[0] * 9, *range(1, 31)]
    assert memory_soak.growth(values) == {"total": 30, "second_half": 20, "per_thousand": 1000}
    assert memory_soak.growth([7] * 20) == {"total": 0, "second_half": 0, "per_thousand": 0}


def test_figures_have_a_sign_and_zero_has_one_only():
    assert [memory_soak.signed(value) for value in (1.25, -0.04, -3.0)] == [
        "+1.2",
        "+0.0",
        "\N{MINUS SIGN}3.0",
    ]


def test_scratch_memory_is_of_many_sizes_and_never_leaks(monkeypatch):
    made = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda nbytes, **how: made.append(nbytes) or ones(nbytes, **how))
    scratch = Scratch(torch.device("cpu"), seed=0)
    for _ in range(5):
        made.clear()
        before = {tensor.data_ptr() for tensor in scratch._survivors}
        scratch.churn()
        assert len(made) == SCRATCH_TENSORS + SURVIVORS_REPLACED
        assert len(set(made)) > SCRATCH_TENSORS
        assert min(made) < 128 << 10 < 1 * MB < max(made)  # glibc serves the two kinds differently
        alive = {tensor.data_ptr() for tensor in scratch._survivors}
        assert len(alive) == SURVIVORS
        assert 0 < len(alive - before) <= SURVIVORS_REPLACED
        assert sum(tensor.nbytes for tensor in scratch._survivors) <= SURVIVORS * SURVIVOR_BYTES


def test_as_many_steps_follow_as_were_asked_for():
    def tokens(step):
        delta = StreamDelta(rids=[], indices=b"", starts=b"", counts=b"", tokens=b"", logprobs=b"")
        return encode(BatchTokenOutput(step=step, delta=delta, finished=[]))

    class Nobody:
        def send(self, frame):
            pass

    feeder = Feeder(Nobody(), SMALL, seed=0)
    for step in (4, 5, 7):
        feeder.take(tokens(step), float(step))
    feeder.ask(Around(4, 3))
    assert feeder.answer() is None
    feeder.take(tokens(8), 8.0)
    assert feeder.answer() == (((4, 4.0), (5, 5.0), (7, 7.0), (8, 8.0)),)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_requests_are_in_flight_in_every_mode(mode, tmp_path):
    folders = [write_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    options, empty = soak.EngineOptions(), mode == "abort"
    series = soak.soak(mode, SMALL, folders, range(4), options, empty=empty, fragment=False, scratch=tmp_path)
    assert len(series.reserved) == len(series.highest) == len(series.allocated) == 4
    assert min(series.reserved) > 10 * MB
    assert 1 <= series.fewest_met <= SMALL.requests
    at_start = 1  # before the KV pool is sized
    assert len(soak.read_emptyings(tmp_path / "emptyings")) == at_start + 4 * empty


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(HOST, "empty_cache"), reason="malloc is not glibc's: there is nothing to empty"
)
def test_a_fragmenting_derivation_grows_memory_unless_the_cache_is_emptied(tmp_path, capsys):
    cycles, written = 2 * SETTLED, tmp_path / "out.json"
    asked = ["--cycles", str(cycles), "--modes", "in_place", "--allocations", "fragmenting"]
    costs = ["--cost-cycles", "4", "--cost-shapes", "tiny"]
    assert memory_soak.main([*asked, *costs, "--json", str(written)]) == 0
    text, result = capsys.readouterr().out, json.loads(written.read_text())

    on, off = ({cell["step"]: cell for cell in result["soaks"]}[step] for step in ("on", "off"))
    assert len(on["reserved"]) == len(off["reserved"]) == cycles
    assert off["reserved"][-1] - on["reserved"][-1] > 20 * MB  # about 60
    assert abs(off["allocated"][-1] - on["allocated"][-1]) < 4 * MB  # and it is no leak
    assert on["reserved"][-1] - on["reserved"][SETTLED - 1] < 4 * MB
    assert max(on["highest"]) > max(on["reserved"]) + 10 * MB  # what each emptying returned

    (cost,) = result["costs"]
    assert cost["emptying_ms"]["count"] == cost["freed"]["count"] == 4
    assert 0 < cost["emptying_ms"]["p50"] < 100
    assert cost["freed"]["p50"] > 10 * MB
    assert {step: len(times) for step, times in cost["steps_ms"].items()} == dict.fromkeys(
        ("off", "on"), soak.STEPS_AFTER
    )
    assert min(min(times) for times in cost["steps_ms"].values()) > 0

    tables = tmp_path / "again.md"
    memory_soak.main(
        ["--read", str(written), "--markdown", str(tables), "--plot", str(tmp_path / "plot.svg")]
    )
    assert tables.read_text() + "\n" == capsys.readouterr().out == text
    for row in (
        "| fragmenting | `in_place` | on |",
        "| fragmenting | `in_place` | off |",
        "| tiny | fragmenting |",
    ):
        assert row in text
    assert "with the empty-cache step" in (drawing := (tmp_path / "plot.svg").read_text())
    assert len(drawing) < 100_000
