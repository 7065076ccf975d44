"""LoRA adapters: tokens per second by how many are used and by their rank, and what a swap takes.

For each rank two engines of one checkpoint live at a time, one without adapters and one with them; both, and
rows with different numbers of adapters, take turns in an order that rotates. Printed are medians, and their
ratios to the engine without adapters. Adapters are random, of all products in the layers. With ``--vllm``, an
interpreter that has vLLM, engines of vLLM take turns with them, compared with vLLM's own without adapters.

    python benchmarks/adapters.py --shape 0.6b --repeats 5 --vllm V/bin/python --json adapters.json
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from checkpoints import SHAPES, Shape, random_tensor, write_checkpoint
from harness.engines import OP_TIMEOUT_S, PEERS, START_TIMEOUT_S, vllm
from harness.limits import kv_bytes_per_token
from harness.peer_process import PeerProcess
from harness.script import begin, in_turns, parser, table, write_json
from rich.console import Console
from safetensors.torch import save_file

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

PROMPT_TOKENS = 32
KV_TOKENS = 1 << 15

Run = Callable[[int], float]
"""Tokens per second of one batch, drawn from a seed."""


def write_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> Path:
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in shape.tensor_shapes().items():
        if not name.endswith("_proj.weight"):
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for half, factor in (("A", (rank, size[1])), ("B", (size[0], rank))):
            key = f"{module}.lora_{half}.weight"
            tensors[key] = random_tensor(key, factor, seed=seed, dtype=torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def prompts_of(rows: int, seed: int) -> list[list[int]]:
    return [[3 + (31 * row + 7 * i + seed) % 4000 for i in range(PROMPT_TOKENS)] for row in range(rows)]


def run_client(client: SchedulerClient, options: argparse.Namespace, adapters: int, seed: int) -> float:
    """Run a batch whose rows have ``adapters`` adapters in turn; 0: none has one."""
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=1.0, seed=1 + seed, ignore_eos=True
    )
    started = perf_counter()
    handles = [
        client.submit(prompt, params, adapter=str(row % adapters) if adapters else None)
        for row, prompt in enumerate(prompts_of(options.rows, seed))
    ]
    tokens = sum(len(handle.result().output_ids) for handle in handles)
    return tokens / (perf_counter() - started)


def start_vllm(
    stack: ExitStack, base: Path, folders: Sequence[Path], rank: int, options: argparse.Namespace
) -> Run:
    engine = vllm(options.vllm, options.threads, "auto", base.parent / "cache")
    name = f"vllm-{rank}-{len(folders)}.log"
    command = [engine.python, str(PEERS / engine.script)]
    peer = stack.enter_context(PeerProcess(command, engine.environment, base.parent / name))
    shape = SHAPES[options.shape]
    peer.call(
        "start",
        START_TIMEOUT_S,
        prompt=prompts_of(1, 0)[0],
        model=str(base),
        threads=options.threads,
        context_len=KV_TOKENS // options.rows,
        kv_tokens=KV_TOKENS,
        kv_bytes_per_token=kv_bytes_per_token(shape, 2),
        adapters=list(map(str, folders)),
        rank=rank,
    )

    def run(seed: int) -> float:
        ask = {"max_new_tokens": options.new_tokens, "samples": 1}
        found = peer.call("rollout", OP_TIMEOUT_S, prompts=prompts_of(options.rows, seed), **ask)
        return float(found["tokens"] / found["seconds"])

    return run


def swap_seconds(
    client: SchedulerClient, folders: Sequence[Path], options: argparse.Namespace
) -> list[float]:
    """Replace an adapter that half of the rows have, while all of them decode."""
    params = SamplingParams(max_new_tokens=KV_TOKENS // options.rows - PROMPT_TOKENS, ignore_eos=True)
    handles = [
        client.submit(prompt, params, adapter="0" if row % 2 else None)
        for row, prompt in enumerate(prompts_of(options.rows, 0))
    ]
    found = []
    for number in range(options.swaps):
        started = perf_counter()
        client.load_adapter("0", folders[number % 2], on_running="keep")
        found.append(perf_counter() - started)
    client.abort([handle.rid for handle in handles])
    return found


def measure(base: Path, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    shape, largest = SHAPES[options.shape], max(options.adapters)
    folders = [write_adapter(base.parent / f"{rank}-{i}", shape, rank, i) for i in range(max(largest, 2))]
    shared = {"num_threads": options.threads, "kv_pool_tokens": KV_TOKENS, "log_level": "WARNING"}
    shared["max_running_requests"] = options.rows
    with ExitStack() as stack:
        plain = stack.enter_context(launch_scheduler(base, **shared))
        adapting = stack.enter_context(
            launch_scheduler(base, enable_lora=True, max_loras=largest, max_lora_rank=rank, **shared)
        )
        for number, folder in enumerate(folders[:largest]):
            adapting.load_adapter(str(number), folder)
        ways: dict[str, Run] = {"without": partial(run_client, plain, options, 0)}
        ways |= {str(count): partial(run_client, adapting, options, count) for count in options.adapters}
        if options.vllm is not None:
            for count in options.adapters:
                ways[f"vLLM, {count}"] = start_vllm(stack, base, folders[:count], rank, options)
        found = in_turns(ways, options.repeats)
        swaps = swap_seconds(adapting, folders, options)
    size = (folders[0] / "adapter_model.safetensors").stat().st_size
    return {"rank": rank, "tokens_per_second": found, "swap_s": swaps, "adapter_bytes": size}


def report(console: Console, results: Sequence[dict[str, Any]]) -> None:
    headings = ["rank", "adapters", "tok/s", "of without", "swap ms", "MB"]
    rows = []
    for result in results:
        medians = {way: statistics.median(found) for way, found in result["tokens_per_second"].items()}
        swap = f"{1e3 * statistics.median(result['swap_s']):.0f}"
        for way, speed in medians.items():
            ratio = f"{speed / medians['vLLM, 0' if way.startswith('vLLM') else 'without']:.1%}"
            size = f"{result['adapter_bytes'] / 1e6:.1f}"
            rows.append((str(result["rank"]), way, f"{speed:,.0f}", ratio, swap, size))
    console.print(table(None, headings, rows, words=2))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=("tiny", "0.6b"), default="tiny")
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--new-tokens", type=int, default=32)
    made.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64])
    made.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16], help="numbers used at once")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--swaps", type=int, default=20)
    made.add_argument("--vllm", help="interpreter that has vLLM; needs 0 among --adapters")
    options = made.parse_args()
    console = Console()
    facts = begin(console, shape=options.shape)
    with tempfile.TemporaryDirectory() as folder:
        base = write_checkpoint(Path(folder) / "base", SHAPES[options.shape])
        results = [measure(base, rank, options) for rank in options.ranks]
    report(console, results)
    write_json(options.json, {**facts, **vars(options), "results": results})


if __name__ == "__main__":
    main()
