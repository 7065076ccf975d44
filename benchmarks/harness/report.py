"""Tables for people: medians and ratios of what the runs returned.

A ratio above 1 always means that Caesura is better: for a rate it is ours over theirs, for a time theirs over
ours.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .script import QUIET
from .workload import Workload

DASH = "–"  # noqa: RUF001 (an en dash is what tables use for "no figure")
OURS = "Caesura"
Run = dict[str, Any]
Values = list[float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. ``values`` pools one engine's runs; ``reduce`` makes the figure."""

    label: str
    values: Callable[[Sequence[Run]], Values]
    render: Callable[[float], str]
    reduce: Callable[[Values], float] = statistics.median
    higher_is_better: bool = False
    compare: bool = True


def _seconds(value: float) -> str:
    if value >= 10:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:,.0f} tok/s" if value >= 1000 else f"{value:.1f} tok/s"


def _throughput(runs: Sequence[Run]) -> Values:
    return [rollout["tokens"] / rollout["seconds"] for run in runs for rollout in run["rollouts"]]


def _cold(first: bool) -> Callable[[Sequence[Run]], Values]:
    return lambda runs: [
        run["cold_start_s"] for run in runs if "cold_start_s" in run and (run["repeat"] == 0) == first
    ]


def _of(part: str, key: str) -> Callable[[Sequence[Run]], Values]:
    return lambda runs: [value for run in runs if run.get(part) for value in run[part][key]]


def _resume(empty_cache: bool) -> Callable[[Sequence[Run]], Values]:
    """Compare engines with a single way to resume on the row without the empty-cache step."""
    wanted = ("empty-cache",) if empty_cache else ("plain", "resume")

    def values(runs: Sequence[Run]) -> Values:
        variants = [run["pauses"]["resume_s"] for run in runs if run.get("pauses")]
        return [value for found in variants for name in wanted for value in found.get(name, [])]

    return values


ROWS = (
    Row(label="rollout, whole run", values=_throughput, render=_rate, higher_is_better=True),
    Row(label="cold start to first token", values=_cold(first=True), render=_seconds),
    Row(label="  again, with compile caches", values=_cold(first=False), render=_seconds),
    Row(label="step under load, p50", values=_of("pauses", "step_s"), render=_seconds, compare=False),
    Row(label="pause acknowledged, p50", values=_of("pauses", "pause_s"), render=_seconds),
    Row(label="pause acknowledged, max", values=_of("pauses", "pause_s"), render=_seconds, reduce=max),
    Row(label="resume to next token, p50", values=_resume(False), render=_seconds),
    Row(label="  with the empty-cache step", values=_resume(True), render=_seconds),
    Row(label="disk update, p50", values=_of("updates", "update_s"), render=_seconds),
    Row(label="pause, update, resume to next token", values=_of("updates", "gap_s"), render=_seconds),
)


def summarise(runs: Sequence[Run], engines: Sequence[str]) -> list[dict[str, Any]]:
    """Return per row the label, ``figures`` and ``counts`` by engine, and Caesura's ``ratios``."""
    summary = []
    for row in ROWS:
        values = {name: row.values([run for run in runs if run["engine"] == name]) for name in engines}
        figures = {name: row.reduce(found) for name, found in values.items() if found}
        ratios = {}
        if row.compare and OURS in figures:
            for name, figure in figures.items():
                if name != OURS:
                    better, worse = (
                        (figures[OURS], figure) if row.higher_is_better else (figure, figures[OURS])
                    )
                    ratios[name] = better / worse
        counts = {name: len(found) for name, found in values.items()}
        ranges = {name: [min(found), max(found)] for name, found in values.items() if found}
        summary.append(
            {"label": row.label, "figures": figures, "ranges": ranges, "counts": counts, "ratios": ratios}
        )
    return summary


