"""The report's charts, drawn by matplotlib and returned as SVG to stand inside an HTML page.

Invariant: nothing in the SVG refers outside it. XML declarations, namespaces and metadata (which are
addresses) are cut off: HTML needs none of them.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from .history import History, RunHistory

INK = "#1d2433"
MUTED = "#7b8496"
GRID = "#e6e8ee"
BLUE = "#2f6fed"
TEAL = "#0f9d8a"
CORAL = "#e8613c"
VIOLET = "#7c5cdb"
SAND = "#d9a441"

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's font, selectable
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Chart:
    """A drawing, and its legend for the page to set: (label, colour) pairs."""

    svg: str
    legend: list[tuple[str, str]]

    def __html__(self) -> Markup:
        """Return the legend and the drawing, which a template inserts as they are."""
        keys = Markup().join(
            Markup('<span><i style="background:{}"></i>{}</span>').format(colour, label)
            for label, colour in self.legend
        )
        return Markup('<div class="legend">{}</div>\n{}').format(keys, Markup(self.svg))  # noqa: S704 (ours)


def all_charts(history: History) -> dict[str, Chart]:
    """Return every chart of the report by name."""
    small = (4.7, 2.2)
    drawings: dict[str, Callable[..., None]] = {
        "reward": _reward,
        "warmup": warmup,
        "throughput": _throughput,
        "push": push,
        "memory": memory,
        "gap": _gap,
        "ess": _ess,
        "time": _time,
        "crossing": _crossing,
    }
    return {
        name: draw_chart(name, partial(draw, history=history), (9.6, 3.1) if name == "reward" else small)
        for name, draw in drawings.items()
    }


def draw_chart(name: str, draw: Callable[[Axes], None], size: tuple[float, float]) -> Chart:
    """Return what ``draw`` makes of empty axes; ``size`` is in inches."""
    # The salt keeps ids apart on one page.
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True)
    legend = [
        (label, _colour(handle)) for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    return Chart(inline_svg(stream.getvalue(), name), legend)


def _colour(handle: Any) -> str:
    """Return the colour of a line, a bar container or a filled area."""
    if hasattr(handle, "get_color"):
        return to_hex(handle.get_color())
    patch = handle.patches[0] if hasattr(handle, "patches") else handle
    face = patch.get_facecolor()
    return to_hex(face[0] if len(face) == 1 else face)


def inline_svg(text: str, label: str) -> str:
    """Return the ``<svg>`` element alone, without addresses, scaled by its container."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    return re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', text, count=1
    )


def smooth(values: Sequence[float], span: int = 5) -> list[float]:
    """Return the trailing mean over ``span`` values."""
    return [
        sum(values[max(0, end - span) : end]) / (end - max(0, end - span))
        for end in range(1, len(values) + 1)
    ]


def _updates(history: History) -> list[int]:
    return [record.update for record in history.updates]


def finish(axes: Axes, ylabel: str, *, low: float | None = 0.0) -> None:
    """Name the axes of a chart by update."""
    axes.set_xlabel("update")
    axes.set_ylabel(ylabel)
    if low is not None:
        axes.set_ylim(bottom=low)
    axes.margins(x=0.01)


def _reward(axes: Axes, history: History) -> None:
    steps = [record.update for record in history.evals]
    held_out = [record.reward for record in history.evals]
    sampled = [record.train_exact for record in history.updates]
    shaped = [record.train_reward for record in history.updates]
    axes.plot(
        _updates(history), shaped, color=MUTED, alpha=0.55, linewidth=1.1, label="training, partial credit"
    )
    axes.plot(
        _updates(history), sampled, color=BLUE, alpha=0.75, linewidth=1.3, label="training, sampled, exact"
    )
    axes.fill_between(steps, held_out, color=TEAL, alpha=0.10, linewidth=0)
    axes.plot(
        steps,
        held_out,
        color=TEAL,
        linewidth=2.6,
        marker="o",
        markersize=4.5,
        label="held out, greedy, exact",
    )
    for record, offset in ((history.evals[0], (7, -17)), (history.evals[-1], (-6, -16))):
        axes.annotate(
            f"{record.reward:.2f}",
            (record.update, record.reward),
            xytext=offset,
            textcoords="offset points",
            color=TEAL,
            fontweight="bold",
            fontsize=11,
            ha="left" if offset[0] > 0 else "right",
        )
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    finish(axes, "reward", low=None)


