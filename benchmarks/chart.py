"""The rollout benchmark as a picture: a panel per shape, a bar per engine, each with its figure and its ratio to vLLM.

Bars are to scale within a panel, never between panels: tokens per second of a tiny and of a real model differ by orders
of magnitude. What is drawn is what ``rollout.py --json`` wrote and nothing else; where files name a shape twice, the last
one counts. An engine without a figure has no bar.

The picture brings its own background, so that it looks the same on a light and on a dark page. Text stays text.

    python benchmarks/chart.py tiny.json 0.6b.json rl.json --out docs/images/throughput.svg
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from checkpoints import SHAPES
from harness.report import OURS
from harness.workload import WORKLOADS

REFERENCE = "vLLM"
"""The engine that ratios compare with."""
ENGINES = (OURS, REFERENCE, "transformers")
TIMES = "\N{MULTIPLICATION SIGN}"
RATE, COLD = "rollout, whole run", "cold start to first token"
"""Labels of the rows that are drawn (``harness/report.py``)."""
COLUMNS = (
    ("Short prompts", ("tiny", "0.6b")),
    ("RL: 8 samples of each prompt", ("rl", "rl-0.6b")),
    ("Long prompts", ("long",)),
)
MODELS = {"tiny": "Tiny model", "0.6b": "Qwen3-0.6B"}

PANEL, GUTTER, MARGIN = 236, 28, 28
HEAD, ROW_HEAD, PANEL_HEAD, ROW_FOOT = 76, 34, 40, 10
BAR, BAR_PITCH, RATIO = 11, 37, 36
FOOT = 40
INK, SOFT, LINE, PAPER, TRACK = "#1d2433", "#5d6678", "#dfe2e8", "#ffffff", "#f0f2f6"
COLOURS = {OURS: "#2f6fed", REFERENCE: "#9aa4b8", "transformers": "#c5ccd9"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Bar:
    """One engine in one panel."""

    engine: str
    value: float
    """Its length."""
    figure: str
    ratio: str
    """How many times as good as vLLM; empty where vLLM has no figure."""


@dataclass(frozen=True)
class Panel:
    """One comparison."""

    title: str
    note: str
    column: int
    bars: list[Bar]


def read_shapes(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name of the shape.

    Raises:
        ValueError: the figures come from different machines.
    """
    machines = {(result["machine"]["cpu"], result["machine"]["threads"]) for result in results}
    if len(machines) > 1:
        raise ValueError(f"figures of different machines in one picture: {sorted(machines)}")
    return {shape["shape"]: shape for result in results for shape in result["shapes"]}


def bars(shape: dict[str, Any], label: str) -> list[Bar]:
    """Of every engine that has this figure, Caesura's first."""
    row = next(row for row in shape["summary"] if row["label"] == label)
    figures: dict[str, float] = row["figures"]
    reference = figures.get(REFERENCE)
    found = []
    for engine in ENGINES:
        if (value := figures.get(engine)) is None:
            continue
        better = None if reference is None else value / reference if label == RATE else reference / value
        ratio = "" if better is None else _times(better)
        found.append(Bar(engine, value, _rate(value) if label == RATE else _seconds(value), ratio))
    return found


def panels_by_model(shapes: dict[str, dict[str, Any]]) -> dict[str, list[Panel]]:
    """A row of panels per model, in the order of columns; the cold start of its first shape closes the row."""
    rows: dict[str, list[Panel]] = {}
    for model in MODELS:
        row = []
        names = [name for name in shapes if WORKLOADS[name].model == model]
        for column, (title, members) in enumerate(COLUMNS):
            for name in (name for name in members if name in names):
                note, _, _ = shapes[name]["requests"].partition(", temperature")
                row.append(Panel(title, note, column, bars(shapes[name], RATE)))
        if row:
            first = next(name for _, members in COLUMNS for name in members if name in names)
            cold = bars(shapes[first], COLD)
            row.append(Panel("Cold start", "seconds to first token: shorter is better", len(COLUMNS), cold))
            rows[model] = row
    return rows


