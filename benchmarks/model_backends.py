"""Rollouts by transformers' modules in the engine, beside its own model code and beside vLLM.

Engines of one checkpoint live at a time and generate one after the other in an order that rotates. Printed
are tokens per second of each run, their medians, and the medians' ratios.

    python benchmarks/model_backends.py --shape tiny --threads 2 --repeats 5
    python benchmarks/model_backends.py --architecture Olmo2ForCausalLM --vllm-python /opt/vllm/bin/python
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from checkpoints import SHAPES, Shape, write_checkpoint
from harness import engines
from harness.peer_process import PeerProcess
from harness.script import in_turns, parser, write_json

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

OWN = "Qwen3ForCausalLM"
"""The architecture of ``checkpoints.py``; others are written by transformers, with the same sizes."""
REQUESTS = {"tiny": (64, 32, 128), "0.6b": (32, 128, 64)}
"""Requests, tokens in and tokens out of each shape."""
KV_TOKENS = 1 << 15

Run = Callable[[int], float]
"""Tokens per second of one batch, drawn from a seed."""


def write(folder: Path, shape: Shape, architecture: str) -> None:
    if architecture == OWN:
        write_checkpoint(folder, shape)
        return
    import transformers

    model_class = getattr(transformers, architecture)
    sizes = {name: value for name, value in vars(shape).items() if name != "tie_word_embeddings"}
    config = model_class.config_class(**sizes, pad_token_id=None, dtype="bfloat16")
    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)


def prompts_of(shape: str, seed: int) -> list[list[int]]:
    requests, prompt, _ = REQUESTS[shape]
    return [[3 + (31 * row + 7 * i + seed) % 4000 for i in range(prompt)] for row in range(requests)]


def run_client(client: SchedulerClient, shape: str, seed: int) -> float:
    """Run a batch on an engine of this project."""
    params = SamplingParams(max_new_tokens=REQUESTS[shape][2], temperature=1.0, seed=seed, ignore_eos=True)
    started = perf_counter()
    results = client.generate(prompts_of(shape, seed), params, timeout=600)
    return sum(len(result.output_ids) for result in results) / (perf_counter() - started)


def run_peer(peer: PeerProcess, shape: str, seed: int) -> float:
    """Run a batch on vLLM, whose process takes the time."""
    found = peer.call(
        "rollout",
        engines.OP_TIMEOUT_S,
        prompts=prompts_of(shape, seed),
        max_new_tokens=REQUESTS[shape][2],
        samples=1,
    )
    return float(found["tokens"] / found["seconds"])


def start_vllm(stack: ExitStack, folder: str, options: argparse.Namespace, cache: Path) -> PeerProcess:
    """Return a process that has generated its first token."""
    shape, (_, prompt, output) = SHAPES[options.shape], REQUESTS[options.shape]
    engine = engines.vllm(options.vllm_python, options.threads, options.vllm_bind, cache)
    command = [engine.python, str(engines.PEERS / engine.script)]
    peer = stack.enter_context(PeerProcess(command, engine.environment, cache / "vllm.log"))
    peer.call(
        "start",
        engines.START_TIMEOUT_S,
        prompt=[3, 4, 5],
        model=folder,
        threads=options.threads,
        context_len=prompt + output,
        kv_tokens=KV_TOKENS,
        kv_bytes_per_token=4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim,
    )
    return peer


def start_all(stack: ExitStack, folder: str, options: argparse.Namespace, cache: Path) -> dict[str, Run]:
    backends: list[Literal["native", "transformers"]] = ["transformers"]
    if options.architecture == OWN:
        backends.insert(0, "native")
    runs: dict[str, Run] = {}
    for backend in backends:
        client = stack.enter_context(
            launch_scheduler(
                folder,
                model_backend=backend,
                num_threads=options.threads,
                kv_pool_tokens=KV_TOKENS,
                log_level="WARNING",
            )
        )
        runs[backend] = partial(run_client, client, options.shape)
    if options.vllm_python:
        runs["vllm"] = partial(run_peer, start_vllm(stack, folder, options, cache), options.shape)
    return runs


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of every run that counts, by engine."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "checkpoint"
        write(checkpoint, SHAPES[options.shape], options.architecture)
        runs = start_all(stack, str(checkpoint), options, Path(folder))
        for run in runs.values():
            run(0)
        return in_turns(runs, options.repeats, warm_up=0)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=sorted(REQUESTS), default="tiny")
    made.add_argument("--architecture", default=OWN, help="a class of transformers (default: %(default)s)")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--vllm-python", help="interpreter of an environment with vLLM (benchmarks/README.md)")
    made.add_argument("--vllm-bind", default="auto", help="VLLM_CPU_OMP_THREADS_BIND (default: auto)")
    options = made.parse_args()
    found = measure(options)
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, values in found.items():
        print(f"{name:>12}: {medians[name]:9,.0f} tok/s   ({', '.join(f'{v:,.0f}' for v in values)})")
    for name in medians.keys() - {"transformers"}:
        print(f"transformers / {name}: {medians['transformers'] / medians[name]:.2f}")
    write_json(options.json, {**vars(options), "tokens_per_second": found})


if __name__ == "__main__":
    main()