def warmup(axes: Axes, history: RunHistory) -> None:
    """Draw the loss and the exact share of the supervised steps."""
    steps = [progress.step for progress in history.warmup]
    axes.plot(
        steps, [progress.loss for progress in history.warmup], color=SAND, label="loss, nats per token (left)"
    )
    finish(axes, "")
    axes.set_xlabel("supervised step")
    right = axes.twinx()
    right.plot(steps, [progress.exact for progress in history.warmup], color=TEAL)
    right.set_ylim(0, 1)
    right.grid(visible=False)
    axes.plot([], [], color=TEAL, label="exact on fresh training words (right)")


def _throughput(axes: Axes, history: History) -> None:
    values = [record.tokens_per_s for record in history.updates]
    axes.plot(_updates(history), values, color=BLUE, alpha=0.25, linewidth=1.0)
    axes.plot(_updates(history), smooth(values), color=BLUE, label="tokens per second, all pauses included")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
    finish(axes, "")


def push(axes: Axes, history: Any) -> None:
    """Draw the milliseconds of each part of each update."""
    rows = history.updates
    for name, colour in (("pause", CORAL), ("update", BLUE), ("continue", TEAL)):
        values = [getattr(row, f"{name}_ms") for row in rows]
        axes.plot([row.update for row in rows], values, ".", color=colour, markersize=4, label=name)
    finish(axes, "ms")


def memory(axes: Axes, history: Any) -> None:
    """Draw the memory that is reserved at each pause, and after it."""
    rows = history.updates
    before, after = ([getattr(row, f"reserved_{when}_mb") for row in rows] for when in ("before", "after"))
    steps = [row.update for row in rows]
    axes.plot(steps, before, color=SAND, alpha=0.9, label="at the pause")
    axes.plot(steps, after, color=VIOLET, label="after the cache is emptied")
    finish(axes, "reserved MB")
    axes.set_ylim(0, 1.25 * max(*before, *after, 1e-3))


def _gap(axes: Axes, history: History) -> None:
    steps = _updates(history)
    first = [record.gap.first_max for record in history.updates]
    later = [(record.update, record.gap.later_max) for record in history.updates if record.gap.later_max > 0]
    axes.semilogy(steps, first, color=TEAL, label="first spans")
    if later:
        axes.semilogy(*zip(*later), ".", color=CORAL, markersize=4, label="later spans (mixed KV)")
    axes.axhline(1e-3, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    finish(axes, "max |Δ logprob|, nats", low=None)


def _ess(axes: Axes, history: History) -> None:
    values = [record.step.ess for record in history.updates]
    axes.plot(_updates(history), values, color=VIOLET, label="effective sample size, share")
    axes.plot(
        _updates(history),
        [record.step.entropy for record in history.updates],
        color=SAND,
        alpha=0.9,
        label="entropy, nats per token",
    )
    finish(axes, "")


def _time(axes: Axes, history: History) -> None:
    rows = history.updates
    axes.stackplot(
        _updates(history),
        smooth([row.train_s for row in rows]),
        smooth([row.verify_s for row in rows]),
        smooth([row.save_s + 1e-3 * (row.pause_ms + row.update_ms + row.continue_ms) for row in rows]),
        smooth([row.wait_s for row in rows]),
        colors=[BLUE, TEAL, CORAL, GRID],
        alpha=0.8,
        labels=["step", "check logprobs", "save and push", "wait for rollouts"],
        linewidth=0,
    )
    finish(axes, "s")


def _crossing(axes: Axes, history: History) -> None:
    rows = history.updates
    axes.bar(
        _updates(history),
        [row.held_requests for row in rows],
        width=1.0,
        color=BLUE,
        alpha=0.45,
        label="samples in mid-answer at the pause",
    )
    finish(axes, "")
