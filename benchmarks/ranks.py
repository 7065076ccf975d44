"""Tensor-parallel ranks on this host: tokens per second, pauses, and kills of a rank.

Every engine is one of ``KINDS``. They take turns in an order that rotates; one engine lives at a time, since
threads of two would share the cores.

- rollouts: the whole batch of the shape; medians of tokens per second, and the ratio to one rank
- pauses: ``pause("in_place")`` at a random phase of a step, under the shape's load; p99 beside that of a step
- kills: SIGKILL of a worker, idle, while stepping and while paused, until a live request is told and rank 0
  has ended

    python benchmarks/ranks.py --shape tiny --turns 3 --pauses 200 --kills 20 --json ranks.json
    python benchmarks/ranks.py --shape moe --pauses 0 --kills 0
    python benchmarks/ranks.py --links  # the model of ``harness/collectives_model.py`` alone
"""

import argparse
import os
import random
import select
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES
from checkpoints import write_checkpoint
from harness.collectives_model import Step
from harness.cycles import ALLOWANCE_MS, STEPS_BETWEEN, TARGET_STEP_S, distribution
from harness.load import Load
from harness.script import begin, in_turns, parser, table, write_json
from harness.workload import WORKLOADS, Workload
from rich.console import Console
from rich.table import Table

from caesura.client import EngineError, LaunchedScheduler, SamplingParams, launch_scheduler
from caesura.client.launch.launcher import worker_command


@dataclass(frozen=True)
class Kind:
    """An engine: its ranks, the threads of each, and whether ranks meet as those of two hosts do.

    With ``dp_attention`` each rank computes attention for requests of its own.
    """

    ranks: int
    threads: int
    gloo: bool = False
    ep: int = 1
    """Groups of ranks that have whole experts; above 1 for shapes with experts alone."""
    dp_attention: bool = False


KINDS = {
    "1 rank, 1 thread": Kind(1, 1),
    "1 rank, 2 threads": Kind(1, 2),
    "2 ranks, shared memory": Kind(2, 1),
    "2 ranks, dp attention": Kind(2, 1, dp_attention=True),
    "2 ranks, gloo": Kind(2, 1, gloo=True),
    "2 ranks, whole experts": Kind(2, 1, ep=2),
}
KILLED = "2 ranks, shared memory"
STATES = ("idle", "stepping", "paused")
PATIENCE_S = 60.0
REQUESTS_KILLED = 8


@dataclass
class Measured:
    """Measurements of one kind."""

    tokens_per_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)


@contextmanager
def engine(kind: Kind, folder: Path, workload: Workload) -> Iterator[LaunchedScheduler]:
    """Start an engine of ``kind``, and the worker that joins it by hand if there is one."""
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_threads": kind.threads,
        "tp": kind.ranks,
        "ep": kind.ep,
        "dp_attention": kind.ranks if kind.dp_attention else 1,
        "context_len": workload.context_len,
        "kv_pool_tokens": workload.kv_tokens,
        "max_running_requests": workload.requests,
        "target_step_s": TARGET_STEP_S,
        "log_level": "ERROR",
        "log_path": folder.with_suffix(".log"),  # every kill is an error
    }
    worker = None
    if kind.gloo:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        options |= {"tp_joined": 1, "tp_address": address}
        worker = subprocess.Popen(worker_command("--join", address, "--rank", "1"), stderr=subprocess.DEVNULL)
    try:
        launched = launch_scheduler(folder, **options)
        try:
            yield launched
        finally:
            with suppress(EngineError):  # it was killed
                launched.close()
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()


def rollout(launched: LaunchedScheduler, workload: Workload, seed: int) -> float:
    params = SamplingParams(
        max_new_tokens=workload.new_tokens, temperature=1.0, seed=seed, ignore_eos=True, n=workload.samples
    )
    prompts = workload.prompts(seed)
    began = time.perf_counter()
    launched.client.generate(prompts, params, timeout=1200)
    return workload.tokens / (time.perf_counter() - began)


def pauses(launched: LaunchedScheduler, workload: Workload, count: int, found: Measured) -> None:
    """Pause ``count`` times under load; time steps in between, which become longer with their sequences."""
    chance = random.Random(count)
    with Load(launched.endpoint, workload, seed=0) as load:
        for _ in range(count):
            load.steady(1)
            steps = load.step_seconds(STEPS_BETWEEN)
            found.step_s += steps
            time.sleep(chance.random() * statistics.median(steps))
            began = time.perf_counter()
            launched.client.pause("in_place")
            found.pause_s.append(time.perf_counter() - began)
            launched.client.continue_generation(torch_empty_cache=False)


def kill(launched: LaunchedScheduler, workload: Workload, state: str) -> tuple[float | None, float]:
    """Return the seconds from SIGKILL of the worker until a live request is told, and until rank 0 ends."""
    client, handle = launched.client, None
    (rank,) = client.status().ranks
    if state != "idle":
        params = SamplingParams(
            max_new_tokens=workload.load_new_tokens, temperature=1.0, seed=1, ignore_eos=True
        )
        handles = [client.submit(prompt, params) for prompt in workload.prompts(1)[:REQUESTS_KILLED]]
        while client.status().running_requests < len(handles):
            time.sleep(0.01)
        handle = handles[0]
    if state == "paused":
        client.pause("in_place")
    process = os.pidfd_open(launched.pid)
    try:
        began, told = time.perf_counter(), None
        os.kill(rank.pid, signal.SIGKILL)
        if handle is not None:
            with suppress(EngineError):
                handle.result(timeout=PATIENCE_S)
            told = time.perf_counter() - began
        ready, _, _ = select.select([process], [], [], PATIENCE_S)
        if not ready:
            raise TimeoutError(f"{state}: rank 0 has not ended within {PATIENCE_S:g} s")
        return told, time.perf_counter() - began
    finally:
        os.close(process)


