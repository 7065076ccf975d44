"""``report.html`` of the demo of an agent, and its charts."""

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from ..charts import BLUE, CORAL, MUTED, TEAL, VIOLET, Chart, draw_chart, finish, warmup
from ..report import Tile, engines, machine, template, written
from .episodes import Episode
from .loop import AgentHistory
from .settings import AgentSettings
from .world import number_of

SHOWN = 8
"""Held-out words in the table."""


def write_report(history: AgentHistory, settings: AgentSettings, out_dir: Path) -> Path:
    """Write ``report.html``."""
    first, last = history.evals[0], history.evals[-1]
    page = template("agent/report.html.j2").render(
        summary=history.summary(),
        tiles=tiles(history),
        charts=all_charts(history),
        rows=[
            {
                "word": before.word,
                "number": number_of(before.word),
                "before": said(before),
                "before_exact": before.exact,
                "after": said(after),
                "after_exact": after.exact,
            }
            for before, after in zip(first.episodes[:SHOWN], last.episodes[:SHOWN], strict=True)
        ],
        held_out=len(first.episodes),
        engines=engines(settings),
        history=history,
        settings=settings.as_dict(),
        machine=machine("openai"),
    )
    return written(page, out_dir)


def said(episode: Episode) -> str:
    """Return what the policy did, turn by turn."""
    return " → ".join(turn.text if turn.asked is None else f"look_up({turn.asked})" for turn in episode.turns)


def tiles(history: AgentHistory) -> list[Tile]:
    """Return the figures at the top."""
    summary = history.summary()
    return [
        Tile(
            f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}",
            "held-out answers right",
            "greedy, of words never trained on",
            accent=True,
        ),
        Tile(
            f"{summary['called_first']:.2f} → {summary['called_last']:.2f}",
            "episodes that ask the tool",
            "share of the sampled ones",
        ),
        Tile(f"{summary['turns_last']:.2f}", "turns of an episode", "at the last update"),
        Tile(
            f"{summary['turns_retokenised']}",
            "turns retokenised",
            f"{summary['turns_that_extend_their_ids']:,} of {summary['later_turns']:,} extend the ids before",
        ),
        Tile(
            f"{summary['prefix_hits']:,}",
            "prefix hits",
            f"{summary['prefix_hit_share']:.0%} of later turns' prompt tokens were cached",
        ),
        Tile(f"{summary['max_logprob_gap']:.0e}", "largest logprob gap", "engine against trainer, nats"),
        Tile(f"{summary['requests_per_s']:,.0f}", "chats per second", "trainer and SDK beside the engine"),
    ]


def all_charts(history: AgentHistory) -> dict[str, Chart]:
    """Return every chart of the report by name."""
    half = (4.7, 2.2)
    return {
        "reward": draw_chart("reward", partial(_reward, history=history), (9.6, 3.1)),
        "turns": draw_chart("turns", partial(_turns, history=history), half),
        "gap": draw_chart("gap", partial(_gap, history=history), half),
        "time": draw_chart("time", partial(_time, history=history), half),
        "warmup": draw_chart("warmup", partial(warmup, history=history), half),
    }


def _reward(axes: Axes, history: AgentHistory) -> None:
    updates = [row.update for row in history.updates]
    axes.plot(updates, [row.called for row in history.updates], color=CORAL, label="asks the tool")
    axes.plot(updates, [row.reward for row in history.updates], color=MUTED, alpha=0.6, label="reward")
    axes.plot(updates, [row.exact for row in history.updates], color=BLUE, label="sampled answers right")
    axes.plot(
        [record.update for record in history.evals],
        [record.exact for record in history.evals],
        color=TEAL,
        linewidth=2.6,
        marker="o",
        label="held out, greedy",
    )
    axes.set_ylim(0, 1.04)
    finish(axes, "share", low=None)


def _turns(axes: Axes, history: AgentHistory) -> None:
    axes.plot([row.update for row in history.updates], [row.turns for row in history.updates], color=VIOLET)
    finish(axes, "turns", low=None)


def _gap(axes: Axes, history: AgentHistory) -> None:
    rows = [(row.update, max(row.gap.first_max, row.gap.later_max)) for row in history.updates if row.gap]
    axes.semilogy([update for update, _ in rows], [gap for _, gap in rows], color=TEAL)
    finish(axes, "max |Δ logprob|, nats", low=None)


def _time(axes: Axes, history: AgentHistory) -> None:
    rows = history.updates
    axes.stackplot(
        [row.update for row in rows],
        [row.rollout_s for row in rows],
        [row.train_s for row in rows],
        [row.update_ms / 1e3 for row in rows],
        colors=[BLUE, TEAL, CORAL],
        alpha=0.8,
        labels=["episodes", "trainer", "weights"],
        linewidth=0,
    )
    finish(axes, "s")
