"""The engine's memory over many weight updates, by every transport, with requests in flight all the time.

Each transport has an engine of its own. One turn: top the requests up, pause in place, update to the other checkpoint,
continue; then what the engine reports as reserved, and what its process holds (RssAnon, RssShmem), are recorded. Every
turn asserts that the pause met requests in flight and that the update changed tensors.

Workspaces follow the largest batch: one is run before the first turn, of requests like those that are in flight later.

    python benchmarks/memory_over_updates.py --updates 1000 --plot docs/images/memory_over_updates.svg
    python benchmarks/memory_over_updates.py --model mla-fp8 --layers 2 --dtype bfloat16
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from architectures import ARCHITECTURES
from checkpoints import DTYPES, write_checkpoint
from harness.machine import describe, machine_facts
from harness.process_memory import MB, read_memory
from harness.transports import TRANSPORTS, Trainer, Transport
from rich.console import Console
from rich.progress import track
from rich.table import Table

from caesura.client import GenerationHandle, SamplingParams, SchedulerClient, launch_scheduler

DEFAULT_TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor", "ipc", "distributed")
IN_FLIGHT = 32
PROMPT_TOKENS, NEW_TOKENS = 32, 48
BUCKET_BYTES = 4 << 20
"""A third of the model: every update but disk's is a session of several calls."""
SETTLED = 10
"""Growth is counted from this turn on."""
FLAT_FROM, FLAT_TURNS = 100, 1000
"""The engine promises at most 2 MB of growth over that many turns, from that turn on."""
BLOCK = 25
"""Turns of which the greatest counts for that: readings move by a bucket, which a message may hold for a moment."""
PLOTTED_POINTS = 200
LINE = "#2f6fed"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "caesura",
    "font.size": 9,
    "text.color": "#1d2433",
    "axes.edgecolor": "#dfe2e8",
    "axes.labelcolor": "#5d6678",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e6e8ee",
    "xtick.color": "#5d6678",
    "ytick.color": "#5d6678",
    "lines.linewidth": 1.4,
}


