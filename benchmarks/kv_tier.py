"""Rollouts with and without a tier for KV, over a release of the pool and with a pool that is too small.

``release``: all requests decode when a pause retracts them; the KV pool is released and resumed, and the time
from continue until all have ended is measured. ``preemption``: the time of the same requests in a pool that
holds a third of them. ``evicted``: the time of the same prompts again, in that pool. Both ways take turns,
with prompts that share nothing.

    python benchmarks/kv_tier.py --shape 0.6b --json kv_tier.json
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from checkpoints import SHAPES, write_checkpoint
from harness.script import begin, in_turns, parser, table, write_json
from rich.console import Console

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

Row = dict[str, float]


def submit(client: SchedulerClient, options: argparse.Namespace, turn: int) -> list[Any]:
    params = SamplingParams(max_new_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    first = options.requests * (turn + 1)  # turns count from -1
    return [
        client.submit([3 + first + number, *range(5, 4 + options.prompt_tokens)], params)
        for number in range(options.requests)
    ]


def figures(client: SchedulerClient) -> Row:
    tier = client.status().kv_tier
    names = "hit_tokens", "load_s", "store_s", "saved_prefill_s"
    return {name: 0.0 if tier is None else getattr(tier, name) for name in names}


def release(client: SchedulerClient, options: argparse.Namespace, turn: int) -> Row:
    before, handles = figures(client), submit(client, options, turn)
    while client.status().running_requests < options.requests:
        sleep(0.01)
    client.pause("retract")
    started = perf_counter()
    client.release_memory(["kv_cache"])
    client.resume_memory(["kv_cache"])
    resumed = perf_counter()
    client.continue_generation()
    for handle in handles:
        handle.result()
    row = {"release_s": resumed - started, "rest_s": perf_counter() - resumed}
    return row | {name: value - before[name] for name, value in figures(client).items()}


def preemption(client: SchedulerClient, options: argparse.Namespace, turn: int) -> Row:
    before, started = figures(client), perf_counter()
    for handle in submit(client, options, turn):
        handle.result()
    row = {"release_s": 0.0, "rest_s": perf_counter() - started}
    return row | {name: value - before[name] for name, value in figures(client).items()}


def evicted(client: SchedulerClient, options: argparse.Namespace, turn: int) -> Row:
    for handle in submit(client, options, turn):
        handle.result()
    return preemption(client, options, turn)


SCENES = {"release": release, "preemption": preemption, "evicted": evicted}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    made.add_argument("--requests", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=256)
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=3)
    options = made.parse_args()
    console = Console()
    facts = begin(console, shape=options.shape)
    most = options.requests * (options.prompt_tokens + options.new_tokens + 16)
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        base = write_checkpoint(Path(folder) / "base", SHAPES[options.shape])
        for scene, run in SCENES.items():
            shared: dict[str, Any] = {"num_threads": options.threads, "log_level": "WARNING"}
            shared["kv_pool_tokens"] = most if scene == "release" else most // 3
            with ExitStack() as stack:
                ways = {}
                for way, nbytes in (("none", 0), ("tier", 4 << 30)):
                    engine = launch_scheduler(base, kv_tier_bytes=nbytes, **shared)
                    ways[way] = partial(run, stack.enter_context(engine), options)
                results[scene] = found = in_turns(ways, options.repeats)
            for way in ways:
                row = {name: median(each[name] for each in found[way]) for name in found[way][0]}
                copies = row["load_s"] + row["store_s"]
                cells = (row["release_s"], row["rest_s"], copies, row["saved_prefill_s"])
                rows.append(
                    (scene, way, *(f"{1e3 * each:,.0f}" for each in cells), f"{row['hit_tokens']:,.0f}")
                )
    heads = ["", "", "release ms", "rest ms", "copies ms", "prefill saved ms", "tokens saved"]
    console.print(table(None, heads, rows, words=2))
    write_json(options.json, {**facts, **vars(options), "results": results})


if __name__ == "__main__":
    main()
