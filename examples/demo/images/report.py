"""``summary.json`` and ``report.html`` of the image demo.

Invariant: the page needs no network and no other file; its pictures stand in it.
"""

from pathlib import Path
from typing import Any

from ..report import Tile, machine, template, written
from .charts import all_charts, picture_row
from .history import ImageHistory
from .settings import ImageSettings
from .world import HELD_OUT, PROMPTS


def write_report(history: ImageHistory, settings: ImageSettings, out_dir: Path) -> Path:
    """Write ``report.html``."""
    page = template("images/report.html.j2").render(
        summary=history.summary(),
        tiles=tiles(history),
        charts=all_charts(history),
        rows=rows(history),
        history=history,
        settings=settings.as_dict(),
        machine=machine("diffusers"),
    )
    return written(page, out_dir)


def tiles(history: ImageHistory) -> list[Tile]:
    """Return the figures at the top."""
    summary = history.summary()
    return [
        Tile(
            f"{summary['reward_first']:.2f} → {summary['reward_last']:.2f}",
            "reward",
            "of pictures without noise, same prompts and seeds",
            accent=True,
        ),
        Tile(
            f"{summary['right_colour_first']:.0%} → {summary['right_colour_last']:.0%}",
            "right colour",
            f"shape {summary['right_shape_first']:.0%} → {summary['right_shape_last']:.0%}",
        ),
        Tile(
            f"{summary['held_out_colour_first']:.0%} → {summary['held_out_colour_last']:.0%}",
            "right colour, held out",
            "prompts never trained on",
        ),
        Tile(
            f"{summary['pause_ms_p50']:.1f} ms",
            "pause, median",
            f"max {summary['pause_ms_max']:.1f} ms, in the middle of trajectories",
        ),
        Tile(f"{summary['update_ms_p50']:.1f} ms", "weight update, median", f"{summary['updates']} updates"),
        Tile(
            f"{summary['trajectories_across_an_update']:,}",
            "trajectories across an update",
            f"of {summary['images']:,}",
        ),
        Tile(
            f"{summary['max_logprob_gap']:.0e}", "largest logprob gap", "engine against learner, every step"
        ),
        Tile(
            f"{summary['reserved_mb_last']:.1f} MB",
            "reserved at the end",
            f"{summary['reserved_mb_first']:.1f} after the first update",
        ),
        Tile(f"{summary['images_per_s']:.0f}", "images per second", "learner and pauses included"),
    ]


def rows(history: ImageHistory) -> list[dict[str, Any]]:
    """Return every prompt with its pictures before and after."""
    first, last = history.evals[0], history.evals[-1]
    return [
        {
            "prompt": prompt,
            "held_out": prompt in HELD_OUT,
            "before": picture_row(first, prompt),
            "after": picture_row(last, prompt),
        }
        for prompt in PROMPTS
    ]
