"""The growth that the empty-cache step of a continue prevents, and the step's cost.

An engine for each mode, with and without the step, as it is (``plain``) and with a derivation that fragments
the allocator (``fragmenting``, ``soak_engine.py``): scratch tensors of all sizes whose lifetimes interleave
with those of small results, of which never more than a few megabytes are alive. Then the step itself: how
long the call takes, and the first steps after it.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checkpoints import write_checkpoint
from rich.console import Console
from rich.progress import track

from caesura.io_struct import PauseMode

from .cycles import distribution
from .pictures import LINE, SECOND_LINE, Panel, draw_grid
from .process_memory import MB
from .script import markdown
from .soak import SETTLED, STEPS_AFTER, Cell, Cost, growth, measure_cost, soak
from .workload import WORKLOADS, Workload

MODES: tuple[PauseMode, ...] = ("in_place", "retract", "abort")
ALLOCATIONS = ("plain", "fragmenting")
STEP = {True: "on", False: "off"}
"""The empty-cache step."""
SOAKED = replace(WORKLOADS["tiny"], requests=8, load_new_tokens=192)
COSTED = {"tiny": WORKLOADS["tiny"], "0.6b": replace(WORKLOADS["0.6b"], requests=8)}
COST_SHARE = {"tiny": 1, "0.6b": 4}
"""A shape gets one of so many cycles: its steps are longer."""
SHOWN_STEPS = (1, 2, 3, 5)

Found = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cycles", type=int, default=1000, help="of each engine (default: %(default)s)")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--allocations", nargs="+", choices=ALLOCATIONS, default=ALLOCATIONS)
    cost_help = "with and without the step, on the tiny shape; a quarter on 0.6b (default: %(default)s)"
    parser.add_argument("--cost-cycles", type=int, default=100, help=cost_help)
    parser.add_argument("--cost-shapes", nargs="*", choices=tuple(COSTED), default=tuple(COSTED))
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the engine (default: %(default)s)")


def run(options: argparse.Namespace, console: Console, scratch: Path) -> Found:
    """Return ``soaks``, one for each engine, and ``costs``, one for each shape and kind of derivation."""
    least = max(COST_SHARE.values())
    if options.cycles < 2 * SETTLED or options.cost_cycles < least:
        raise SystemExit(f"--cycles must be at least {2 * SETTLED}, --cost-cycles {least}")

    def checkpoint(workload: Workload, seed: int) -> Path:
        folder = scratch / f"{workload.model}-{seed}"
        return folder if folder.exists() else write_checkpoint(folder, workload.model, seed=seed)

    def turns(count: int, *names: str) -> Iterable[int]:
        return track(
            range(count), " ".join(names), console=console, transient=True, disable=not console.is_terminal
        )

    engine = Cell(threads=options.threads, device=options.device)
    soaks, costs = [], []
    for allocations, mode, empty in itertools.product(options.allocations, options.modes, STEP):
        cell = replace(engine, mode=mode, empty=empty, fragment=allocations == "fragmenting")
        name = {"allocations": allocations, "mode": mode, "step": STEP[empty]}
        folders = [checkpoint(SOAKED, seed) for seed in (0, 1)]
        series = soak(SOAKED, folders, turns(options.cycles, *name.values()), cell, scratch)
        console.print(f"{' '.join(name.values())}: {series.seconds:.0f} s", highlight=False)
        soaks.append(name | asdict(series))
    for shape, allocations in itertools.product(options.cost_shapes, options.allocations):
        cell, workload = replace(engine, fragment=allocations == "fragmenting"), COSTED[shape]
        cycles = turns(options.cost_cycles // COST_SHARE[shape], "cost", shape, allocations)
        cost = measure_cost(workload, checkpoint(workload, 0), cycles, cell, scratch)
        costs.append({"shape": shape, "allocations": allocations} | summarise_cost(cost))
    return {"soaks": soaks, "costs": costs}


def summarise_cost(cost: Cost) -> Found:
    """Return milliseconds and bytes; ``steps_ms`` holds medians of the first steps, by step (on or off)."""
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


def report(found: Found) -> str:
    """Return all tables as Markdown."""
    parts = []
    if soaks := found["soaks"]:
        parts.append(f"MB (2^20 bytes) reserved at the pause, over {len(soaks[0]['reserved']):,} cycles:\n")
        parts.append(soak_table(soaks))
        fewest = min(cell["fewest_met"] for cell in soaks)
        parts.append(f"Every pause met at least {fewest} of {SOAKED.requests} requests.\n")
    if costs := found["costs"]:
        parts += ["The empty-cache step:\n", emptying_table(costs)]
        parts += [
            f"Steps after a continue, over the median of steps 6 to {STEPS_AFTER}:\n",
            steps_table(costs),
        ]
    return "\n".join(parts)


def soak_table(soaks: Sequence[Found]) -> str:
    titles = "derivation|mode|empty-cache step|10th|last|growth|in the 2nd half|slope per 1,000|peak"
    titles += "|in use, last|ms per cycle"
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
    rows = []
    for cell in costs:
        for word, steps in cell["steps_ms"].items():
            ratios = [f"{steps[number - 1] / cell['steady_ms']:.2f}" for number in SHOWN_STEPS]
            rows.append([cell["shape"], cell["allocations"], word, f"{cell['steady_ms']:.2f}", *ratios])
    numbers = [f"step {number}" for number in SHOWN_STEPS]
    return markdown(["shape", "derivation", "empty-cache step", "a later step, ms", *numbers], rows, words=3)


def signed(value: float) -> str:
    """Return one decimal with the typographical minus and no negative zero."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def plot(found: Found, path: Path) -> None:
    """Draw reserved memory with and without the step: a column per mode, a row per kind of derivation."""
    soaks = found["soaks"]
    rows: list[list[Panel]] = []
    for allocations in dict.fromkeys(cell["allocations"] for cell in soaks):
        cells = [cell for cell in soaks if cell["allocations"] == allocations]
        panels: dict[str, Panel] = {}
        for cell in cells:
            title = "" if rows else cell["mode"]
            label = "" if panels else f"{allocations} derivation\nreserved, MB"
            top = 1.3 * max(max(each["reserved"]) for each in cells) / MB
            panel = panels.setdefault(cell["mode"], Panel(title, label, (0, top)))
            emptied, values = cell["step"] == STEP[True], [value / MB for value in cell["reserved"]]
            colour, label = (LINE, "with the empty-cache step") if emptied else (SECOND_LINE, "without")
            panel.lines.append((range(1, len(values) + 1), values, colour, label))
            grown = signed(growth(cell["reserved"])["total"] / MB)
            panel.notes.insert(0, (f"{cell['step']}: {grown} MB after the 10th", colour))
        rows.append(list(panels.values()))
    draw_grid(rows, path, xlabel="cycle")
