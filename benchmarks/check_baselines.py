"""Compare a small fixed workload on a real engine with recorded times, stage by stage.

    python benchmarks/check_baselines.py          # exit status 1 if something is much slower
    python benchmarks/check_baselines.py --update --reason "new kernel for decode"

The workload, on an engine of its own in each round: a start, a rollout on the tiny shape (bfloat16, one
thread), pause, update from disk and continue in the midst of another, a release and a resume; then images of
a tiny pipeline, whose text encoders and VAE come and go. Compared are the sums of an engine's stages and each
part of the workload from end to end.

Invariants:
- Times are compared as ratios to a loop that resembles them (``harness/yardstick.py``), measured before,
  between and after the engines of the same round: a baseline holds on another machine, and on this one while
  others use it.
- A time beyond :data:`SLOWER` of its baseline is reported, one beyond :data:`FAILS` in every round is a
  regression, and so is a stage that has disappeared. There are no more rounds once nothing is a regression.
- A machine with other instructions than the recorded one has other ratios: there only a lost stage is a
  regression.
- ``--update`` adds to the history what was measured and why that is right; nothing in it is ever changed.
"""

import argparse
import datetime
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from checkpoints import SHAPES, write_checkpoint
from harness.machine import busy_share, describe, machine_facts
from harness.script import table
from harness.yardstick import KINDS, Kind, measure_yardsticks
from rich.console import Console
from rich.table import Table

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

BASELINES = Path(__file__).with_name("baselines.json")
SLOWER, FAILS = 1.5, 3.0
"""Multiples of a baseline that are reported, and that are a regression."""
HISTORY = 50
"""Number of records that are kept."""
QUIET = 0.2
WORKLOAD: dict[str, Any] = {
    "shape": "tiny", "threads": 1, "requests": 64, "prompt_tokens": 128, "new_tokens": 256, "cycles": 100,
    "load_requests": 16, "load_tokens": 2000, "releases": 10,
    "images": {"shape": "tiny", "requests": 5, "samples": 8, "steps": 10},
}  # fmt: skip
"""Baselines of another workload are no baselines."""

RESEMBLES: dict[str, Kind] = {
    "stage.prefill": "product", "stage.decode": "product",
    "end_to_end.rollout": "product",
    "stage.update.receive": "copy", "stage.update.copy": "copy", "end_to_end.cycles": "copy",
    "end_to_end.releases": "copy",
    "images.stage.encode": "product", "images.stage.denoise": "product", "images.stage.decode": "product",
    "images.stage.components.arrive": "copy", "images.stage.components.leave": "copy",
    "images.end_to_end": "product",
}  # fmt: skip
"""Loop that a time is held against; ``interpreter`` by default."""

Times = dict[str, float]
"""Name to milliseconds: ``stage.…`` and ``end_to_end.…``, those of images with ``images.`` before it."""


@dataclass(frozen=True)
class Verdict:
    """One time beside its baseline, in milliseconds."""

    name: str
    baseline: float | None
    """Recorded time, or None."""
    measured: float | None
    """Time of this run, or None if it was not measured any more."""

    @property
    def is_regression(self) -> bool:
        """Return True if the time is much slower than its baseline, or gone."""
        return self.word in ("much slower", "gone")

    @property
    def word(self) -> str:
        if self.baseline is None:
            return "new"
        if self.measured is None:
            return "gone"
        if self.measured > SLOWER * self.baseline:
            return "much slower" if self.measured > FAILS * self.baseline else "slower"
        return "faster: update?" if self.measured < self.baseline / SLOWER else "ok"


def at_the_speed_of(recorded: Mapping[str, float], now: Mapping[str, float], measured: Times) -> Times:
    """Scale ``measured`` from a machine with the yardsticks ``now`` to one with ``recorded``."""
    scaled = {}
    for name, value in measured.items():
        kind = RESEMBLES.get(name, "interpreter")
        scaled[name] = value * recorded[kind] / now[kind]
    return scaled


def compare(baselines: Mapping[str, float], measured: Mapping[str, float]) -> list[Verdict]:
    """Return a verdict for each name on either side, those of the baselines first."""
    return [
        Verdict(name, baselines.get(name), measured.get(name))
        for name in dict.fromkeys([*baselines, *measured])
    ]