def draw(results: Sequence[dict[str, Any]]) -> ElementTree.Element:
    """The picture, an ``svg`` element.

    Raises:
        ValueError: nothing to draw, or figures of different machines.
    """
    rows = panels_by_model(read_shapes(results))
    if not rows:
        raise ValueError("there is no shape in these files")
    columns = sorted({panel.column for row in rows.values() for panel in row})
    width = 2 * MARGIN + len(columns) * PANEL + (len(columns) - 1) * GUTTER
    row_height = ROW_HEAD + PANEL_HEAD + len(ENGINES) * BAR_PITCH + ROW_FOOT
    height = HEAD + len(rows) * row_height + FOOT
    svg = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "role": "img",
            "font-family": FONT,
        },
    )
    ElementTree.SubElement(svg, "title").text = "Rollout throughput and cold start of CPU inference engines"
    _rect(svg, 0.5, 0.5, width - 1, height - 1, PAPER, rx="10", stroke=LINE)
    machine = results[0]["machine"]
    _text(svg, MARGIN, 38, f"Rollout throughput on {machine['threads']} CPU cores", 19, INK, weight="650")
    _text(
        svg,
        MARGIN,
        59,
        f"Tokens per second, longer is better. Bars are to scale within a panel; {TIMES} compares with {REFERENCE}.",
        12,
        SOFT,
    )
    for number, (model, row) in enumerate(rows.items()):
        top = HEAD + number * row_height
        _row_head(svg, top, width, model)
        for panel in row:
            left = MARGIN + columns.index(panel.column) * (PANEL + GUTTER)
            _panel(svg, left, top + ROW_HEAD, panel)
    foot = f"{machine['cpu']} ({machine['isa']}), {machine['threads']} threads, bf16. Medians of whole runs. {_versions(results)}"
    _text(svg, MARGIN, height - 18, foot, 11, SOFT)
    return svg


def _row_head(svg: ElementTree.Element, top: float, width: float, model: str) -> None:
    shape = SHAPES[model]
    _rect(svg, MARGIN, top, width - 2 * MARGIN, 1, LINE)
    name = _text(svg, MARGIN, top + 22, MODELS[model], 13, INK, weight="650")
    size = ElementTree.SubElement(
        name, "tspan", {"fill": SOFT, "font-weight": "400", "font-size": "11", "dx": "8"}
    )
    size.text = (
        f"{shape.num_hidden_layers} layers {TIMES} {shape.hidden_size}, vocabulary {shape.vocab_size:,}"
    )


def _panel(svg: ElementTree.Element, left: float, top: float, panel: Panel) -> None:
    _text(svg, left, top + 14, panel.title, 12.5, INK, weight="600")
    _text(svg, left, top + 29, panel.note, 10.5, SOFT)
    longest = max((bar.value for bar in panel.bars), default=1.0)
    for place, bar in enumerate(panel.bars):
        ours = bar.engine == OURS
        y = top + PANEL_HEAD + place * BAR_PITCH
        ink, weight = (INK, "600") if ours else (SOFT, "400")
        _text(svg, left, y + 10, bar.engine, 11.5, ink, weight=weight)
        end = left + PANEL - (RATIO if bar.ratio else 0)
        _text(svg, end, y + 10, bar.figure, 11.5, ink, weight=weight, anchor="end")
        if bar.ratio:
            ink, weight = (COLOURS[OURS], "700") if ours else (ink, weight)
            _text(svg, left + PANEL, y + 10, bar.ratio, 11.5, ink, weight=weight, anchor="end")
        _rect(svg, left, y + 15, PANEL, BAR, TRACK, rx="2.5")
        _rect(svg, left, y + 15, max(2.0, PANEL * bar.value / longest), BAR, COLOURS[bar.engine], rx="2.5")


def _text(
    parent: ElementTree.Element,
    x: float,
    y: float,
    content: str,
    size: float,
    colour: str,
    *,
    weight: str = "400",
    anchor: str = "start",
) -> ElementTree.Element:
    element = ElementTree.SubElement(
        parent,
        "text",
        {
            "x": f"{x:g}",
            "y": f"{y:g}",
            "font-size": f"{size:g}",
            "font-weight": weight,
            "text-anchor": anchor,
            "fill": colour,
        },
    )
    element.text = content
    return element


def _rect(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, fill: str, **more: str
) -> None:
    sizes = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:.1f}", "height": f"{height:g}", "fill": fill}
    ElementTree.SubElement(parent, "rect", sizes | more)


def _rate(value: float) -> str:
    return f"{value:,.0f} tok/s" if value >= 100 else f"{value:.1f} tok/s"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}{TIMES}" if ratio >= 10 or ratio == 1 else f"{ratio:.1f}{TIMES}"


def _versions(results: Sequence[dict[str, Any]]) -> str:
    """Of every engine's own packages, each once."""
    runs = [run for result in results for shape in result["shapes"] for run in shape["runs"]]
    found: dict[str, str] = {}
    for run in runs:
        found |= run.get("facts", {}).get("versions", {})
    return ", ".join(f"{package} {version}" for package, version in sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> None:
    """``chart.py JSON... --out SVG``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="what rollout.py --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the .svg to write")
    options = parser.parse_args(argv)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    svg = draw(results)
    ElementTree.indent(svg, " ")
    options.out.write_text(ElementTree.tostring(svg, encoding="unicode") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
