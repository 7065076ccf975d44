"""Common parts of all benchmarks: command line, first lines, tables, result files, and turns.

Invariant: what is compared takes turns in an order that rotates, so that a machine that slows down slows all
of it.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from checkpoints import write_checkpoint
from rich.console import Console
from rich.table import Table

from .machine import busy_share, describe, machine_facts

QUIET = 0.1
"""Share of the cores that other work may take before the figures are called suspect."""
T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser described by the first line of ``doc``, with the option ``--json``."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, help="write every measurement to this file")
    return made


def begin(console: Console, **more: Any) -> dict[str, Any]:
    """Print the machine, and a warning if others use it; return its facts and ``more``."""
    facts = machine_facts() | more | {"busy": round(busy_share(), 2)}
    extra = "".join(f"; {name}: {value}" for name, value in more.items())
    console.print(describe(facts) + extra, highlight=False)
    if facts["busy"] > QUIET:
        console.print(f"other processes use {facts['busy']:.0%} of the cores: do not trust these figures")
    return facts


def table(
    title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]] = (), *, words: int = 1
) -> Table:
    """Return a table whose first ``words`` columns are text and whose other columns are figures."""
    made = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number < words else "right")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """Return the same table as Markdown."""
    rule = ["---"] * words + ["---:"] * (len(headings) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)) + "\n"


def write_json(path: Path | None, document: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def two_checkpoints(folder: Path, shape: Any, **options: Any) -> list[Path]:
    """Write checkpoints of seeds 0 and 1 below ``folder``."""
    return [write_checkpoint(folder / str(seed), shape, seed=seed, **options) for seed in (0, 1)]


def in_turns(ways: Mapping[str, Callable[[int], T]], rounds: int, *, warm_up: int = 1) -> dict[str, list[T]]:
    """Call each of ``ways`` with the number of the round; return the results after the warm-up."""
    names = list(ways)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = ways[name](number)
            if number >= 0:
                found[name].append(result)
    return found
