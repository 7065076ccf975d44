"""Rollouts with an option of sampling beside plain ones: what it costs to ask for it.

One engine has all ways in turns. ``one``: the last of the options, by the first request of a rollout alone.

    python benchmarks/sampling_options.py --shape tiny --json options.json
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from architectures import ARCHITECTURES
from checkpoints import write_checkpoint
from harness.script import begin, in_turns, parser, table, write_json
from harness.workload import WORKLOADS, Workload
from rich.console import Console

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

Options = dict[str, Any]

WAYS: dict[str, tuple[Options, Options]] = {
    "plain": ({}, {}),
    "greedy": ({"temperature": 0.0}, {}),
    "top_p": ({"top_p": 0.95}, {}),
    "top_k": ({"top_k": 50}, {}),
    "min_p": ({"min_p": 0.05}, {}),
    "logit_bias": ({"logit_bias": {5: 1.0}}, {}),
    "min_new_tokens": ({"min_new_tokens": 20, "stop_token_ids": [2]}, {}),
    "logprobs": ({}, {"return_logprob": True}),
    "top_logprobs": ({}, {"return_logprob": True, "top_logprobs_num": 5}),
    "sampling_mask": ({"top_k": 50}, {"return_sampling_mask": True}),
    "frequency_penalty": ({"frequency_penalty": 0.5}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {}),
}
"""Parameters of sampling and options of a request, by name."""
PLAIN: Options = {"temperature": 1.0, "ignore_eos": True}


def rollout(client: SchedulerClient, workload: Workload, way: str, turn: int, *, first_only: bool) -> float:
    """Return the tokens per second of a whole rollout."""
    started, handles = perf_counter(), []
    seed = 2 * (turn * len(WAYS) + [*WAYS].index(way)) + first_only  # no prompts twice: prefixes are cached
    for number, prompt in enumerate(workload.prompts(seed)):
        sampling, record = WAYS["plain" if first_only and number else way]
        chosen: Options = {"max_new_tokens": workload.new_tokens, **PLAIN, **sampling}
        handles.append(client.submit(prompt, SamplingParams(**chosen), **record))
    tokens = sum(len(handle.result().output_ids) for handle in handles)
    return tokens / (perf_counter() - started)


def main() -> None:
    made = parser(__doc__)
    shapes = [name for name, workload in WORKLOADS.items() if workload.samples == 1]
    made.add_argument("--shape", choices=shapes, default="tiny")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    console, workload = Console(), WORKLOADS[options.shape]
    facts = begin(console, shape=options.shape, threads=options.threads)
    last = [*WAYS][-1]
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "model", ARCHITECTURES[workload.model])
        sizes: dict[str, Any] = {"num_threads": options.threads, "kv_pool_tokens": workload.kv_tokens}
        with launch_scheduler(model, log_level="ERROR", **sizes) as client:
            ways = {name: partial(rollout, client, workload, name, first_only=False) for name in WAYS}
            ways["one"] = partial(rollout, client, workload, last, first_only=True)
            found = in_turns(ways, options.repeats)
    plain = median(found["plain"])
    rows = [(name, f"{median(rates):,.0f}", f"{median(rates) / plain:.2f}") for name, rates in found.items()]
    console.print(f"{options.shape}: {workload.describe()}", highlight=False)
    console.print(table(None, ["option", "tok/s", "of plain"], rows))
    write_json(options.json, {"machine": facts, "tokens_per_s": found})


if __name__ == "__main__":
    main()
