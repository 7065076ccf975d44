"""Structured output: tokens per second with and without a grammar, and what an engine spends on masks.

One engine; rows without a grammar, with a schema, and half of each take turns in an order that rotates. The
tokenizer is one of bytes, so texts are long, and the vocabulary is the shape's.

    python benchmarks/grammar.py --shape 0.6b --repeats 5 --json grammar.json
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from checkpoints import SHAPES, write_checkpoint, write_tokenizer
from harness.script import begin, in_turns, parser, table, write_json
from rich.console import Console

from caesura.client import SamplingParams, SchedulerClient, grammar, launch_scheduler

KV_TOKENS = 1 << 15
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1000},
        "orders": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
    },
    "required": ["name", "orders"],
}


def run(client: SchedulerClient, options: argparse.Namespace, every: int, seed: int) -> float:
    """Return the tokens per second of a batch in which one of ``every`` rows has a grammar; 0: none has."""
    text = grammar.json_schema(SCHEMA)
    started = perf_counter()
    handles = [
        client.submit(
            [3 + (31 * row + 7 * i + seed) % 4000 for i in range(32)],
            SamplingParams(
                max_new_tokens=options.new_tokens,
                seed=1 + seed,
                ignore_eos=True,
                grammar=text if every and row % every == 0 else None,
            ),
        )
        for row in range(options.rows)
    ]
    tokens = sum(len(handle.result().output_ids) for handle in handles)
    return tokens / (perf_counter() - started)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=("tiny", "0.6b"), default="tiny")
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--new-tokens", type=int, default=32)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    console = Console()
    facts = begin(console, shape=options.shape)
    sizes: dict[str, Any] = {"max_running_requests": options.rows, "kv_pool_tokens": KV_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape]
        base = write_checkpoint(Path(folder) / "base", shape)
        write_tokenizer(base, shape)
        with launch_scheduler(base, num_threads=options.threads, log_level="WARNING", **sizes) as client:
            ways = {"without": 0, "half": 2, "every row": 1}
            found = in_turns(
                {name: partial(run, client, options, every) for name, every in ways.items()}, options.repeats
            )
            spent = client.status().grammars
    assert spent is not None
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    rows = [(name, f"{speed:,.0f}", f"{speed / medians['without']:.1%}") for name, speed in medians.items()]
    console.print(table(None, ["rows with a grammar", "tok/s", "of without"], rows))
    mask_us = 1e6 * spent.mask_s / spent.masks
    console.print(
        f"{spent.masks} masks of {mask_us:.0f} µs; the wait for the grammar took {spent.wait_s:.2f} s in all"
    )
    write_json(options.json, {**facts, **vars(options), "tokens_per_second": found, "mask_us": mask_us})


if __name__ == "__main__":
    main()