def best_times(runs: Sequence[Times]) -> Times:
    """Return the shortest of each time: a disturbance only ever makes it longer."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: min(run[name] for run in runs if name in run) for name in names}


def updated(
    old: Mapping[str, Any],
    measured: Mapping[str, float],
    yardsticks: Mapping[str, float],
    *,
    reason: str,
    machine: Mapping[str, Any],
    today: str,
) -> dict[str, Any]:
    """Return the baselines file with one more record, which comes first and is the baseline from now on."""
    record = {
        "date": today,
        "reason": reason,
        "machine": describe(dict(machine)),
        "workload": WORKLOAD,
        "yardsticks_ms": {name: round(value, 2) for name, value in yardsticks.items()},
        "times_ms": {name: round(value, 1) for name, value in measured.items()},
    }
    return {"history": [record, *old.get("history", [])][:HISTORY]}


def measure(folders: Sequence[Path], workload: Mapping[str, Any] = WORKLOAD) -> Times:
    """Run the whole workload once on an engine of its own."""
    times: Times = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        times[f"end_to_end.{name}"] = 1e3 * (time.perf_counter() - started)

    count, length = workload["requests"], workload["prompt_tokens"]
    prompts = [[3 + (31 * row + 7 * column) % 4000 for column in range(length)] for row in range(count)]
    params = SamplingParams(max_new_tokens=workload["new_tokens"], ignore_eos=True, seed=0)
    started = time.perf_counter()
    engine = launch_scheduler(
        folders[0],
        device="cpu",
        num_threads=workload["threads"],
        kv_pool_tokens=40960,
        prefix_cache=False,
        log_level="WARNING",
    )
    with engine as client:
        client.generate(prompts[0], SamplingParams(max_new_tokens=1))
        times["end_to_end.start"] = 1e3 * (time.perf_counter() - started)
        client.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
        before = stage_seconds(client)
        timed("rollout", lambda: client.generate(prompts, params))
        timed("cycles", lambda: cycles(client, prompts, folders, workload))
        timed("releases", lambda: releases(client, folders[0], workload["releases"]))
        after = stage_seconds(client)
    times |= {f"stage.{name}": 1e3 * (total - before.get(name, 0.0)) for name, total in after.items()}
    return times


def measure_images(folder: Path, workload: Mapping[str, Any] = WORKLOAD) -> Times:
    """Make every image of the workload once; each prompt is another, so each is encoded."""
    work = workload["images"]
    side = image_pipelines().SHAPES[work["shape"]].side

    def images(prompt: str) -> None:
        client.generate_images(
            prompt, n=work["samples"], seed=0, width=side, height=side, num_inference_steps=work["steps"],
            max_sequence_length=0, sde={"type": "ode"},
        )  # fmt: skip

    with launch_scheduler(
        folder, device="cpu", num_threads=workload["threads"], frozen_residency="offload", log_level="WARNING"
    ) as client:
        images("warm")
        before, started = stage_seconds(client), time.perf_counter()
        for number in range(work["requests"]):
            images("abcdefgh"[number % 8] * (1 + number // 8))
        total = time.perf_counter() - started
        after = stage_seconds(client)
    times = {f"images.stage.{name}": 1e3 * (value - before.get(name, 0.0)) for name, value in after.items()}
    return {"images.end_to_end": 1e3 * total} | times


def image_pipelines() -> ModuleType:
    """Import what writes pipelines late: diffusers takes seconds to import."""
    return importlib.import_module("harness.image_pipelines")


def cycles(
    client: SchedulerClient, prompts: list[list[int]], folders: Sequence[Path], workload: Mapping[str, Any]
) -> None:
    """Pause, update and continue again and again while requests run; then end these."""
    params = SamplingParams(max_new_tokens=workload["load_tokens"], ignore_eos=True, seed=1)
    handles = [client.submit(prompt, params) for prompt in prompts[: workload["load_requests"]]]
    for number in range(workload["cycles"]):
        client.pause("in_place")
        client.update_weights_from_disk(folders[(number + 1) % 2], flush_cache=False)
        client.continue_generation()
    client.abort(abort_all=True)
    for handle in handles:
        handle.result()


def releases(client: SchedulerClient, folder: Path, count: int) -> None:
    """Release, resume and load everything."""
    for _ in range(count):
        client.pause()
        client.release_memory()
        client.resume_memory()
        client.update_weights_from_disk(folder)
        client.continue_generation()


def stage_seconds(client: SchedulerClient) -> dict[str, float]:
    """Return the seconds of each stage since the engine's start."""
    return {stage.name: stage.total_s for stage in client.status().stages}


