"""``report.html`` of the demo of adapters, and its charts."""

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from .. import task
from ..charts import BLUE, CORAL, MUTED, SAND, TEAL, VIOLET, Chart, draw_chart, finish, warmup
from ..report import Tile, engines, exemplar, machine, shown, shown_words, template, written
from ..settings import LoraSettings
from .history import LoraHistory

COLOURS = dict(zip(task.TARGETS, (BLUE, TEAL, CORAL, VIOLET, SAND), strict=False))
"""Colour of each adapter, in every chart."""
FATES = {
    "finish_old": "end with the version that they began with",
    "retract": "go on with the new one, and their KV is computed again",
    "keep": "go on with the new one over the KV that they have",
}
"""Words of the page for samples in mid-answer at a swap."""


def write_report(history: LoraHistory, settings: LoraSettings, out_dir: Path) -> Path:
    """Write ``report.html``."""
    firsts = {name: each.evals[0] for name, each in history.adapters.items()}
    lasts = {name: each.evals[-1] for name, each in history.adapters.items()}
    words = shown_words(next(iter(firsts.values())))
    page = template("lora/report.html.j2").render(
        summary=history.summary(),
        tiles=tiles(history),
        charts=all_charts(history),
        rows=[
            {
                "word": word,
                "base": shown(next(iter(firsts.values())).answers[word]),
                "answers": [
                    (shown(last.answers[word]), task.is_exact(word, last.answers[word], name))
                    for name, last in lasts.items()
                ],
            }
            for word in words
        ],
        rewards=history.rewards_by_target(),
        colours=COLOURS,
        exemplar=exemplar(max((each.exemplar for each in history.adapters.values()), key=_spans)),
        fate=FATES[settings.on_running],
        engines=engines(settings),
        tokens_checked=sum(row.gap.first_tokens + row.gap.later_tokens for row in history.turns()),
        held_out=len(next(iter(firsts.values())).answers),
        history=history,
        settings=settings.as_dict(),
        machine=machine(),
    )
    return written(page, out_dir)


def _spans(found: Any) -> int:
    return 0 if found is None else len(found[1].spans)


def tiles(history: LoraHistory) -> list[Tile]:
    """Return the figures at the top."""
    summary = history.summary()
    counts = [each.counts for each in history.adapters.values()]
    sampled = sum(each.finished for each in counts)
    return [
        Tile(
            f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}",
            "held-out reward",
            f"mean of {len(counts)} adapters, each by its own target",
            accent=True,
        ),
        Tile(
            f"{summary['samples_of_another_adapter']}",
            "samples of another adapter",
            f"of {sampled:,}, by the adapter that each span names",
        ),
        Tile(f"{summary['swaps']}", "swaps while serving", "each adapter on its own, no pause"),
        Tile(
            f"{summary['swap_ms_p50']:.1f} ms",
            f"swap by {history.transport}, median",
            f"max {summary['swap_ms_max']:.0f} ms, as the trainer waits",
        ),
        Tile(
            f"{max(summary['max_logprob_gap'], summary['max_logprob_gap_later']):.0e}",
            "largest logprob gap",
            "engine against trainer, nats",
        ),
        Tile(f"{sum(each.crossed for each in counts):,}", "answers across a swap", f"of {sampled:,} sampled"),
        Tile(f"{summary['tokens_per_s']:,.0f}", "tokens per second", "all adapters, trainers beside"),
        Tile(
            f"{history.adapter_parameters:,}",
            "parameters an adapter",
            f"{history.adapter_parameters / history.parameters:.0%} of the base's {history.parameters:,}",
        ),
        Tile(f"{summary['requests_lost']}", "requests lost", f"of {_submitted(history):,} submitted"),
    ]


def _submitted(history: LoraHistory) -> int:
    return sum(each.ledger.submitted for each in history.adapters.values())


def all_charts(history: LoraHistory) -> dict[str, Chart]:
    """Return every chart of the report by name."""
    wide, half = (9.6, 3.1), (4.7, 2.2)
    of_turns = {
        "swap": (lambda row: row.update_ms, "ms"),
        "norm": (lambda row: row.norm, ""),
        "switched": (lambda row: row.switched, "samples"),
        "ess": (lambda row: row.step.ess, ""),
    }
    return {
        "reward": draw_chart("reward", partial(_reward, history=history), wide),
        "epochs": draw_chart("epochs", partial(_epochs, history=history), (9.6, 1.9)),
        "gap": draw_chart("gap", partial(_gap, history=history), half),
        "warmup": draw_chart("warmup", partial(warmup, history=history), half),
        **{
            name: draw_chart(name, partial(_turns, history=history, value=value, unit=unit), half)
            for name, (value, unit) in of_turns.items()
        },
    }


def _reward(axes: Axes, history: LoraHistory) -> None:
    for name, each in history.adapters.items():
        axes.plot(
            [row.update for row in each.updates],
            [row.train_exact for row in each.updates],
            color=COLOURS[name],
            alpha=0.35,
            linewidth=1.1,
        )
        axes.plot(
            [record.update for record in each.evals],
            [record.reward for record in each.evals],
            color=COLOURS[name],
            linewidth=2.4,
            marker="o",
            markersize=4.5,
            label=name,
        )
    axes.set_ylim(0, 1.04)
    finish(axes, "reward", low=None)


def _epochs(axes: Axes, history: LoraHistory) -> None:
    for place, (name, each) in enumerate(history.adapters.items()):
        seconds = [row.at_s for row in each.updates]
        marks = [-place] * len(seconds)
        axes.plot(seconds, marks, "|", color=COLOURS[name], markersize=15, markeredgewidth=1.3, label=name)
        for row in each.updates[::10]:
            axes.annotate(
                f"{row.adapter_epoch}",
                (row.at_s, -place),
                xytext=(0, 10),
                textcoords="offset points",
                color=COLOURS[name],
                fontsize=8,
                ha="center",
            )
    axes.set_ylim(0.6 - len(history.adapters), 0.6)
    axes.set_yticks([])
    finish(axes, "", low=None)
    axes.set_xlabel("seconds")


def _turns(axes: Axes, history: LoraHistory, value: Any, unit: str) -> None:
    for name, each in history.adapters.items():
        rows, style = each.updates, "." if unit == "ms" else "-"
        axes.plot(
            [row.update for row in rows],
            [value(row) for row in rows],
            style,
            color=COLOURS[name],
            markersize=4,
            label=name,
        )
    finish(axes, unit)


def _gap(axes: Axes, history: LoraHistory) -> None:
    for name, each in history.adapters.items():
        axes.semilogy(
            [row.update for row in each.updates],
            [max(row.gap.first_max, row.gap.later_max) for row in each.updates],
            color=COLOURS[name],
            label=name,
        )
    axes.axhline(1e-3, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    finish(axes, "max |Δ logprob|, nats", low=None)