def speed_table(found: dict[str, Measured]) -> Table:
    rows = []
    first = statistics.median(next(iter(found.values())).tokens_per_s)
    for name, each in found.items():
        tokens = statistics.median(each.tokens_per_s)
        cells = [name, f"{tokens:,.0f}", f"{tokens / first:.2f}"]
        if each.pause_s:
            step = distribution([1e3 * seconds for seconds in each.step_s])
            pause = distribution([1e3 * seconds for seconds in each.pause_s])
            limit = step["p99"] + ALLOWANCE_MS
            verdict = "met" if pause["p99"] <= limit else "missed"
            values = (step["p50"], step["p99"], pause["p50"], pause["p99"])
            cells += [*(f"{value:.1f}" for value in values), f"{limit:.1f} {verdict}"]
        rows.append(cells)
    headings = "engine|tok/s|of one|step ms p50|step p99|pause ms p50|p99|step p99 + 2"
    return table("rollouts and pauses", headings.split("|"), rows)


def kill_table(found: dict[str, list[tuple[float | None, float]]]) -> Table:
    rows = []
    for state, times in found.items():
        told = [1e3 * seconds for seconds, _ in times if seconds is not None]
        ended = [1e3 * seconds for _, seconds in times]
        cells = [f"{statistics.median(values):.0f}" if values else "" for values in (told, ended)]
        worst = [f"{max(values):.0f}" if values else "" for values in (told, ended)]
        rows.append([state, str(len(times)), cells[0], worst[0], cells[1], worst[1]])
    headings = ["state", "kills", "told p50", "told max", "ended p50", "ended max"]
    return table("SIGKILL of a worker, ms", headings, rows)


def links_table(tokens: int) -> Table:
    """Return the collectives of a step of DeepSeek-V3 in bfloat16, each rank having as many of its tokens."""
    links = {"450 GB/s": (450e9, 2e-6), "50 GB/s": (50e9, 8e-6)}
    """Bytes and seconds of a hop, as of NVLink and of 400 Gb/s between hosts."""
    rows = []
    for ranks in (8, 16, 32):
        ways: dict[str, tuple[int | None, int | None]] = {
            "sums": (None, None),
            "dp attention": (tokens // ranks, None),
        }
        if ranks - 1 > 8:  # as ``Placement.sends_rows``
            ways["dp attention, all-to-all"] = (tokens // ranks, 8)
        for way, (fullest, exchanged) in ways.items():
            step = Step(
                ranks=ranks, layers=61, hidden=7168, vocab=129_280, itemsize=2, tokens=tokens,
                sampled=min(tokens, 256), fullest=fullest, exchanged=exchanged, dense_layers=3,
            )  # fmt: skip
            times = (f"{1e3 * step.seconds(*link):.1f}" for link in links.values())
            rows.append([str(ranks), way, f"{step.sent() / 1e6:,.0f}", *times])
    headings = ["ranks", "divided by", "MB sent by each", *(f"ms at {name}" for name in links)]
    return table(f"collectives of a step of {tokens:,} tokens", headings, rows)


def measure(folder: Path, workload: Workload, options: argparse.Namespace) -> dict[str, Measured]:
    """Run rollouts and pauses of every kind, turn by turn."""
    found = {name: Measured() for name in options.kinds}

    def turn(name: str, number: int) -> None:
        with engine(KINDS[name], folder, workload) as launched:
            rollout(launched, workload, seed=0)
            speeds = [rollout(launched, workload, seed=1 + number) for _ in range(workload.rollouts)]
            found[name].tokens_per_s += speeds
            if options.pauses:
                pauses(launched, workload, -(-options.pauses // options.turns), found[name])

    in_turns({name: partial(turn, name) for name in options.kinds}, options.turns, warm_up=0)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shape", choices=("tiny", "0.6b", "moe", "mla"), default="tiny")
    made.add_argument("--kinds", nargs="+", choices=tuple(KINDS), help="those that the shape can have")
    made.add_argument("--turns", type=int, default=3, help="0: only kills")
    made.add_argument("--pauses", type=int, default=200, help="of each kind, in all turns (%(default)s)")
    made.add_argument("--kills", type=int, default=20, help="in each state (%(default)s)")
    made.add_argument("--links", action="store_true", help="only print the model of a step's collectives")
    options = made.parse_args(argv)
    if options.kinds is None:
        has_experts = hasattr(ARCHITECTURES[WORKLOADS[options.shape].model], "num_experts_per_tok")
        options.kinds = [name for name, kind in KINDS.items() if kind.ep == 1 or has_experts]
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    console = Console(width=120)
    if options.links:
        for tokens in (256, 8192):
            console.print(links_table(tokens))
        return
    facts = begin(console)
    workload = WORKLOADS[options.shape]
    if not workload.load_new_tokens:  # other benchmarks measure rollouts alone
        workload = replace(workload, load_new_tokens=4 * workload.new_tokens)
    killed: dict[str, list[tuple[float | None, float]]] = {state: [] for state in STATES if options.kills}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(Path(scratch) / "model", ARCHITECTURES[workload.model])
        found = measure(folder, workload, options) if options.turns else {}
        if found:
            console.print(speed_table(found))
        for _ in range(options.kills):
            for state, times in killed.items():
                with engine(KINDS[KILLED], folder, workload) as launched:
                    times.append(kill(launched, workload, state))
    if killed:
        console.print(kill_table(killed))
    kinds = {name: vars(each) for name, each in found.items()}
    document = {"machine": facts, "shape": options.shape, "kinds": kinds, "killed_s": killed}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