@dataclass
class Series:
    """Bytes after each turn, and the seconds that all of them took."""

    reserved: list[int] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Requests:
    """Keeps :data:`IN_FLIGHT` requests with the engine, each with a prompt of its own."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self._handles: list[GenerationHandle] = []
        self._count = 0

    def top_up(self) -> None:
        """As many new ones as have ended."""
        self._handles = [handle for handle in self._handles if not handle.done()]
        while len(self._handles) < IN_FLIGHT:
            self._handles.append(self._submit())

    def pause_among_them(self) -> None:
        """Pause in place while requests run. On a busy machine all of them may end before a pause arrives: then it is taken
        back."""
        self._await_half()
        while not self._client.pause("in_place").held_requests:
            self._client.continue_generation()
            self._await_half()

    def _await_half(self) -> None:
        self.top_up()
        while self._client.status().running_requests < IN_FLIGHT // 2:
            self.top_up()

    def warm_up(self) -> None:
        """Run a few batches to their end; then leave the next one on its way."""
        for handle in [self._submit() for _ in range(4 * IN_FLIGHT)]:
            handle.result()
        self.top_up()
        self._handles[0].result()

    def _submit(self) -> GenerationHandle:
        self._count += 1
        length = NEW_TOKENS + self._count % 16  # they must not all end in the same step
        params = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=self._count)
        prompt = [3 + (17 * self._count + 7 * place) % 4000 for place in range(PROMPT_TOKENS)]
        return self._client.submit(prompt, params, return_logprob=True)


def run(
    transport: Transport,
    folders: Sequence[Path],
    updates: int,
    console: Console,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Series:
    """``updates`` turns by one transport, on an engine of its own."""
    engine = launch_scheduler(
        folders[0],
        dtype=dtype,
        num_threads=1,
        kv_pool_tokens=4096,
        max_running_requests=IN_FLIGHT,
        log_level="WARNING",
    )
    series = Series()
    with engine as client, Trainer(client, folders, [transport], BUCKET_BYTES) as trainer:
        requests = Requests(client)
        requests.warm_up()
        pid, began = client.status().pid, time.perf_counter()
        for turn in track(range(1, updates + 1), description=transport, console=console):
            requests.pause_among_them()
            reply = trainer.push(transport, turn % 2, flush_cache=False, weight_version=str(turn))
            report = client.continue_generation()
            assert reply.committed and reply.changed_tensors > 0, "the update changed nothing"
            assert report.reserved_after is not None
            memory = read_memory(pid)
            series.reserved.append(report.reserved_after)
            series.anonymous.append(memory.anonymous)
            series.shared.append(memory.shared)
        series.seconds = time.perf_counter() - began
    return series


def settled_growth(values: Sequence[int]) -> tuple[int, int]:
    """Bytes from the tenth turn to the last, and how much of that came in the second half of all turns."""
    return values[-1] - values[SETTLED - 1], values[-1] - values[len(values) // 2 - 1]


def most_growth(values: Sequence[int]) -> int:
    """Most bytes that were gained over :data:`FLAT_TURNS` turns or fewer, from turn :data:`FLAT_FROM` on."""
    peaks = [max(values[turn : turn + BLOCK]) for turn in range(FLAT_FROM - 1, len(values), BLOCK)]
    blocks = FLAT_TURNS // BLOCK
    return max((max(peaks[at : at + blocks + 1]) - each for at, each in enumerate(peaks)), default=0)


def as_table(found: dict[Transport, Series]) -> Table:
    """For people, in MB."""
    updates = max(len(series.reserved) for series in found.values())
    table = Table(title=f"MB (2^20 bytes) after each of {updates:,} updates")
    table.add_column("transport")
    table.add_column("memory")
    for title in ("first", "10th", "last", "10th to last", "in the 2nd half", "most in 1,000", "ms per turn"):
        table.add_column(title, justify="right")
    for transport, series in found.items():
        for name in ("reserved", "anonymous", "shared"):
            values: list[int] = getattr(series, name)
            growth, late = settled_growth(values)
            table.add_row(
                transport if name == "reserved" else "",
                name,
                *(f"{value / MB:.2f}" for value in (values[0], values[SETTLED - 1], values[-1])),
                f"{growth / MB:+.2f}",
                f"{late / MB:+.2f}",
                f"{most_growth(values) / MB:.2f}",
                f"{1e3 * series.seconds / len(values):.1f}" if name == "reserved" else "",
            )
    return table


def plot(found: dict[Transport, Series], path: Path) -> None:
    """Reserved memory over updates, a column per transport: from zero above, below it the change since the tenth update.

    The format is the suffix's.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        panels = figure.subplots(
            2, len(found), sharex=True, sharey="row", squeeze=False, height_ratios=(1.2, 1)
        )
        widest = 0.5
        for (above, below), (transport, series) in zip(panels.T, found.items(), strict=True):
            turns, tenth = range(1, len(series.reserved) + 1), series.reserved[SETTLED - 1]
            shown = slice(None, None, max(1, len(turns) // PLOTTED_POINTS))
            change = [(value - tenth) / MB for value in series.reserved]
            above.plot(turns[shown], [value / MB for value in series.reserved[shown]], color=LINE)
            below.plot(turns[shown], change[shown], color=LINE)
            above.set_title(transport, loc="left", fontsize=10)
            below.set_xlabel("update")
            below.set_xticks([0, len(turns) // 2, len(turns)])
            below.margins(x=0)
            widest = max(widest, *map(abs, change))
            growth, _ = settled_growth(series.reserved)
            below.annotate(f"10th to last: {growth / MB:+.2f} MB", (0.04, 0.06), xycoords="axes fraction")
        highest = max(max(series.reserved) for series in found.values()) / MB
        panels[0][0].set_ylim(0, 1.2 * highest)
        panels[0][0].set_ylabel("reserved after\ncontinue, MB")
        panels[1][0].set_ylim(-1.3 * widest, 1.3 * widest)
        panels[1][0].set_ylabel("change since the\n10th update, MB")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--layers", type=int, help="of the model (default: as the shape says)")
    parser.add_argument("--model", choices=tuple(ARCHITECTURES), default="tiny")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="that the engine computes in"
    )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=DEFAULT_TRANSPORTS)
    parser.add_argument(
        "--plot", type=Path, help="draw reserved memory there (.svg or .png; needs matplotlib)"
    )
    parser.add_argument("--json", type=Path, help="write every reading there")
    options = parser.parse_args()
    if options.updates < 2 * SETTLED:
        parser.error(f"--updates must be at least {2 * SETTLED}")
    shape = ARCHITECTURES[options.model]
    if options.layers is not None:
        shape = dataclasses.replace(shape, num_hidden_layers=options.layers)
    torch.set_num_threads(1)
    console, facts = Console(width=120), machine_facts()
    console.print(describe(facts))
    with tempfile.TemporaryDirectory() as scratch:
        folders = [write_checkpoint(Path(scratch) / str(seed), shape, seed=seed) for seed in (0, 1)]
        found = {
            name: run(name, folders, options.updates, console, options.dtype) for name in options.transports
        }
    console.print(as_table(found))
    if options.json is not None:
        readings = {name: asdict(series) for name, series in found.items()}
        options.json.write_text(json.dumps({"machine": facts, "bytes": readings}) + "\n")
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
