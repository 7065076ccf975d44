"""The soaks in small: what they count is there, and what they must notice they notice."""

import asyncio
import json
from dataclasses import asdict, replace

import pytest
import soak
import torch
from checkpoints import SHAPES, write_checkpoint
from harness import soak as cycles
from harness import soak_emptying, soak_rollouts
from harness.process_memory import MB
from harness.rescore import Rescorer
from harness.transports import TRANSPORTS
from torch.overrides import TorchFunctionMode

from caesura.scheduler.memory.host import HOST

SMALL = replace(soak_emptying.SOAKED, requests=4, vocab_size=512)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [
        write_checkpoint(tmp_path_factory.mktemp("soak") / str(seed), "tiny", seed=seed) for seed in (0, 1)
    ]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPES["tiny"], num_hidden_layers=1, vocab_size=512))
    monkeypatch.setattr(soak_emptying, "SOAKED", SMALL)
    monkeypatch.setitem(
        soak_emptying.COSTED, "tiny", replace(soak_emptying.COSTED["tiny"], requests=4, vocab_size=512)
    )
    monkeypatch.setattr(cycles, "WARM_UP_BATCHES", 1)


class Made(TorchFunctionMode):
    """Notes the sizes of what ``torch.ones`` makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.sizes += args[:1] if function is torch.ones else ()
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_requests_are_in_flight_in_every_mode(mode, folders, tmp_path):
    cell = cycles.Cell(mode=mode, empty=mode == "abort")
    series = cycles.soak(SMALL, folders, range(4), cell, tmp_path)
    assert {len(values) for values in vars(series).values() if isinstance(values, list)} == {4}
    assert min(series.reserved) > 10 * MB
    assert 1 <= series.fewest_met <= SMALL.requests
    at_start = 2  # before the KV pool is sized, and when the engine is built
    assert len(cycles.read_emptyings(tmp_path / "emptyings")) == at_start + 4 * cell.empty


@pytest.mark.slow
def test_updates_are_soaked_by_each_transport(tmp_path, capsys):
    written, picture = tmp_path / "out.json", tmp_path / "plot.svg"
    asked = ["--updates", str(2 * cycles.SETTLED), "--requests", "8"]
    asked += ["--transports", "disk", "tensor", "ipc"]
    assert soak.main(["updates", *asked, "--json", str(written)]) == 0
    text = capsys.readouterr().out
    assert soak.main(["updates", "--read", str(written), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == text
    for row in ("| disk | reserved |", "| tensor | reserved |", "| tensor | shared |", "| ipc | reserved |"):
        assert row in text
    drawing = picture.read_text()
    assert "10th to last" in drawing and "tensor" in drawing
    assert len(drawing) < 100_000


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(HOST, "empty_cache"), reason="malloc is not glibc's: there is nothing to empty"
)
def test_emptying_bounds_a_fragmenting_derivation(small, tmp_path, capsys):
    count, written = 2 * cycles.SETTLED, tmp_path / "out.json"
    asked = ["--cycles", str(count), "--modes", "in_place", "--allocations", "fragmenting"]
    costs = ["--cost-cycles", "4", "--cost-shapes", "tiny"]
    assert soak.main(["emptying", *asked, *costs, "--json", str(written)]) == 0
    text, result = capsys.readouterr().out, json.loads(written.read_text())["found"]

    on, off = ({cell["step"]: cell for cell in result["soaks"]}[step] for step in ("on", "off"))
    assert len(on["reserved"]) == len(off["reserved"]) == count
    assert off["reserved"][-1] - on["reserved"][-1] > 20 * MB  # about 60
    assert abs(off["allocated"][-1] - on["allocated"][-1]) < 4 * MB  # and it is no leak
    assert on["reserved"][-1] - on["reserved"][cycles.SETTLED - 1] < 4 * MB
    assert max(on["highest"]) > max(on["reserved"]) + 10 * MB  # what each emptying returned

    (cost,) = result["costs"]
    assert cost["emptying_ms"]["count"] == cost["freed"]["count"] == 4
    assert 0 < cost["emptying_ms"]["p50"] < 100
    assert cost["freed"]["p50"] > 10 * MB
    assert {step: len(times) for step, times in cost["steps_ms"].items()} == dict.fromkeys(
        ("off", "on"), cycles.STEPS_AFTER
    )
    assert min(min(times) for times in cost["steps_ms"].values()) > 0

    tables = tmp_path / "again.md"
    soak.main(
        ["emptying", "--read", str(written), "--markdown", str(tables), "--plot", str(tmp_path / "plot.svg")]
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


def test_rollouts_score_the_same_after_every_transport(folders):
    found = asyncio.run(soak_rollouts.soak(folders, 0.12, rescored_every=5, update_every_s=0.2))
    assert set(found.updates) == set(TRANSPORTS)
    assert json.loads(json.dumps(asdict(found)))["rollouts"] == sum(found.endings.values()) > 0
    assert found.rescored_spans > found.rescored > 5, "some rollout has lived through an update"
    assert found.largest_gap < 1e-4
    assert all(len(readings) == len(found.at) for readings in found.readings.values())


def gaps(folders, *ways):
    """Return by how much the scores of four tokens differ between two ways of spans."""
    rescorer = Rescorer(dict(zip("01", folders, strict=True)))
    names = ("version", "start", "end", "stale_kv")
    spans = ([dict(zip(names, span, strict=True)) for span in way] for way in ways)
    first, second = (rescorer.logprobs([1, 2, 3], [10, 20, 30, 40], each) for each in spans)
    return [abs(a - b) for a, b in zip(first, second, strict=True)]


def test_a_span_of_the_wrong_version_does_not_score_the_same(folders):
    assert max(gaps(folders, [("0", 0, 4, False)], [("1", 0, 4, False)])) > 0.01


def test_a_stale_span_goes_on_with_the_cache_of_other_weights(folders):
    early = ("0", 0, 2, False)
    found = gaps(folders, [early, ("1", 2, 4, True)], [early, ("1", 2, 4, False)])
    assert found[:2] == [0, 0]
    assert max(found[2:]) > 1e-4
