"""What a warm-up takes and gives: its peak memory with and without logits, and the first token with and without it.

The peak is measured in a process of its own, which builds runners over a model with a large vocabulary and hardly any
weights and runs each once at the size of the request pool: the high-water mark of resident memory, kept by the kernel,
over what was resident just before. With a limit on addresses a run fails where that peak does not fit.

The first token is measured on real engines, with and without warm-up in turns: seconds until ready, then milliseconds of
the first request of one token and of the next ones like it.

    python benchmarks/warmup_peak.py
    python benchmarks/warmup_peak.py --model /tmp/b06 --starts 5
"""

import argparse
import gc
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from checkpoints import Shape, write_checkpoint
from harness.machine import describe, machine_facts
from harness.process_memory import MB, read_memory, reset_peak
from rich.console import Console
from rich.table import Table

from caesura.client import SamplingParams, launch_scheduler
from caesura.scheduler.execution.autotune import WarmUp
from caesura.scheduler.execution.build import build_components, build_runner
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.layers.logits_processor import autotune_dummy_run_mode
from caesura.scheduler.memory.device_memory import empty_device_cache, is_out_of_memory
from caesura.scheduler.memory.device_module import device_module_for
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.runtime.config import EngineConfig

Run = Literal["dummy", "logits", "autotune"]
RUNS: dict[Run, str] = {
    "logits": "a step of all rows, logits included",
    "dummy": "the same as a dummy run, without them",
    "autotune": "dummy run, then head and sampler at bounded rows",
}
ROWS, HEAD_ROWS = 512, 64
WIDE = Shape(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=151936,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
)
PROMPT_TOKENS, NEXT_REQUESTS = 16, 8


@dataclass(frozen=True)
class Peak:
    """Of one run."""

    fits: bool
    """It did not run out of memory; ``autotune`` logs it instead."""
    peak: int
    """Bytes, at most, over what was resident before."""
    kept: int
    """Bytes over it afterwards."""
    ms: float


@dataclass(frozen=True)
class FirstToken:
    """Medians over the starts of an engine."""

    ready_s: float
    warm_up_ms: float
    """Of it, as the engine says in its log; 0 where it starts cold."""
    first_ms: float
    """The first request of :data:`PROMPT_TOKENS` prompt tokens and one more."""
    next_ms: float
    """Those after it."""


