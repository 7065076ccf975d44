"""The memory of a warm-up, measured in a process of its own.

The process builds runners over a model with a large vocabulary and hardly any weights and runs each once at
the size of the request pool. The peak is the high-water mark of resident memory, kept by the kernel, over
what was resident just before. With a limit on addresses a run fails where that peak does not fit.

    PYTHONPATH=tests:benchmarks python -m support.warmup_peaks
"""

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from checkpoints import Shape, write_checkpoint
from harness.process_memory import MB, read_memory, reset_peak

from caesura.scheduler.execution.build import build_components, build_runner
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.layers.logits_processor import autotune_dummy_run_mode
from caesura.scheduler.memory.device_memory import empty_device_cache, is_out_of_memory
from caesura.scheduler.memory.device_module import device_module_for
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.runtime.engine_config import EngineConfig

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


@dataclass(frozen=True)
class Peak:
    fits: bool
    """True if it did not run out of memory; ``autotune`` logs it instead."""
    peak: int
    """Bytes, at most, over what was resident before."""
    kept: int
    """Bytes over it afterwards."""
    ms: float


def measure_peaks(model: Path, runs: Sequence[tuple[Run, int | None]]) -> list[Peak]:
    """Measure each of ``runs`` by a runner of its own over ``model``, one after the other in another process.

    Args:
        runs: what to run, and the bytes of addresses that are left to it, or None for all there are.
    """
    done = subprocess.run(
        [sys.executable, "-m", "support.warmup_peaks", str(model), json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Peak(**peak) for peak in json.loads(done.stdout)]


def _measure(model: str, run: Run, rows: int, room: int | None) -> Peak:
    sizes = {"max_running_requests": rows, "kv_pool_tokens": 1024}
    config = EngineConfig(model_path=model, device="cpu", dtype="float32", autotune=False, **sizes)
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
    try:
        if run == "autotune":
            runner.autotune(rows, HEAD_ROWS)
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
    """Limit this process in the block to ``room`` bytes of addresses beyond what it has."""
    if room is None:
        yield
        return
    fields = Path("/proc/self/status").read_text(encoding="utf-8").split()
    limit = (int(fields[fields.index("VmSize:") + 1]) << 10) + room
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def main() -> None:
    """Print a table, or what runs in this process measure as JSON."""
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        model, runs = sys.argv[1], json.loads(sys.argv[2])
        print(json.dumps([asdict(_measure(model, run, ROWS, room)) for run, room in runs]))
        return
    with tempfile.TemporaryDirectory() as folder:
        wide = write_checkpoint(Path(folder) / "wide", WIDE, dtype="float32")
        peaks = measure_peaks(wide, [(run, None) for run in RUNS])
        for name, peak in zip(RUNS.values(), peaks, strict=True):
            print(f"{name}: peak {peak.peak / MB:.0f} MB, kept {peak.kept / MB:.0f} MB")


if __name__ == "__main__":
    main()
