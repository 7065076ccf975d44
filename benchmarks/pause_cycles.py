"""Pause, update and resume under load, by every transport and in every mode: whole distributions.

A real engine process has as many live requests as the shape says, all the time, from a process of their own
(``harness/load.py``). This process is the trainer. One cycle (``harness/cycles.py``): wait until all requests
decode, and for a random phase of a step; pause, update to the other checkpoint, continue. Transports and both
ways to continue, with and without the empty-cache step, take turns, so that a machine that slows down slows
all of them. With ``none`` among the transports, cycles without an update show what an update adds.

Each mode has an engine of its own. The time of a step without pauses is measured under the same load, half
before the cycles, once the first requests have ended, and half after them; the targets are one such step and
2 ms for a pause, and for the first token after a plain continue. After ``abort`` and ``retract`` the first
step computes prompts: there one step is what the engine lets such a step take.

    python benchmarks/pause_cycles.py --shape tiny --cycles 200 --json out.json
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from harness.cycles import (
    ALLOWANCE_MS,
    NO_UPDATE,
    QUANTILES,
    TARGET_STEP_S,
    VARIANTS,
    Change,
    Cycle,
    Cycles,
    distribution,
    one_step_of,
    summarise,
    verdicts,
)
from harness.load import Load
from harness.script import begin, parser, table, two_checkpoints, write_json
from harness.transports import TRANSPORTS, Trainer
from harness.workload import WORKLOADS, Workload
from rich.console import Console
from rich.progress import track
from rich.table import Table

from caesura.client import launch_scheduler
from caesura.io_struct import PauseMode

MODES: tuple[PauseMode, ...] = get_args(PauseMode)
SHAPES = [name for name, workload in WORKLOADS.items() if workload.load_new_tokens]
BUCKET_BYTES = 64 << 20
LABELS = {
    "pause": "pause acknowledged",
    "barrier": "  of it, after the last tokens",
    "update": "update",
    "resume, plain": "continue",
    "resume, empty-cache": "  with the empty-cache step",
    "first_token, plain": "continue to first token",
    "first_token, empty-cache": "  with the empty-cache step",
    "steps": "  steps until it (a number)",
    "gap, plain": "last token to first token",
    "gap, empty-cache": "  with the empty-cache step",
}

SUMMARISED = {"pause": "pause", "first_token, plain": "first token", "first_token, empty-cache": "emptied"}


def chosen_from(allowed: Sequence[str], text: str) -> list[str]:
    """Split comma-separated names, in the order given."""
    names = text.split(",")
    if unknown := set(names) - set(allowed):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(allowed)}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default="tiny")
    transports = partial(chosen_from, [*TRANSPORTS, NO_UPDATE])
    told = f"default: {','.join(TRANSPORTS)}; {NO_UPDATE}: without an update"
    made.add_argument("--transports", type=transports, default=list(TRANSPORTS), help=told)
    modes = partial(chosen_from, MODES)
    made.add_argument("--modes", type=modes, default=list(MODES), help=f"default: {','.join(MODES)}")
    made.add_argument("--cycles", type=int, default=200, help="of each transport, mode and way (%(default)s)")
    made.add_argument("--steps", type=int, default=1000, help="without pauses, in each mode (%(default)s)")
    made.add_argument("--tp", type=int, default=1, help="ranks of the engine (%(default)s)")
    made.add_argument("--threads", type=int, default=1, help="of the engine (%(default)s)")
    options = made.parse_args(argv)
    if min(options.cycles, options.threads) < 1 or options.steps < 2:
        made.error("--cycles and --threads must be at least 1, --steps at least 2")
    return options


def run_mode(
    mode: PauseMode,
    workload: Workload,
    folders: Sequence[Path],
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Run all cycles in one mode; return the seconds of the steps, and the cycles by transport."""
    steps: list[float] = []
    found: dict[Change, list[Cycle]] = {transport: [] for transport in options.transports}
    with ExitStack() as stack:
        client = stack.enter_context(
            launch_scheduler(
                folders[0],
                dtype="bfloat16",
                num_threads=options.threads,
                tp=options.tp,
                context_len=workload.context_len,
                kv_pool_tokens=workload.kv_tokens,
                max_running_requests=workload.requests,
                target_step_s=TARGET_STEP_S,
                log_level="WARNING",
            )
        )
        trainer = stack.enter_context(Trainer(client, folders, options.transports, BUCKET_BYTES))
        load = stack.enter_context(Load(client.endpoint, workload, seed=0))
        cycles = Cycles(client, trainer, load, mode, seed=0)
        load.steady(workload.load_new_tokens)  # until then contexts grow, and steps with them
        steps += load.step_seconds(options.steps // 2)
        step_s = statistics.median(steps)
        for transport in found:  # buffers and mappings that the first update makes are not what is measured
            cycles.run(transport, "plain", step_s)
        turns = track(
            range(options.cycles), mode, console=console, transient=True, disable=not console.is_terminal
        )
        for _ in turns:
            for transport, done in found.items():
                done += [cycles.run(transport, variant, step_s) for variant in VARIANTS]
        load.steady(1)
        steps += load.step_seconds(options.steps - options.steps // 2)
    return {"steps": steps, "cycles": found}


def report_mode(mode: PauseMode, raw: dict[str, Any]) -> dict[str, Any]:
    """Return distributions and verdicts of :func:`run_mode`'s measurements, and these as lists."""
    step = distribution([1e3 * seconds for seconds in raw["steps"]])
    transports = {}
    for transport, cycles in raw["cycles"].items():
        summary = summarise(cycles)
        transports[transport] = {
            "ms": summary,
            "targets": verdicts(mode, summary, step),
            "fewest_requests_met": min(cycle.met for cycle in cycles),
            "cycles_s": [asdict(cycle) for cycle in cycles],
        }
    return {"step_ms": step, "steps_s": raw["steps"], "transports": transports}


def as_table(mode: PauseMode, report: dict[str, Any]) -> Table:
    step = report["step_ms"]
    quantiles = ", ".join(f"{name} {step[name]:.1f}" for name in QUANTILES)
    title = f"{mode}: ms. A step without pauses: {quantiles} (of {step['count']:,})"
    made = table(title, ["", "", *QUANTILES, "cycles", "one step + 2 ms"], words=2)
    for transport, found in report["transports"].items():
        for part, label in LABELS.items():
            row, target = found["ms"][part], found["targets"].get(part)
            made.add_row(
                transport if part == "pause" else "",
                label,
                *(f"{row[name]:.1f}" for name in QUANTILES),
                str(row["count"]),
                "" if target is None else _verdict(target),
                end_section=part == list(LABELS)[-1],
            )
    return made


def summary_table(modes: dict[PauseMode, dict[str, Any]]) -> Table:
    """Return what each pause and first token took beyond one step, at the same quantile."""
    names = ("p50", "p99")
    parts = [(part, f"{label} {name}") for part, label in SUMMARISED.items() for name in names]
    headings = ["mode", "transport", *(heading for _, heading in parts), "beyond 2 ms"]
    made = table("ms beyond one step", headings, words=2)
    for mode, report in modes.items():
        for transport, found in report["transports"].items():
            cells, missed = [], []
            for part, label in SUMMARISED.items():
                one_step = one_step_of(mode, part, report["step_ms"])
                over = {name: found["ms"][part][name] - one_step[name] for name in names}
                cells += [f"{over[name]:+.1f}" for name in names]
                missed += [label] if over["p99"] > ALLOWANCE_MS else []
            made.add_row(mode, transport, *cells, ", ".join(missed) or "none")
    return made


def _verdict(target: dict[str, Any]) -> str:
    word, style = ("met", "green") if target["met"] else ("missed", "red")
    return f"p99 ≤ {target['limit_ms']:.1f}: [{style}]{word}[/{style}]"


def footnote(modes: dict[PauseMode, dict[str, Any]]) -> str:
    """Count the targets that were met, also against the median step."""
    targets = [
        target
        for report in modes.values()
        for found in report["transports"].values()
        for target in found["targets"].values()
    ]
    met, strict = (sum(target[key] for target in targets) for key in ("met", "met_by_median_step"))
    return (
        f"Targets: p99 within the p99 of a step + 2 ms, {met} of {len(targets)} met; within the median step "
        f"+ 2 ms, {strict} of {len(targets)}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # the trainer's
    console, workload = Console(width=120), WORKLOADS[options.shape]
    facts = begin(console, threads=options.threads)
    console.print(
        f"{workload.shape}: {workload.requests} live requests, {workload.prompt_tokens} in, "
        f"{workload.load_new_tokens // 2} to {workload.load_new_tokens} out",
        highlight=False,
    )
    modes: dict[PauseMode, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = two_checkpoints(Path(scratch), workload.model)
        for mode in options.modes:
            modes[mode] = report_mode(mode, run_mode(mode, workload, folders, options, console))
            console.print(as_table(mode, modes[mode]))
    console.print(summary_table(modes))
    console.print(footnote(modes), highlight=False)
    document = {"machine": facts, "shape": workload.shape, "requests": workload.requests, "modes": modes}
    write_json(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
