"""The engine's memory over many weight updates in place, by every transport."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from checkpoints import DTYPES
from rich.console import Console
from rich.progress import track

from .pictures import INK, LINE, Panel, draw_grid
from .process_memory import MB
from .script import markdown, two_checkpoints
from .soak import SETTLED, Cell, growth, soak
from .transports import TRANSPORTS
from .workload import WORKLOADS

BUCKET_BYTES = 4 << 20
"""A third of the tiny model: every update but disk's is a session of several calls."""
FLAT_FROM, FLAT_TURNS = 100, 1000
"""The engine promises at most 2 MB of growth over that many turns, from that turn on."""
BLOCK = 25
"""Turns of which the greatest counts for that: a message may hold a bucket for a moment."""
MEMORIES = {"continued": "reserved", "anonymous": "anonymous", "shared": "shared"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=1000, help="by each transport (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="in flight (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the model (default: as the shape says)")
    parser.add_argument("--model", choices=tuple(ARCHITECTURES), default="tiny")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="that the engine computes in"
    )
    default = [name for name in TRANSPORTS if name != "ipc-shared"]
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=default)


def run(options: argparse.Namespace, console: Console, scratch: Path) -> dict[str, Any]:
    """Return the readings by transport."""
    if options.updates < 2 * SETTLED:
        raise SystemExit(f"--updates must be at least {2 * SETTLED}")
    shape = ARCHITECTURES[options.model]
    if options.layers is not None:
        shape = dataclasses.replace(shape, num_hidden_layers=options.layers)
    folders = two_checkpoints(scratch, shape)
    workload = dataclasses.replace(
        WORKLOADS["tiny"],
        requests=options.requests,
        load_new_tokens=64,
        new_tokens=64,
        vocab_size=shape.vocab_size,
    )
    found = {}
    for name in options.transports:
        cell = Cell(transport=name, dtype=options.dtype, bucket_bytes=BUCKET_BYTES)
        turns = track(range(options.updates), name, console=console, disable=not console.is_terminal)
        found[name] = dataclasses.asdict(soak(workload, folders, turns, cell, scratch))
    return found


def most_growth(values: Sequence[int]) -> int:
    """Return the most bytes gained over :data:`FLAT_TURNS` turns or fewer, from turn :data:`FLAT_FROM` on."""
    peaks = [max(values[turn : turn + BLOCK]) for turn in range(FLAT_FROM - 1, len(values), BLOCK)]
    blocks = FLAT_TURNS // BLOCK
    return max((max(peaks[at : at + blocks + 1]) - each for at, each in enumerate(peaks)), default=0)


def report(found: dict[str, Any]) -> str:
    rows = []
    for transport, series in found.items():
        for name, title in MEMORIES.items():
            values = series[name]
            grown = growth(values)
            sizes = [f"{value / MB:.2f}" for value in (values[0], values[SETTLED - 1], values[-1])]
            changes = [f"{grown[part] / MB:+.2f}" for part in ("total", "second_half")]
            most, ms = f"{most_growth(values) / MB:.2f}", f"{1e3 * series['seconds'] / len(values):.1f}"
            rows.append([transport, title, *sizes, *changes, most, ms])
    headings = "transport|memory|first|10th|last|10th to last|in the 2nd half|most in 1,000|ms per turn"
    return "MB (2^20 bytes) after each update:\n\n" + markdown(headings.split("|"), rows, words=2)


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw reserved memory, a column per transport; below it the change since the tenth update."""
    above, below = [], []
    highest = max(max(series["continued"]) for series in found.values()) / MB
    changes = {
        name: [(value - series["continued"][SETTLED - 1]) / MB for value in series["continued"]]
        for name, series in found.items()
    }
    widest = 1.3 * max(0.5, *(abs(change) for values in changes.values() for change in values))
    for number, (name, series) in enumerate(found.items()):
        values = [value / MB for value in series["continued"]]
        turns = range(1, len(values) + 1)
        first = number == 0
        above.append(
            Panel(
                name,
                "reserved after\ncontinue, MB" if first else "",
                (0, 1.2 * highest),
                [(turns, values, LINE, "")],
            )
        )
        note = f"10th to last: {changes[name][-1]:+.2f} MB"
        label = "change since the\n10th update, MB" if first else ""
        below.append(Panel("", label, (-widest, widest), [(turns, changes[name], LINE, "")], [(note, INK)]))
    draw_grid([above, below], path, xlabel="update")
