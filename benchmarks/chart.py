"""The rollout benchmark as a picture: a panel per shape, a bar per engine, each with its figure and its ratio
to vLLM.

Bars are to scale within a panel, never between panels: tokens per second of a tiny and of a real model differ
by orders of magnitude. What is drawn is what ``rollout.py --json`` wrote and nothing else; where files name a
shape twice, the last one counts. An engine without a figure has no bar. The picture brings its own background
for light and dark pages.

    python benchmarks/chart.py tiny.json 0.6b.json rl.json --out docs/images/throughput.svg
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from checkpoints import SHAPES
from harness.pictures import INK, LINE, RULE, SOFT, STYLE, save
from harness.report import OURS
from harness.workload import WORKLOADS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

REFERENCE = "vLLM"
"""The engine that ratios compare with."""
ENGINES = (OURS, "OpenVINO", REFERENCE, "transformers")
COLOURS = {OURS: LINE, "OpenVINO": "#8592ab", REFERENCE: "#9aa4b8", "transformers": "#c5ccd9"}
TRACK = "#f0f2f6"
TIMES = "\N{MULTIPLICATION SIGN}"
RATE, COLD = "rollout, whole run", "cold start to first token"
"""Labels of the rows that are drawn (``harness/report.py``)."""
COLUMNS = (
    ("Short prompts", ("tiny", "0.6b")),
    ("RL: 8 samples of each prompt", ("rl", "rl-0.6b")),
    ("Long prompts", ("long",)),
)
MODELS = {"tiny": "Tiny model", "0.6b": "Qwen3-0.6B"}


@dataclass(frozen=True)
class Bar:
    """One engine in one panel."""

    engine: str
    value: float
    """Length of the bar."""
    figure: str
    ratio: str
    """Ratio to vLLM's figure, as text, above 1 where better; empty without a figure of vLLM."""


@dataclass(frozen=True)
class Panel:
    """One comparison."""

    title: str
    note: str
    column: int
    bars: list[Bar]


def read_shapes(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the results by name of the shape.

    Raises:
        ValueError: the figures come from different machines.
    """
    machines = {(result["machine"]["cpu"], result["machine"]["threads"]) for result in results}
    if len(machines) > 1:
        raise ValueError(f"figures of different machines in one picture: {sorted(machines)}")
    return {shape["shape"]: shape for result in results for shape in result["shapes"]}


def bars(shape: dict[str, Any], label: str) -> list[Bar]:
    """Return a bar for every engine that has this figure, Caesura's first."""
    row = next(row for row in shape["summary"] if row["label"] == label)
    figures: dict[str, float] = row["figures"]
    reference = figures.get(REFERENCE)
    found = []
    for engine in ENGINES:
        if (value := figures.get(engine)) is None:
            continue
        better = None if reference is None else value / reference if label == RATE else reference / value
        unit = "tok/s" if label == RATE else "s"
        figure = f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
        found.append(Bar(engine, value, figure, "" if better is None else _times(better)))
    return found


def _times(ratio: float) -> str:
    return f"{ratio:.0f}{TIMES}" if ratio >= 10 or ratio == 1 else f"{ratio:.1f}{TIMES}"


def panels_by_model(shapes: dict[str, dict[str, Any]]) -> dict[str, list[Panel]]:
    """Return a row of panels per model; the cold start of its first shape closes the row."""
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


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Return the picture.

    Raises:
        ValueError: there is nothing to draw, or the figures are of different machines.
    """
    rows = panels_by_model(read_shapes(results))
    if not rows:
        raise ValueError("there is no shape in these files")
    columns = sorted({panel.column for row in rows.values() for panel in row})
    figure = Figure(figsize=(0.5 + 2.75 * len(columns), 1.3 + 2.3 * len(rows)))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.3 / width,
        right=1 - 0.3 / width,
        top=1 - 1.65 / height,
        bottom=0.65 / height,
        wspace=0.12,
        hspace=0.75,
    )
    machine = results[0]["machine"]

    def text(inches_down: float, content: str, size: float, colour: str, weight: str = "normal") -> None:
        figure.text(
            0.3 / width, 1 - inches_down / height, content, size=size, color=colour, weight=weight, va="top"
        )

    text(0.22, f"Rollout throughput on {machine['threads']} CPU cores", 14, INK, "bold")
    text(
        0.52,
        f"Tokens per second, longer is better. Bars are to scale; {TIMES} compares with {REFERENCE}.",
        9,
        SOFT,
    )
    for (model, row), line in zip(rows.items(), grid, strict=True):
        for axes in line:
            axes.set_axis_off()
        shape = SHAPES[model]
        size = (
            f"{shape.num_hidden_layers} layers {TIMES} {shape.hidden_size}, vocabulary {shape.vocab_size:,}"
        )
        line[0].text(
            0,
            1.47,
            f"{MODELS[model]}, {size}",
            transform=line[0].transAxes,
            size=10,
            weight="bold",
            color=INK,
        )
        for panel in row:
            _panel(line[columns.index(panel.column)], panel)
    foot = f"{machine['cpu']} ({machine['isa']}), {machine['threads']} threads, bf16. Medians of whole runs."
    text(height - 0.45, foot, 8, SOFT)
    text(height - 0.28, _versions(results), 8, SOFT)
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    axes.text(0, 1.22, panel.title, transform=axes.transAxes, size=9.5, weight="bold", color=INK)
    axes.text(0, 1.06, panel.note, transform=axes.transAxes, size=8, color=SOFT)
    longest = max((bar.value for bar in panel.bars), default=1.0)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(ENGINES) - 0.4, -0.6)
    for place, bar in enumerate(panel.bars):
        ours = bar.engine == OURS
        ink, weight = (INK, "bold") if ours else (SOFT, "normal")
        axes.barh(place + 0.15, 1, 0.28, color=TRACK)
        axes.barh(place + 0.15, max(0.01, bar.value / longest), 0.28, color=COLOURS[bar.engine])
        axes.text(0, place - 0.1, bar.engine, size=9, color=ink, weight=weight)
        axes.text(
            0.84 if bar.ratio else 1, place - 0.1, bar.figure, size=9, color=ink, weight=weight, ha="right"
        )
        if bar.ratio:
            axes.text(
                1, place - 0.1, bar.ratio, size=9, color=LINE if ours else ink, weight=weight, ha="right"
            )


def _versions(results: Sequence[dict[str, Any]]) -> str:
    runs = [run for result in results for shape in result["shapes"] for run in shape["runs"]]
    found: dict[str, str] = {}
    for run in runs:
        found |= run.get("facts", {}).get("versions", {})
    return ", ".join(f"{package} {version}" for package, version in sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="what rollout.py --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the .svg or .png to write")
    options = parser.parse_args(argv)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    with mpl.rc_context(STYLE | {"figure.edgecolor": RULE}):  # type: ignore[arg-type]
        save(draw(results), options.out, f"Rollout throughput on {results[0]['machine']['cpu']}")


if __name__ == "__main__":
    main()
