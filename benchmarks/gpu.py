"""One card, one call, no network: decode against the bandwidth limit, prefill against the matmul limit, pauses, updates.

    python benchmarks/gpu.py --json gpu.json        # a Qwen3-8B shape in bfloat16; under ten minutes are planned
    python benchmarks/gpu.py --smoke                # the same code at a toy size on the CPU, which measures nothing

Makes its own checkpoints of random weights (on the device, into ``--work-dir``; twice 16.4 GB, /dev/shm where it is large
enough), measures the card's bandwidth and matmul peak, then everything through a real scheduler process and client:

- a decode step at each batch size, by the arrivals of one watched request's tokens while the others decode, against the
  bytes that it must read over the measured bandwidth;
- whole prompts, one token each, against their products over the measured peak;
- a rollout, for Caesura, ``transformers``' ``generate`` and its continuous batching;
- pause, resume and disk updates under load, as distributions;
- reserved memory over many in-place updates of a smaller model.

The JSON file is written again after every section, so a run that is cut off leaves what it had.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import INIT_STD, SHAPES, Shape, write_checkpoint
from harness.limits import (
    Ceilings,
    kv_bytes_per_token,
    measure_ceilings,
    prefill_flops,
    streamed_weight_bytes,
)
from harness.machine import describe, machine_facts
from memory_over_updates import SETTLED, settled_growth
from rich.console import Console
from rich.table import Table

from caesura.client import AsyncSchedulerClient, LaunchedScheduler, SamplingParams, launch_scheduler

sys.path.insert(0, str(Path(__file__).parent / "peers"))  # where peers look for each other

from caesura_peer import CaesuraEngine
from measure import measure_pauses, measure_updates

ITEMSIZE = 2
"""bfloat16"""

QWEN3_8B = Shape(
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    bos_token_id=151643,
    eos_token_id=151645,
    tie_word_embeddings=False,
)
TOY = Shape(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of everything; lengths in tokens."""

    shape: Shape
    small: Shape
    """For the run over many updates."""
    buffer_bytes: int
    product_size: int
    batches: tuple[int, ...]
    prompt_tokens: int
    steps: int
    """Decode steps that are averaged over."""
    prefill: tuple[int, int]
    """Prompts, and their length."""
    requests: int
    new_tokens: int
    """Of the rollout."""
    chunk_tokens: int
    cycles: int
    """Pauses under load."""
    large_updates: int
    updates: int
    """Of the small model."""
    peer_pool: dict[str, int]
    """Sizes of continuous batching. Empty: its own."""

    @property
    def context_len(self) -> int:
        """Room for the longest request: one that others wait for decodes meanwhile."""
        return max(self.prefill[1] + 1, self.prompt_tokens + 4 * self.steps)

    @property
    def rows(self) -> int:
        """Requests at a time."""
        return max(*self.batches, self.requests)

    @property
    def kv_tokens(self) -> int:
        """Room for the largest batch while it is measured; prefills and pauses have fewer requests."""
        return self.rows * (self.prompt_tokens + 4 * self.steps)

    @property
    def load_tokens(self) -> int:
        """Output of requests that are paused: as long as fits, so that few end meanwhile."""
        return min(self.context_len, self.kv_tokens // self.requests) - self.prompt_tokens


FULL = Plan(
    shape=QWEN3_8B,
    small=SHAPES["0.6b"],
    buffer_bytes=8 << 30,
    product_size=8192,
    batches=(1, 8, 64, 256),
    prompt_tokens=512,
    steps=128,
    prefill=(8, 4096),
    requests=64,
    new_tokens=128,
    chunk_tokens=2048,
    cycles=200,
    large_updates=5,
    updates=200,
    peer_pool={},
)
SMOKE = Plan(
    shape=TOY,
    small=TOY,
    buffer_bytes=4 << 20,
    product_size=64,
    batches=(1, 3),
    prompt_tokens=24,
    steps=8,
    prefill=(2, 40),
    requests=3,
    new_tokens=6,
    chunk_tokens=64,
    cycles=4,
    large_updates=1,
    updates=SETTLED + 4,
    peer_pool={"num_blocks": 16, "max_batch_tokens": 64},
)


@dataclass(frozen=True)
class OnDevice:
    """A shape whose tensors are drawn on the device: a CPU would take minutes for 8 billion normal values."""

    shape: Shape
    device: torch.device

    @property
    def bos_token_id(self) -> int:
        return self.shape.bos_token_id

    @property
    def eos_token_id(self) -> int:
        return self.shape.eos_token_id

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shape.tensor_shapes()

    def config(self, dtype: str) -> dict[str, Any]:
        return self.shape.config(dtype)

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """A function of (seed, name, shape, device type)."""
        size = self.tensor_shapes()[name]
        if len(size) == 1:
            return torch.ones(size, dtype=dtype)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.empty(size, dtype=dtype, device=self.device)
        return drawn.normal_(std=INIT_STD, generator=generator).cpu()


class Run:
    """One benchmark run: its sections fill ``found``."""

    def __init__(self, plan: Plan, device: torch.device, work: Path, json_path: Path | None) -> None:
        self.plan, self.device, self.work, self._json_path = plan, device, work, json_path
        self.console = Console(width=None if sys.stdout.isatty() else 120)
        self.found: dict[str, Any] = {"machine": machine_facts() | {"device": _device_name(device)}}
        self.ceilings = Ceilings(1.0, 1.0, 1.0)
        self.folders: list[Path] = []

    def record(self, section: str, value: Any) -> None:
        """Keep ``value`` and write everything so far."""
        self.found[section] = value
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")

    def launch(self, folder: Path) -> LaunchedScheduler:
        """A scheduler on ``folder``."""
        return launch_scheduler(
            folder,
            device=self.device.type,
            dtype="bfloat16",
            context_len=self.plan.context_len,
            kv_pool_tokens=self.plan.kv_tokens,
            max_running_requests=self.plan.rows,
            chunked_prefill_size=self.plan.chunk_tokens,
            prefix_cache=False,
            log_path=self.log_of(folder),
        )

    def log_of(self, folder: Path) -> Path:
        """What the engine on ``folder`` prints."""
        return self.work / f"engine-{folder.name}.log"

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Uniform random ids."""
        rng = random.Random(seed)
        return [[rng.randrange(self.plan.shape.vocab_size) for _ in range(length)] for _ in range(count)]


def measure_limits(run: Run) -> None:
    """The card alone."""
    run.ceilings = measure_ceilings(run.device, run.plan.buffer_bytes, run.plan.product_size)
    run.record("limits", run.ceilings.as_dict())
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def write_checkpoints(run: Run) -> None:
    """Two of the large shape and two of the small one."""
    start = time.perf_counter()
    for name, shape in (("large", run.plan.shape), ("small", run.plan.small)):
        for seed in (0, 1):
            source = OnDevice(shape, run.device)
            run.folders.append(write_checkpoint(run.work / f"{name}-{seed}", source, seed=seed, shards=8))
    run.record("checkpoints_s", time.perf_counter() - start)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


async def decode(run: Run, client: AsyncSchedulerClient) -> list[dict[str, Any]]:
    """Mean step while all rows decode, by batch size."""
    plan, rows = run.plan, []
    weights = streamed_weight_bytes(plan.shape, ITEMSIZE)
    per_token = kv_bytes_per_token(plan.shape, ITEMSIZE)
    for batch in plan.batches:
        *others, watched = run.prompts(batch, plan.prompt_tokens, batch)
        for prompt in others:  # submitted first and longer: they decode all the time that the last one does
            await client.submit(prompt, SamplingParams(max_new_tokens=4 * plan.steps, ignore_eos=True))
        params = SamplingParams(max_new_tokens=plan.steps + 9, ignore_eos=True)
        handle, times = await client.submit(watched, params, stream=True), []
        held = batch * (
            plan.prompt_tokens + plan.steps // 2
        )  # at least; a short run may end before status is read
        async for _ in handle:
            times.append(time.perf_counter())
            if len(times) == plan.steps // 2:
                held = max(held, (await client.status()).kv.held)
        await client.abort(abort_all=True)
        steps = times[8:]
        step = (steps[-1] - steps[0]) / (len(steps) - 1)
        limit = (weights + held * per_token) / run.ceilings.bandwidth
        rows.append(
            {"batch": batch, "step_s": step, "limit_s": limit, "share": limit / step, "kv_tokens": held}
        )
    return rows


async def prefill(run: Run, client: AsyncSchedulerClient) -> dict[str, Any]:
    """Median of three, after one that is not counted."""
    count, length = run.plan.prefill
    seconds = []
    for seed in range(4):
        prompts = run.prompts(count, length, 1000 + seed)
        start = time.perf_counter()
        await client.generate(prompts, SamplingParams(max_new_tokens=1, ignore_eos=True))
        seconds.append(time.perf_counter() - start)
    taken = statistics.median(seconds[1:])
    limit = prefill_flops(run.plan.shape, count, length) / run.ceilings.flops
    return {
        "prompts": count, "length": length, "seconds": taken, "limit_s": limit, "share": limit / taken,
        "tokens_per_s": count * length / taken,
    }  # fmt: skip


async def rollout(run: Run, client: AsyncSchedulerClient) -> float:
    """Tokens per second of the second of two whole runs."""
    plan, seconds = run.plan, 0.0
    for seed in (1, 2):
        prompts = run.prompts(plan.requests, plan.prompt_tokens, seed)
        start = time.perf_counter()
        await client.generate(prompts, SamplingParams(max_new_tokens=plan.new_tokens, ignore_eos=True))
        seconds = time.perf_counter() - start
    return plan.requests * plan.new_tokens / seconds


async def engine_sections(run: Run) -> None:
    """Everything that one engine of the large shape is asked."""
    plan = run.plan
    start = time.perf_counter()
    launched = run.launch(run.folders[0])
    client = AsyncSchedulerClient(launched.endpoint)
    engine = CaesuraEngine(launched, client)
    try:
        await client.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
        run.record("cold_start_s", time.perf_counter() - start)
        run.record("decode", await decode(run, client))
        run.record("prefill", await prefill(run, client))
        run.record("rollout", {"Caesura": await rollout(run, client)})
        load = run.prompts(plan.requests, plan.prompt_tokens, 3)
        room = plan.load_tokens
        run.record("pauses", await measure_pauses(engine, load, room, plan.cycles, seed=0))
        folders = [str(folder) for folder in run.folders[:2]]
        run.record("updates", await measure_updates(engine, load, room, *folders, plan.large_updates))
    finally:
        await engine.close()
    lines = run.log_of(run.folders[0]).read_text(encoding="utf-8").splitlines()
    run.record("engine_says", [line for line in lines if "attention by" in line or "decode steps" in line])


def growth(run: Run) -> None:
    """Reserved bytes after each of many updates in place, with requests in flight."""
    reserved: list[int] = []
    paused_s, update_s = [], []
    params = SamplingParams(max_new_tokens=max(4, run.plan.steps // 4), ignore_eos=True)
    with run.launch(run.folders[2]) as client:
        for turn in range(1, run.plan.updates + 1):
            prompts = run.prompts(4, run.plan.prompt_tokens, turn)
            handles = [client.submit(prompt, params) for prompt in prompts]
            start = time.perf_counter()
            client.pause("in_place")
            paused_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            client.update_weights_from_disk(run.folders[2 + turn % 2], flush_cache=False)
            update_s.append(time.perf_counter() - start)
            after = client.continue_generation().reserved_after
            assert after is not None, "an engine that was paused says it"
            reserved.append(after)
            for handle in handles:
                handle.result()
    total, late = settled_growth(reserved)
    run.record(
        "growth",
        {
            "updates": len(reserved), "reserved": reserved, "growth_bytes": total, "late_bytes": late,
            "pause_s": paused_s, "update_s": update_s,
        },
    )  # fmt: skip


def peers(run: Run, timeout_s: float) -> None:
    """transformers, each way of using it in a process of its own, on the same checkpoint."""
    plan, found = run.plan, {}
    for kind in ("eager", "continuous"):
        options = {
            "kind": kind, "model": str(run.folders[0]), "device": run.device.type, "batches": plan.batches,
            "prompt_tokens": plan.prompt_tokens, "steps": min(plan.steps, 32), "requests": plan.requests,
            "new_tokens": plan.new_tokens, "vocab_size": plan.shape.vocab_size, "pool": plan.peer_pool,
        }  # fmt: skip
        script = Path(__file__).parent / "harness" / "gpu_transformers.py"
        try:
            done = subprocess.run(
                [sys.executable, str(script), json.dumps(options)],
                capture_output=True, text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
            lines = done.stdout.strip().splitlines() or [""]
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            found[kind] = json.loads(lines[-1]) if lines[-1].startswith("{") else {"error": reason[0]}
        except subprocess.TimeoutExpired:
            found[kind] = {"error": f"not done after {timeout_s:.0f} s"}
    run.record("transformers", found)


def tables(found: dict[str, Any]) -> list[Table]:
    """What was measured, for people."""
    limits, theirs = found["limits"], found.get("transformers", {})
    ceilings = Ceilings(**limits)
    decode_table = Table(
        title=f"decode, limit at {ceilings.bandwidth / 1e12:.2f} TB/s measured", title_justify="left"
    )
    for title in ("batch", "step", "limit", "of the limit", "tok/s", "transformers step"):
        decode_table.add_column(title, justify="right")
    for row in found["decode"]:
        step = theirs.get("eager", {}).get("step_s", {}).get(str(row["batch"]))
        decode_table.add_row(
            str(row["batch"]), _ms(row["step_s"]), _ms(row["limit_s"]), f"{row['share']:.0%}",
            f"{row['batch'] / row['step_s']:,.0f}", "–" if step is None else _ms(step),  # noqa: RUF001
        )  # fmt: skip
    other = Table(title="the rest", title_justify="left", show_header=False)
    done = found["prefill"]
    other.add_row(
        f"prefill, {done['prompts']} × {done['length']}",  # noqa: RUF001
        f"{done['tokens_per_s']:,.0f} tok/s, {done['share']:.0%} of {limits['flops'] / 1e12:,.1f} TFLOP/s measured",
    )
    other.add_row("rollout", f"{found['rollout']['Caesura']:,.0f} tok/s")
    for kind, result in theirs.items():
        rate = result.get("rollout_tokens_per_s")
        other.add_row(f"rollout, transformers {kind}", result.get("error") or f"{rate:,.0f} tok/s")
    pauses, updates = found["pauses"], found["updates"]
    other.add_row("pause acknowledged", _spread(pauses["pause_s"]))
    for variant, values in pauses["resume_s"].items():
        other.add_row(f"resume to next token, {variant}", _spread(values))
    other.add_row("disk update", _spread(updates["update_s"]))
    other.add_row("pause, update, resume to next token", _spread(updates["gap_s"]))
    if "growth" in found:
        grown = found["growth"]
        other.add_row(
            f"reserved growth, update 10 to {grown['updates']} (small)",
            f"{grown['growth_bytes'] / 2**20:.2f} MB",
        )
        other.add_row("disk update (small)", _spread(grown["update_s"]))
    for line in found.get("engine_says", []):
        other.add_row("the engine says", line)
    return [decode_table, other]


def _spread(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.99))
    return f"p50 {_ms(p50)}, p99 {_ms(p99)}, max {_ms(ordered[-1])} ({len(ordered)})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (smoke: measures nothing)"


def _work_dir(needed: int) -> Path:
    """In memory where there is room, since the checkpoints are read several times."""
    memory = Path("/dev/shm")  # noqa: S108 (a folder of our own is made there)
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1.2 * needed
    return Path(tempfile.mkdtemp(prefix="caesura-gpu-", dir=memory if roomy else None))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--work-dir", type=Path, help="checkpoints and logs (default: temporary, removed)")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--peer-timeout", type=float, default=150.0, help="seconds for each (default: 150)")
    options = parser.parse_args(argv)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device: --smoke tries the script itself on the CPU")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what was measured."""
    options = parse(argv)
    plan = SMOKE if options.smoke else FULL
    device = torch.device("cpu" if options.smoke else "cuda")
    needed = 2 * ITEMSIZE * sum(torch.Size(s).numel() for s in plan.shape.tensor_shapes().values())
    work = options.work_dir or _work_dir(needed)
    work.mkdir(parents=True, exist_ok=True)
    run = Run(plan, device, work, options.json)
    run.console.print(describe(run.found["machine"]), "|", run.found["machine"]["device"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        measure_limits(run)
        write_checkpoints(run)
        asyncio.run(engine_sections(run))
        growth(run)
        if not options.no_peers:
            peers(run, options.peer_timeout)
        for table in tables(run.found):
            run.console.print(table)
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    return run.found


if __name__ == "__main__":
    main()
