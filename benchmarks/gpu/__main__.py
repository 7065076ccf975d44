"""One card, one call, no network: everything that a CPU cannot show, in sessions of ten minutes.

    python benchmarks/gpu --json gpu.json            # or: make gpu
    python benchmarks/gpu --json gpu.json --resume   # a further session: what the ones before had no time for
    python benchmarks/gpu --smoke                    # toy sizes on the CPU, which measure nothing
    python benchmarks/gpu --only versions graphs     # some sections, also those that have run

Makes its own checkpoints of random weights (on the device, into ``--work-dir``; /dev/shm where it is large
enough), measures what the card can do, and holds the engine against that. The sections that tell most for the
least risk come first: those that need neither a compiler of CUDA nor much memory. Each is written to the JSON
file when it ends, whatever ends it.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import captured, limits, peers, serving, updates
from gpu.plan import FULL, ITEMSIZE, SMOKE, Plan
from gpu.run import Run, Section, read, write
from gpu.session import is_due, run_session, taken_up
from gpu.tables import tables
from harness.machine import describe
from rich.console import Console

SECTIONS: dict[str, Section] = {
    "versions": Section(limits.versions, 30),
    "ceilings": Section(limits.ceilings, 40),
    "sdpa": Section(partial(limits.answers, backend="sdpa"), 60),
    "triton": Section(partial(limits.answers, backend="triton"), 60),
    "tests": Section(limits.gpu_tests, 150),
    "graphs": Section(captured.graphs, 60),
    "residency": Section(captured.residency, 45),
    "transports": Section(updates.transports, 60),
    "serving": Section(serving.serving, 200),
    "profile": Section(captured.profile, 45),
    "flashinfer": Section(partial(limits.answers, backend="flashinfer"), 240),
    "experts": Section(serving.experts, 90),
    "fp8": Section(serving.fp8, 240),
    "nccl": Section(updates.nccl, 30),
    "growth": Section(updates.growth, 60),
    "transformers": Section(peers.transformers, 120),
    "servers": Section(peers.servers, 240),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument(
        "--json", type=Path, help="write everything measured to this file, section by section"
    )
    parser.add_argument("--work-dir", type=Path, help="checkpoints and logs (default: temporary, removed)")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=[], help="sections")
    parser.add_argument("--skip", nargs="+", choices=tuple(SECTIONS), default=[], help="sections")
    parser.add_argument(
        "--budget", type=float, default=600.0, help="seconds after which none begins (default: 600)"
    )
    parser.add_argument(
        "--peer-timeout", type=float, default=100.0, help="seconds for each peer (default: 100)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what --json has, and run what it has not")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # in the process that has the device
    options = parser.parse_args(argv)
    if options.resume and not (options.json and options.json.exists()):
        parser.error("--resume needs the --json of an earlier session")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device: --smoke tries the script itself on the CPU")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    if options.until is not None:
        return run_sections(options)
    plan = SMOKE if options.smoke else FULL
    work = options.work_dir or _work_dir(plan)
    work.mkdir(parents=True, exist_ok=True)
    path = options.json or work / "gpu.json"
    earlier = taken_up(path) if options.resume else {}
    for name in chosen(options):
        if options.only or is_due(earlier, name):
            earlier.pop(name, None)
    write(path, earlier)
    try:
        until = str(time.time() + options.budget)
        last = ["--until", until, "--work-dir", str(work), "--json", str(path)]
        found = run_session([sys.executable, str(Path(__file__).parent), *arguments, *last], path)
        console = Console(width=None if sys.stdout.isatty() else 120)
        for table in tables(found):
            console.print(table)
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    return found


def run_sections(options: argparse.Namespace) -> dict[str, Any]:
    """Run what is due in this process, until the time is up or the device is lost to it."""
    device = torch.device("cpu") if options.smoke else torch.device("cuda", 0)
    plan, left_s = SMOKE if options.smoke else FULL, options.until - time.time()
    run = Run(plan, device, options.work_dir, options.json, left_s, options.peer_timeout)
    run.take_over(read(options.json))
    run.console.print(describe(run.found["machine"]), "|", run.found["machine"]["device"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for name in chosen(options):
        if name not in run.found:
            run.section(name, SECTIONS[name])
    return run.found


def chosen(options: argparse.Namespace) -> list[str]:
    return [name for name in SECTIONS if name in (options.only or SECTIONS) and name not in options.skip]


def _end_with(parent: int) -> None:
    """End this process and its group, a run of tests for example, once the one that watches it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _work_dir(plan: Plan) -> Path:
    """Return a folder in memory if there is room: the checkpoints are read several times."""
    shapes = (plan.shape, plan.shape, plan.experts, plan.fp8, plan.small, plan.small)
    needed = ITEMSIZE * sum(
        torch.Size(size).numel() for shape in shapes for size in shape.tensor_shapes().values()
    )
    memory = Path("/dev/shm")  # noqa: S108 (a folder of our own is made there)
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1.2 * needed
    return Path(tempfile.mkdtemp(prefix="caesura-gpu-", dir=memory if roomy else None))


if __name__ == "__main__":
    main()