def table(workload: Workload, runs: Sequence[Run], engines: Sequence[str], least_s: float) -> Table:
    """Return the table of one shape; in brackets the number of measurements behind a figure."""
    grid = Table(title=f"{workload.shape}: {workload.describe()}", title_justify="left")
    grid.add_column("", no_wrap=True)
    others = [name for name in engines if name != OURS]
    for name in engines:
        grid.add_column(name, justify="right")
    if OURS in engines:
        for name in others:
            grid.add_column(f"vs {name}", justify="right", style="bold")
    for row, entry in zip(ROWS, summarise(runs, engines), strict=True):
        figures, counts, ratios = entry["figures"], entry["counts"], entry["ratios"]
        cells = [
            f"{row.render(figures[name])} [dim]({counts[name]})[/dim]" if name in figures else DASH
            for name in engines
        ]
        if OURS in engines:
            cells += [f"{ratios[name]:.2f}x" if name in ratios else DASH for name in others]
        grid.add_row(row.label, *cells)
        if row is ROWS[0]:
            limit = workload.tokens / least_s
            shares = [f"{figures[name] / limit:.0%}" if name in figures else DASH for name in engines]
            grid.add_row(f"  of the limit, {_rate(limit)}", *shares, *([DASH] * (len(cells) - len(shares))))
    return grid


@dataclass(frozen=True)
class Note:
    """A line under the table."""

    text: str
    alarming: bool = False
    """True if something failed or cannot be right."""


def footnotes(workload: Workload, runs: Sequence[Run], reference: dict[str, float]) -> list[Note]:
    """Explain missing figures and conditions, and report everything that looked wrong."""
    size, floor = reference["bytes"], reference["seconds"]
    notes = [
        Note(
            f"A plain read + copy of the same {size / 2**20:,.0f} MB takes {_seconds(floor)} "
            f"({size / floor / 1e9:.1f} GB/s)."
        ),
        Note(
            "Pauses: in_place (vLLM: keep, whose call ends with a sleep of 20 ms of its own), asked for at a "
            "random phase of a step. In brackets: measurements behind the figure."
        ),
    ]
    busy = max(run["busy_before"] for run in runs)
    if busy > QUIET:
        notes.append(
            Note(f"Other processes used up to {busy:.0%} of the cores: all figures are suspect.", True)
        )
    for name in dict.fromkeys(run["engine"] for run in runs):
        mine = [run for run in runs if run["engine"] == name]
        notes += [*_what_it_is(name, mine), *_what_is_wrong(name, mine, workload)]
    return notes


def _what_it_is(name: str, runs: Sequence[Run]) -> list[Note]:
    facts: dict[str, Any] = next((run["facts"] for run in runs if "facts" in run), {})
    parts = [f"{package} {number}" for package, number in facts.get("versions", {}).items()]
    parts += [f"{key}={value}" for key, value in facts.get("settings", {}).items()]
    parts += [f"{library} preloaded" for library in facts.get("preloaded", [])]
    notes = [Note(f"{name}: {', '.join(parts)}.")] if parts else []
    reasons = {run["no_pause_reason"] for run in runs if run["no_pause_reason"]}
    return notes + [Note(f"{DASH} for {name}: {reason}.") for reason in sorted(reasons)]


def _what_is_wrong(name: str, runs: Sequence[Run], workload: Workload) -> list[Note]:
    notes = [
        Note(f"{name}, repeat {run['repeat'] + 1}: {run['error']}", True) for run in runs if run["error"]
    ]
    expected = workload.tokens
    if any(rollout["tokens"] != expected for run in runs for rollout in run["rollouts"]):
        notes.append(Note(f"{name}: a rollout did not return {expected} tokens.", True))
    late = sum(run["pauses"]["late_tokens"] for run in runs if run.get("pauses"))
    if late:
        notes.append(
            Note(f"{name}: {late} deliveries of the watched request followed an acknowledged pause.", True)
        )
    updates = [run["updates"] for run in runs if run.get("updates")]
    if not all(update["changed"] for update in updates):
        notes.append(Note(f"{name}: an update left the greedy output as it was.", True))
    if not all(update["restored"] for update in updates):
        notes.append(Note(f"{name}: updating back did not restore the greedy output.", True))
    return notes
