"""A thousand cycles of pause, update and continue under load: does the empty-cache step keep memory flat, and what does it cost?

One engine for each mode, with and without the step at each continue, as it is (``plain``) and with a derivation that
fragments the allocator (``fragmenting``, ``harness/soak_engine.py``): scratch tensors of all sizes whose lifetimes interleave with
those of small results, of which never more than a few megabytes are alive. What is recorded and asserted in each cycle
is in ``harness/soak.py``. Then the step itself: how long the call takes, and the first steps after it.

Tables are Markdown. ``--read`` makes tables and picture again from what ``--json`` wrote.

    python benchmarks/memory_soak.py --cycles 1000 --json soak.json --plot docs/images/memory_soak.svg --markdown soak.md
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_checkpoint
from harness.cycles import distribution
from harness.machine import busy_share, describe, machine_facts
from harness.process_memory import MB
from harness.report import QUIET
from harness.soak import STEPS_AFTER, Cost, EngineOptions, measure_cost, soak
from harness.workload import WORKLOADS, Workload
from memory_over_updates import LINE, SETTLED, STYLE
from rich.console import Console
from rich.progress import track

from caesura.io_struct import PauseMode

MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")
ALLOCATIONS = ("plain", "fragmenting")
STEP = {True: "on", False: "off"}
"""The empty-cache step."""
SOAKED = replace(WORKLOADS["tiny"], requests=8, load_new_tokens=192)
COSTED = {"tiny": WORKLOADS["tiny"], "0.6b": replace(WORKLOADS["0.6b"], requests=8)}
COST_SHARE = {"tiny": 1, "0.6b": 4}
"""A shape gets one of so many cycles: its steps are longer."""
SHOWN_STEPS = (1, 2, 3, 5)
PLOTTED_POINTS = 250
WITHOUT = "#c2571a"
"""The line of engines that never empty."""

Found = dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000, help="of each engine (default: %(default)s)")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=ALLOCATIONS)
    parser.add_argument(
        "--cost-cycles",
        type=int,
        default=100,
        help="with and without the step, on the tiny shape; a quarter on 0.6b (default: %(default)s)",
    )
    parser.add_argument("--cost-shapes", nargs="*", choices=tuple(COSTED), default=tuple(COSTED))
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the engine (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every reading there")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    parser.add_argument("--plot", type=Path, help="draw reserved memory there (.svg or .png)")
    parser.add_argument("--read", type=Path, help="measure nothing: take what --json has written")
    options = parser.parse_args(argv)
    if options.cycles < 2 * SETTLED or options.cost_cycles < max(COST_SHARE.values()):
        parser.error(f"--cycles must be at least {2 * SETTLED}, --cost-cycles {max(COST_SHARE.values())}")
    return options


class Bench:
    """One run of everything that was asked for."""

    def __init__(self, options: argparse.Namespace, console: Console, scratch: Path) -> None:
        self._options = options
        self._console = console
        self._scratch = scratch
        self._engine = EngineOptions(threads=options.threads, device=options.device)

    def soaks(self) -> list[Found]:
        """Every mode, as it is and fragmenting, with and without the step."""
        folders = [self._checkpoint(SOAKED, seed) for seed in (0, 1)]
        cells = [
            (allocations, mode, empty)
            for allocations in self._options.allocations
            for mode in self._options.modes
            for empty in STEP
        ]
        return [self._soak(folders, *cell) for cell in cells]

    def costs(self) -> list[Found]:
        """Of every shape, as it is and fragmenting."""
        cells = [
            (shape, allocations)
            for shape in self._options.cost_shapes
            for allocations in self._options.allocations
        ]
        return [self._cost(*cell) for cell in cells]

    def _soak(self, folders: Sequence[Path], allocations: str, mode: PauseMode, empty: bool) -> Found:
        name = {"allocations": allocations, "mode": mode, "step": STEP[empty]}
        series = soak(
            mode,
            SOAKED,
            folders,
            self._track(self._options.cycles, " ".join(name.values())),
            self._engine,
            empty=empty,
            fragment=allocations == "fragmenting",
            scratch=self._scratch,
        )
        self._console.print(f"{' '.join(name.values())}: {series.seconds:.0f} s", highlight=False)
        return name | asdict(series)

    def _cost(self, shape: str, allocations: str) -> Found:
        workload = COSTED[shape]
        cost = measure_cost(
            workload,
            self._checkpoint(workload, 0),
            self._track(self._options.cost_cycles // COST_SHARE[shape], f"cost {shape} {allocations}"),
            self._engine,
            fragment=allocations == "fragmenting",
            scratch=self._scratch,
        )
        return {"shape": shape, "allocations": allocations} | summarise_cost(cost)

    def _track(self, turns: int, name: str) -> Iterable[int]:
        console = self._console
        return track(range(turns), name, console=console, transient=True, disable=not console.is_terminal)

    def _checkpoint(self, workload: Workload, seed: int) -> Path:
        folder = self._scratch / f"{workload.model}-{seed}"
        return folder if folder.exists() else write_checkpoint(folder, workload.model, seed=seed)


def growth(values: Sequence[int]) -> dict[str, float]:
    """Bytes from the tenth value to the last, of it in the second half of all, and least squares' bytes per thousand."""
    settled = values[SETTLED - 1 :]
    middle, mean = (len(settled) - 1) / 2, sum(settled) / len(settled)
    spread = sum((place - middle) ** 2 for place in range(len(settled)))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(settled)) / spread
    return {
        "total": settled[-1] - settled[0],
        "second_half": values[-1] - values[len(values) // 2 - 1],
        "per_thousand": 1000 * slope,
    }


def summarise_cost(cost: Cost) -> Found:
    """In milliseconds and bytes; ``steps_ms``: medians of the first steps, by step (on or off)."""
    medians = {
        STEP[empty]: [1e3 * distribution(times)["p50"] for times in zip(*found, strict=True)]
        for empty, found in cost.steps.items()
    }
    return {
        "emptying_ms": distribution([1e3 * seconds for seconds in cost.emptying]),
        "freed": distribution(cost.freed),
        "steady_ms": 1e3 * cost.steady(),
        "steps_ms": medians,
    }


def soak_table(soaks: Sequence[Found]) -> str:
    """Markdown, in MB."""
    titles = "derivation|mode|empty-cache step|10th|last|growth|in the 2nd half|slope per 1,000|peak|in use, last|ms per cycle"
    rows = []
    for cell in soaks:
        reserved, grown = cell["reserved"], growth(cell["reserved"])
        sizes = [f"{value / MB:.1f}" for value in (reserved[SETTLED - 1], reserved[-1])]
        changes = [signed(grown[name] / MB) for name in ("total", "second_half", "per_thousand")]
        top = [f"{value / MB:.1f}" for value in (max(cell["highest"]), cell["allocated"][-1])]
        names = [cell["allocations"], f"`{cell['mode']}`", cell["step"]]
        rows.append([*names, *sizes, *changes, *top, f"{1e3 * cell['seconds'] / len(reserved):.0f}"])
    return markdown(titles.split("|"), rows, words=3)


def emptying_table(costs: Sequence[Found]) -> str:
    """Markdown: the call."""
    rows = []
    for cell in costs:
        call, freed = cell["emptying_ms"], cell["freed"]
        times = [f"{call[name]:.2f}" for name in ("p50", "p99")]
        rows.append(
            [cell["shape"], cell["allocations"], str(call["count"]), *times, f"{freed['p50'] / MB:.1f}"]
        )
    titles = ["shape", "derivation", "emptyings", "median ms", "p99 ms", "MB given back (median)"]
    return markdown(titles, rows, words=2)


def steps_table(costs: Sequence[Found]) -> str:
    """Markdown: the first steps after a continue, relative to later ones."""
    rows = []
    for cell in costs:
        for word, steps in cell["steps_ms"].items():
            ratios = [f"{steps[number - 1] / cell['steady_ms']:.2f}" for number in SHOWN_STEPS]
            rows.append([cell["shape"], cell["allocations"], word, f"{cell['steady_ms']:.2f}", *ratios])
    numbers = [f"step {number}" for number in SHOWN_STEPS]
    return markdown(["shape", "derivation", "empty-cache step", "a later step, ms", *numbers], rows, words=3)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first ``words`` columns are text and the rest figures."""
    rule = ["---"] * words + ["---:"] * (len(titles) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows)) + "\n"


def signed(value: float) -> str:
    """One decimal, with the typographical minus and no negative zero."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def report(result: Found) -> str:
    """All tables, as Markdown."""
    parts = [describe(result["machine"]) + "\n"]
    if soaks := result["soaks"]:
        parts.append(f"MB (2^20 bytes) reserved at the pause, over {len(soaks[0]['reserved']):,} cycles:\n")
        parts.append(soak_table(soaks))
        fewest = min(cell["fewest_met"] for cell in soaks)
        parts.append(f"Every pause met at least {fewest} of {SOAKED.requests} requests.\n")
    if costs := result["costs"]:
        parts += ["The empty-cache step:\n", emptying_table(costs)]
        parts += [
            f"Steps after a continue, over the median of steps 6 to {STEPS_AFTER}:\n",
            steps_table(costs),
        ]
    return "\n".join(parts)


def plot(soaks: Sequence[Found], path: Path) -> None:
    """Reserved memory over cycles: a column per mode, a row per kind of derivation, in each with and without the step.

    The format is the suffix's.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(cell["mode"] for cell in soaks))
    rows = list(dict.fromkeys(cell["allocations"] for cell in soaks))
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 2.2 + 1.6 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), len(modes), sharex=True, sharey="row", squeeze=False)
        for cell in soaks:
            panel = panels[rows.index(cell["allocations"])][modes.index(cell["mode"])]
            _draw(panel, cell)
        for column, mode in enumerate(modes):
            panels[0][column].set_title(mode, loc="left", fontsize=10)
            panels[-1][column].set_xlabel("cycle")
        for row, name in enumerate(rows):
            shown = [cell for cell in soaks if cell["allocations"] == name]
            highest = max(max(cell["reserved"]) for cell in shown) / MB
            panels[row][0].set_ylim(0, 1.3 * highest)
            panels[row][0].set_ylabel(f"{name} derivation\nreserved, MB")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def _draw(panel: Any, cell: Found) -> None:
    """One engine's line, with how much it grew."""
    emptied = cell["step"] == STEP[True]
    values = cell["reserved"]
    shown = slice(None, None, max(1, len(values) // PLOTTED_POINTS))
    colour = LINE if emptied else WITHOUT
    label = "with the empty-cache step" if emptied else "without"
    turns = range(1, len(values) + 1)
    panel.plot(turns[shown], [value / MB for value in values[shown]], color=colour, label=label)
    panel.set_xticks([0, len(values) // 2, len(values)])
    panel.margins(x=0)
    grown = f"{STEP[emptied]}: {signed(growth(values)['total'] / MB)} MB after the 10th"
    panel.annotate(
        grown, (0.04, 0.16 if emptied else 0.05), xycoords="axes fraction", color=colour, fontsize=8.5
    )


def measure(options: argparse.Namespace, console: Console) -> Found:
    """Everything that was asked for."""
    facts = machine_facts()
    console.print(f"{describe(facts)}; threads of the engine: {options.threads}", highlight=False)
    if (busy := busy_share()) > QUIET:
        console.print(f"somebody else uses {busy:.0%} of the cores: do not trust the times")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options, console, Path(scratch))
        result: Found = {"machine": facts, "soaks": bench.soaks(), "costs": []}
        save(result, options.json)  # these took most of the time
        result["costs"] = bench.costs()
        save(result, options.json)
    return result


def save(result: Found, path: Path | None) -> None:
    """As JSON; None: nowhere."""
    if path is not None:
        path.write_text(json.dumps(result) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # the trainer's
    console = Console(width=120, stderr=True)
    result = json.loads(options.read.read_text()) if options.read else measure(options, console)
    text = report(result)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.plot is not None:
        plot(result["soaks"], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