def measure_peaks(model: Path, runs: Sequence[tuple[Run, int | None]], *, rows: int = ROWS) -> list[Peak]:
    """Each of ``runs`` by a runner of its own over ``model``, one after the other in another process.

    Args:
        runs: what to run, and the bytes of addresses that are left to it. None: all there are.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(runs), "--model", str(model), "--rows", str(rows)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Peak(**peak) for peak in json.loads(done.stdout)]


def _measure(model: str, run: Run, rows: int, room: int | None) -> Peak:
    """In this process, which has next to nothing in the allocator that could be used again."""
    config = EngineConfig(
        model_path=model,
        device="cpu",
        dtype="float32",
        max_running_requests=rows,
        kv_pool_tokens=1024,
        autotune=False,
    )
    with closing(ComponentResidencyManager("cpu")) as residency:
        loaded, pool, routing, _ = build_components(config, residency)
        runner = build_runner(config, loaded, pool, routing)
        with torch.inference_mode(), autotune_dummy_run_mode():
            runner._dummy_run(1)  # what a first run loads and starts is not the subject
        gc.collect()
        empty_device_cache(device_module_for("cpu"))
        pid = os.getpid()
        reset_peak(pid)
        before, started = read_memory(pid).resident, time.perf_counter()
        with _addresses(room):
            fits = _run(runner, run, rows)
        ms = 1e3 * (time.perf_counter() - started)
        after = read_memory(pid)
        return Peak(fits, after.peak - before, after.resident - before, ms)


@torch.inference_mode()
def _run(runner: ModelRunner, run: Run, rows: int) -> bool:
    """Whether it did not run out of memory, as far as it says."""
    try:
        if run == "autotune":
            runner.autotune(WarmUp(rows=rows, lm_head_rows=HEAD_ROWS))
        else:
            with autotune_dummy_run_mode() if run == "dummy" else nullcontext():
                runner._dummy_run(rows)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


@contextmanager
def _addresses(room: int | None) -> Iterator[None]:
    """Within the block this process gets ``room`` bytes of addresses beyond what it has."""
    if room is None:
        yield
        return
    fields = Path("/proc/self/status").read_text(encoding="utf-8").split()
    limit = (int(fields[fields.index("VmSize:") + 1]) << 10) + room
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def measure_first_tokens(model: Path, starts: int, threads: int | None) -> dict[bool, FirstToken]:
    """With warm-up (True) and without, in turns."""
    found: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for start in range(starts):
        for autotune in (True, False) if start % 2 else (False, True):
            found[autotune].append(_start(model, autotune, threads))
    return {autotune: FirstToken(*map(median, zip(*times))) for autotune, times in found.items()}


def _start(model: Path, autotune: bool, threads: int | None) -> tuple[float, ...]:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=0)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as log:
        started = time.perf_counter()
        with launch_scheduler(
            model,
            device="cpu",
            kv_pool_tokens=4096,
            num_threads=threads,
            autotune=autotune,
            log_path=log.name,
        ) as client:
            ready = time.perf_counter() - started
            times = []
            for request in range(1 + NEXT_REQUESTS):
                prompt = [2 + request + token for token in range(PROMPT_TOKENS)]
                begun = time.perf_counter()
                client.generate(input_ids=prompt, sampling_params=params)
                times.append(1e3 * (time.perf_counter() - begun))
        said = re.search(r"warmed up .* in ([0-9.]+) ms", log.read())
    return ready, float(said[1]) if said else 0.0, times[0], median(times[1:])


def _report(arguments: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wide = write_checkpoint(Path(folder) / "wide", WIDE, dtype="float32")
        peaks = Table(
            "run", "peak, MB", "kept, MB", "ms", title=f"{arguments.rows} rows, {WIDE.vocab_size} tokens"
        )
        measured = measure_peaks(wide, [(run, None) for run in RUNS], rows=arguments.rows)
        for name, peak in zip(RUNS.values(), measured, strict=True):
            peaks.add_row(name, *(f"{value:.1f}" for value in (peak.peak / MB, peak.kept / MB, peak.ms)))
        console.print(peaks)
        model = Path(arguments.model) if arguments.model else write_checkpoint(Path(folder) / "tiny", "tiny")
        first = Table(
            "",
            "ready, s",
            "of it warm-up, ms",
            "first token, ms",
            "next ones, ms",
            title=f"{model.name}, {arguments.starts} starts",
        )
        for autotune, times in measure_first_tokens(model, arguments.starts, arguments.threads).items():
            figures = (
                f"{times.ready_s:.2f}",
                f"{times.warm_up_ms:.1f}",
                f"{times.first_ms:.1f}",
                f"{times.next_ms:.1f}",
            )
            first.add_row("warm" if autotune else "cold", *figures)
        console.print(first)
    console.print(describe(machine_facts()))


def main() -> None:
    """Both tables, or one run in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="size of the request pool")
    parser.add_argument("--starts", type=int, default=5, help="engines with warm-up, and as many without")
    parser.add_argument("--threads", type=int, help="of each engine; torch's number by default")
    parser.add_argument("--model", help="checkpoint of the first tokens; the tiny shape by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        torch.set_num_threads(1)
        runs = json.loads(arguments.child)
        peaks = [asdict(_measure(arguments.model, run, arguments.rows, room)) for run, room in runs]
        sys.stdout.write(json.dumps(peaks))
        return
    _report(arguments, Console())


if __name__ == "__main__":
    main()
