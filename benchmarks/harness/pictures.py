"""Pictures by matplotlib: one style, and grids of panels with lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INK, SOFT, RULE = "#1d2433", "#5d6678", "#dfe2e8"
LINE, SECOND_LINE = "#2f6fed", "#c2571a"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "caesura",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": SOFT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e6e8ee",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "lines.linewidth": 1.4,
}
POINTS = 250
"""Points of a line that are drawn, about."""


@dataclass
class Panel:
    """Axes with lines: (x, y, colour, label) each, and notes in the lower left corner: (text, colour)."""

    title: str = ""
    ylabel: str = ""
    ylim: tuple[float, float] = (0, 1)
    lines: list[tuple[Sequence[float], Sequence[float], str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def draw_grid(rows: Sequence[Sequence[Panel]], path: Path, *, xlabel: str, row_height: float = 1.9) -> None:
    """Draw rows of panels that share their axes; a legend stands below if lines have labels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 0.8 + row_height * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(rows[0]), sharex=True, sharey="row", squeeze=False)
        for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
            for x, y, colour, label in panel.lines:
                shown = slice(None, None, max(1, len(x) // POINTS))
                axes.plot(x[shown], y[shown], color=colour, label=label)
                axes.set_xlim(0, x[-1])
                axes.set_xticks([0, x[-1] / 2, x[-1]], [f"{share * x[-1]:.4g}" for share in (0, 0.5, 1)])
            axes.set_ylim(*panel.ylim)
            axes.set_ylabel(panel.ylabel)
            axes.set_title(panel.title, loc="left", fontsize=10)
            for number, (text, colour) in enumerate(panel.notes):
                axes.annotate(
                    text, (0.04, 0.05 + 0.11 * number), xycoords="axes fraction", color=colour, fontsize=8.5
                )
        for axes in grid[-1]:
            axes.set_xlabel(xlabel)
        handles, labels = grid[0][0].get_legend_handles_labels()
        if any(labels):
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        save(figure, path)


def save(figure: Any, path: Path, title: str | None = None) -> None:
    """Write a figure in the format of the suffix, without a date."""
    metadata = {"Date": None, **({"Title": title} if title else {})} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=150)