def as_table(verdicts: Sequence[Verdict]) -> Table:
    made = table(
        "milliseconds, at the recorded machine's speed, against their baselines",
        ["time", "baseline", "measured", ""],
    )
    for verdict in verdicts:
        figures = ["" if value is None else f"{value:.1f}" for value in (verdict.baseline, verdict.measured)]
        style = "red" if verdict.is_regression else "yellow" if verdict.word == "slower" else None
        made.add_row(verdict.name, *figures, verdict.word, style=style)
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="the JSON file (%(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="at most so many rounds, of which the best times count (%(default)s)",
    )
    parser.add_argument("--update", action="store_true", help="record what is measured as the new baseline")
    parser.add_argument("--reason", help="with --update: why these times are right")
    options = parser.parse_args(argv)
    if options.update != bool(options.reason and options.reason.strip()):
        parser.error("--update and --reason go together: say why the new times are right")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


def run() -> Iterator[tuple[Times, Times]]:
    """Yield the times and the yardsticks of one round after the other."""
    with tempfile.TemporaryDirectory() as scratch:
        shape = SHAPES[str(WORKLOAD["shape"])]
        folders = [write_checkpoint(Path(scratch) / str(seed), shape, seed=seed) for seed in (0, 1)]
        pipelines = image_pipelines()
        pipeline = pipelines.write_pipeline(
            Path(scratch) / "pipeline", pipelines.SHAPES[WORKLOAD["images"]["shape"]]
        )
        while True:
            around = [measure_yardsticks()]
            times = measure(folders)
            around.append(measure_yardsticks())
            times |= measure_images(pipeline)
            around.append(measure_yardsticks())
            yield times, {str(kind): fmean(found[kind] for found in around) for kind in KINDS}


Rounds = Iterable[tuple[Times, Times]]


def at_one_speed(rounds: Rounds, recorded: Mapping[str, float], console: Console) -> Iterator[Times]:
    """Yield the times of each round, scaled to the yardsticks ``recorded``."""
    for times, yardsticks in rounds:
        speeds = ", ".join(f"{kind} {recorded[kind] / yardsticks[kind]:.2f}" for kind in KINDS)
        console.print(f"this machine's speed, the recorded one's is 1: {speeds}", highlight=False)
        yield at_the_speed_of(recorded, yardsticks, times)


def check(rounds: Rounds, last: Mapping[str, Any], isa: str, console: Console) -> int:
    """Compare with the record ``last`` until nothing is a regression; return the exit status."""
    found: list[Times] = []
    verdicts: list[Verdict] = []
    for times in at_one_speed(rounds, last["yardsticks_ms"], console):
        found.append(times)
        verdicts = compare(last["times_ms"], best_times(found))
        if not any(verdict.is_regression for verdict in verdicts):
            break
    console.print(as_table(verdicts))
    regressions = [verdict for verdict in verdicts if verdict.is_regression]
    if f"({isa})" not in last["machine"]:
        console.print(f"recorded on {last['machine']}, whose ratios are others: times are only reported")
        regressions = [verdict for verdict in regressions if verdict.measured is None]
    if regressions:
        console.print(f"much slower or gone: {', '.join(each.name for each in regressions)}", style="red")
    return int(bool(regressions))


def main(
    argv: Sequence[str] | None = None,
    rounds: Callable[[], Rounds] = run,
    share: Callable[[], float] = busy_share,
) -> int:
    """Return 1 if a time is a regression, 2 if there is nothing to compare with."""
    options = parse(argv)
    console, machine = Console(width=110), machine_facts()
    old = json.loads(options.baselines.read_text()) if options.baselines.exists() else {}
    last = next((record for record in old.get("history", []) if record["workload"] == WORKLOAD), None)
    if last is None and not options.update:
        console.print(f"{options.baselines} has no baselines of this workload: record them with --update")
        return 2
    console.print(describe(machine), highlight=False)
    if (busy := share()) > QUIET:
        console.print(f"somebody else uses {busy:.0%} of the cores: these figures are rough")
    measured = islice(rounds(), options.repeats)
    if last is not None and not options.update:
        return check(measured, last, str(machine["isa"]), console)
    several = list(measured)
    yardsticks = several[0][1]
    best = best_times(list(at_one_speed(several, yardsticks, console)))
    today, reason = datetime.datetime.now(datetime.UTC).date().isoformat(), options.reason.strip()
    new = updated(old, best, yardsticks, reason=reason, machine=machine, today=today)
    options.baselines.write_text(json.dumps(new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
