"""Rollout benchmark: Caesura beside vLLM, OpenVINO, llama.cpp and transformers, on one checkpoint and
the same requests, in one run.

Repeats are interleaved: each starts every engine once, one at a time, in an order that rotates, and measures
everything on it (``harness/engines.py``), so that a machine that slows down slows all of them. Printed
figures are medians over all repeats. The first repeat finds no compile caches; the files of all engines are
in the page cache.

    python benchmarks/rollout.py --shape tiny --vllm-python /opt/peer-vllm/bin/python --json out.json
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from checkpoints import write_checkpoint
from harness import engines as participants
from harness.bare import plain_read_and_copy
from harness.engines import Engine
from harness.limits import least_seconds, measure_ceilings
from harness.report import footnotes, summarise, table
from harness.script import begin, parser, write_json
from harness.workload import WORKLOADS, Workload
from rich.console import Console
from rich.text import Text

ENGINES = ("caesura", "vllm", "openvino", "llama-cpp", "transformers")
OWN = tuple(f"caesura-{each}" for each in ("fp8", "int8", "int4", "mxfp4"))
QUANTIZED = (*OWN, "openvino-int8", "llama-cpp-int8")
"""Engines with quantised weights, as further participants."""
BATCHING = "transformers-batching"
"""transformers' continuous batching, where ``transformers`` is one call of ``generate``."""

CEILING_BYTES, CEILING_PRODUCT = 256 << 20, 2048
"""Sizes for measuring the machine: a tensor that no cache holds, and a square product."""

LOG_WIDTH = 132
"""Columns when the output is not a terminal: three engines and two ratios fit."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shape", choices=(*WORKLOADS, "both", "all"), default="tiny")
    made.add_argument(
        "--engines",
        default=",".join(ENGINES),
        help=f"comma-separated, also {', '.join(QUANTIZED)} and {BATCHING} (default: %(default)s)",
    )
    made.add_argument("--repeats", type=int, default=3, help="starts of every engine (default: 3)")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--threads", type=int, default=cores, help="default: all cores")
    for peer in ("vllm", "openvino", "llama-cpp"):
        variable = f"CAESURA_BENCH_{peer.upper().replace('-', '_')}_PYTHON"
        help_ = f"interpreter of an environment with {peer}"
        made.add_argument(
            f"--{peer}-python", default=os.environ.get(variable), help=f"{help_} (default: ${variable})"
        )
    made.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of all engines")
    made.add_argument("--vllm-bind", default="auto", help="VLLM_CPU_OMP_THREADS_BIND (default: auto)")
    made.add_argument("--transformers-python", default=sys.executable)
    made.add_argument("--work-dir", type=Path, help="keep checkpoints and logs here (default: temporary)")
    options = made.parse_args(argv)
    if unknown := set(options.engines.split(",")) - {*ENGINES, *QUANTIZED, BATCHING}:
        made.error(f"unknown engines: {', '.join(sorted(unknown))}")
    if options.repeats < 1 or options.threads < 1:
        made.error("--repeats and --threads must be at least 1")
    return options


def choose_engines(options: argparse.Namespace, cache: Path, console: Console) -> list[Engine]:
    """Return the wanted engines that are installed; print the others."""
    threads = options.threads
    available = {
        "caesura": participants.caesura(threads),
        **{each: participants.caesura(threads, each.removeprefix("caesura-")) for each in OWN},
        "transformers": participants.rollouts_alone("transformers", options.transformers_python, threads),
        BATCHING: participants.rollouts_alone("transformers, batching", options.transformers_python, threads),
    }
    if options.vllm_python:
        available["vllm"] = participants.vllm(options.vllm_python, threads, options.vllm_bind, cache)
    for name, engine, python in (
        ("openvino", "OpenVINO", options.openvino_python),
        ("llama-cpp", "llama.cpp", options.llama_cpp_python),
    ):
        if python:
            available[name] = participants.rollouts_alone(engine, python, threads)
            available[f"{name}-int8"] = participants.rollouts_alone(f"{engine}, int8", python, threads)
    chosen = []
    for name in options.engines.split(","):
        missing = available[name].why_missing() if name in available else "no interpreter given"
        if missing is None:
            chosen.append(available[name])
        else:
            console.print(Text(f"{name} left out: {missing}", style="yellow"))
    return chosen


def run_shape(
    workload: Workload, chosen: Sequence[Engine], options: argparse.Namespace, work: Path, console: Console
) -> dict[str, Any]:
    """Run, print and return all repeats of one shape."""
    shape = ARCHITECTURES[workload.model]
    with console.status(f"{workload.shape}: writing checkpoints"):
        folders = [
            write_checkpoint(work / f"{workload.shape}-{seed}", shape, seed=seed, dtype=options.dtype)
            for seed in (0, 1)
        ]
        reference = plain_read_and_copy(folders[1])
        torch.set_num_threads(options.threads)
        ceilings = measure_ceilings(torch.device("cpu"), CEILING_BYTES, CEILING_PRODUCT)
    least_s = least_seconds(workload, shape, ceilings)
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        turn = repeat % len(chosen)
        for engine in (*chosen[turn:], *chosen[:turn]):
            label = f"{workload.shape} {repeat + 1}/{options.repeats} {engine.name}"
            with console.status(label) as status:
                run = participants.measure(
                    engine,
                    workload,
                    folders,
                    threads=options.threads,
                    repeat=repeat,
                    log=work / f"{workload.shape}-{engine.name}-{repeat}.log",
                    # Called in this pass only.
                    progress=lambda stage: status.update(f"{label}: {stage}"),  # noqa: B023
                )
            runs.append(run)
            console.print(f"[dim]{label}: {'failed' if run['error'] else 'done'}[/dim]")
    names = [engine.name for engine in chosen]
    console.print(table(workload, runs, names, least_s))
    console.print(
        f"The limit: {ceilings.bandwidth / 1e9:.1f} GB/s and {ceilings.flops / 1e9:.0f} GFLOP/s, measured "
        "before; prompts at the latter, each decode step at the longer of reading weights and KV and of its "
        f"products: {least_s:.2f} s.",
        style="dim",
        highlight=False,
    )
    for note in footnotes(workload, runs, reference):
        console.print(Text(f"* {note.text}", style="red" if note.alarming else "dim"))
    return {
        "shape": workload.shape,
        "requests": workload.describe(),
        "reference": reference,
        "limit": {**ceilings.as_dict(), "least_s": least_s},
        "summary": summarise(runs, names),
        "runs": runs,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if an engine failed or none was there."""
    options = parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    facts = begin(console, threads=options.threads, dtype=options.dtype)
    with tempfile.TemporaryDirectory(prefix="caesura-bench-") as temporary:
        work = options.work_dir or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        chosen = choose_engines(options, Path(temporary) / "cache", console)
        if not chosen:
            return 1
        shapes = {"both": ["tiny", "0.6b"], "all": list(WORKLOADS)}.get(options.shape, [options.shape])
        results = [run_shape(WORKLOADS[shape], chosen, options, work, console) for shape in shapes]
    write_json(options.json, {"machine": facts, "shapes": results})
    failed = any(run["error"] for result in results for run in result["runs"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
