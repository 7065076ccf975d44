"""One card, one call, no network: everything that a CPU cannot show, in ten minutes.

    python benchmarks/gpu --json gpu.json         # or: make gpu
    python benchmarks/gpu --smoke                 # toy sizes on the CPU, which measure nothing
    python benchmarks/gpu --only versions graphs  # some sections

Makes its own checkpoints of random weights (on the device, into ``--work-dir``; /dev/shm where it is large
enough), measures what the card can do, and holds the engine against that. Sections in the order in which they
matter; each is written to the JSON file when it ends.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import captured, limits, peers, serving, updates
from gpu.plan import FULL, ITEMSIZE, SMOKE, Plan
from gpu.run import DeviceLostError, Run, Section
from gpu.tables import tables
from harness.machine import describe

SECTIONS: dict[str, Section] = {
    "versions": limits.versions,
    "ceilings": limits.ceilings,
    "plans": limits.plans,
    "tests": limits.gpu_tests,
    "graphs": captured.graphs,
    "nccl": updates.nccl,
    "transports": updates.transports,
    "residency": captured.residency,
    "serving": serving.serving,
    "profile": captured.profile,
    "experts": serving.experts,
    "fp8": serving.fp8,
    "growth": updates.growth,
    "transformers": peers.transformers,
    "servers": peers.servers,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument(
        "--json", type=Path, help="write everything measured to this file, section by section"
    )
    parser.add_argument("--work-dir", type=Path, help="checkpoints and logs (default: temporary, removed)")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), help="sections")
    parser.add_argument("--skip", nargs="+", choices=tuple(SECTIONS), default=[], help="sections")
    parser.add_argument(
        "--budget", type=float, default=600.0, help="seconds after which none begins (default: 600)"
    )
    parser.add_argument(
        "--peer-timeout", type=float, default=150.0, help="seconds for each peer (default: 150)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where the run that wrote --json has stopped"
    )
    options = parser.parse_args(argv)
    if options.resume and not (options.json and options.json.exists() and options.work_dir):
        parser.error("--resume needs the --json and the --work-dir of the run that stopped")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device: --smoke tries the script itself on the CPU")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(argv)
    plan = SMOKE if options.smoke else FULL
    work = options.work_dir or _work_dir(plan)
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if options.smoke else torch.device("cuda", 0)
    run = Run(plan, device, work, options.json, options.budget, options.peer_timeout)
    if options.resume:
        run.take_over(json.loads(options.json.read_text(encoding="utf-8")))
    run.console.print(describe(run.found["machine"]), "|", run.found["machine"]["device"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        for name, section in SECTIONS.items():
            if name in options.only and name not in options.skip and name not in run.found:
                run.section(name, section)
        for table in tables(run.found):
            run.console.print(table)
    except DeviceLostError as error:
        run.console.print(f"[red]the device is lost to this process, a new one goes on: {error}[/red]")
        _go_on_in_a_new_process(options, work, run)
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    return run.found


def _go_on_in_a_new_process(options: argparse.Namespace, work: Path, run: Run) -> None:
    """Go on in a new process and wait for it: whoever made the folder removes it."""
    if options.json is None:
        return
    arguments = [
        "--json",
        str(options.json),
        "--work-dir",
        str(work),
        "--resume",
        "--budget",
        str(run.left_s()),
    ]
    arguments += ["--peer-timeout", str(options.peer_timeout), "--only", *options.only]
    arguments += ["--skip", *options.skip] if options.skip else []
    subprocess.run([sys.executable, str(Path(__file__).parent), *arguments], check=False)
    run.take_over(json.loads(options.json.read_text(encoding="utf-8")))


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
