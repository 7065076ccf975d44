"""Speculation from suffixes: tokens per second with and without it, where it pays and where it cannot.

Two engines of one checkpoint, one with ``speculation="suffix"``, take turns. *lone*: a greedy request that
was generated before, so that every draft is accepted. *last eight*: the second epoch of eight groups of
eight, with lengths as an exponential distribution has them, from when the 56 shortest have ended. *eight*:
eight samples of one length, whose group has eight others that have ended. *epoch*: eight groups of eight.
With ``--trained`` the policy first learns to write sentences that come again, each followed by one of four.
Without, at temperature 1, nothing comes again, which shows what speculation costs where it never helps.
Weights of ``tiny`` fit into caches, so its steps are bound by arithmetic; those of ``0.1b`` do not, like
those of policies that are worth training.

    python benchmarks/speculation.py --shape 0.1b --trained --repeats 9 --json speculation.json
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from math import log
from pathlib import Path
from time import perf_counter

import torch
from checkpoints import SHAPES, write_checkpoint
from harness.script import begin, in_turns, parser, table, write_json
from msgspec import structs
from rich.console import Console

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

GROUP, GROUPS, PROMPT_TOKENS = 8, 8, 16
SENTENCES, ROWS, LENGTH = 32, 3, 144
LEARNING_RATES, WARM_UP = {"tiny": 2e-3, "0.1b": 6e-4}, 10
LEARNT = 0.2
"""Loss at which training ends; one of four sentences every 12 tokens costs 0.11 a token."""


def sentences() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(7)
    lengths = torch.randint(6, 20, (SENTENCES,), generator=drawn).tolist()
    return [torch.randint(2, 1000, (length,), generator=drawn).tolist() for length in lengths]


def text(length: int, seed: int) -> list[int]:
    """Return sentences, each followed by one of four that may follow it."""
    known, drawn = sentences(), torch.Generator().manual_seed(seed)
    at = int(torch.randint(0, SENTENCES, (1,), generator=drawn))
    found: list[int] = []
    while len(found) < length:
        found += known[at]
        at = (at * 4 + int(torch.randint(0, 4, (1,), generator=drawn))) % SENTENCES
    return found[:length]


def train(path: Path, rate: float, most_steps: int) -> tuple[int, float]:
    """Teach the checkpoint in ``path`` to write :func:`text`; return the steps taken and the last loss."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    loss, step = torch.tensor(torch.inf), 0
    while step < most_steps and loss > LEARNT:
        ids = torch.tensor([text(LENGTH, 1 + step * ROWS + row) for row in range(ROWS)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        step += 1
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(path)
    return step, loss.item()


def run(
    client: SchedulerClient,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    seed: int,
    lengths: Sequence[int] | None = None,
    last: int | None = None,
) -> float:
    """Return tokens per second of a sample of each prompt, each with a seed of its own.

    ``lengths``: of each, ascending, by default ``params``'s. ``last``: measure from when no more are left.
    """
    lengths = lengths or [params.max_new_tokens or 0] * len(prompts)
    started, before = perf_counter(), client.status().generated_tokens
    handles = [
        client.submit(prompt, structs.replace(params, seed=seed + number, max_new_tokens=length))
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for number, handle in enumerate(handles, 1):
        handle.result()
        if number == len(handles) - (last or len(handles)):
            started, before = perf_counter(), client.status().generated_tokens
    return (client.status().generated_tokens - before) / (perf_counter() - started)


def lone(client: SchedulerClient, params: SamplingParams, number: int) -> float:
    return run(client, [text(PROMPT_TOKENS, -1)], structs.replace(params, temperature=0.0), 0)


def last_eight(client: SchedulerClient, params: SamplingParams, number: int) -> float:
    groups = [text(PROMPT_TOKENS, -3000 - GROUPS * number - group) for group in range(GROUPS)]
    count, longest = GROUPS * GROUP, params.max_new_tokens or 0
    lengths = [max(1, round(longest * log(1 - (n + 0.5) / count) / log(0.5 / count))) for n in range(count)]
    rate = 0.0
    for epoch in (1, 2):  # in each, any group has any of the lengths
        order = torch.randperm(count, generator=torch.Generator().manual_seed(2 * number + epoch)).tolist()
        prompts = [groups[index % GROUPS] for index in order]
        rate = run(client, prompts, params, 1000 * (1 + number) + 300 + 100 * epoch, lengths, last=8)
    return rate


def eight(client: SchedulerClient, params: SamplingParams, number: int) -> float:
    group = [text(PROMPT_TOKENS, -3 - number)] * GROUP
    run(client, group, params, 1000 * (1 + number) + 100)
    return run(client, group, params, 1000 * (1 + number) + 200)


def epoch(client: SchedulerClient, params: SamplingParams, number: int) -> float:
    groups = [text(PROMPT_TOKENS, -1000 - GROUPS * number - group) for group in range(GROUPS)]
    return run(client, groups * GROUP, params, 1000 * (1 + number) + 300)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    made.add_argument("--trained", action="store_true", help="train the policy first, tiny or 0.1b")
    made.add_argument("--quantization", default="auto", help="as the engine's option")
    made.add_argument("--steps", type=int, default=300, help="of training at most")
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument(
        "--temperature", type=float, default=1.0, help="0: the ceiling, all drafts are accepted"
    )
    made.add_argument("--scenes", nargs="+", default=["lone", "last_eight", "eight", "epoch"])
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--checkpoint", type=Path, help="folder of an earlier run; made if it is not there")
    options = made.parse_args()
    console = Console()
    facts = begin(console, shape=options.shape)
    with ExitStack() as stack:
        base = options.checkpoint or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "base"
        if not base.exists():
            write_checkpoint(base, SHAPES[options.shape])
            if options.trained:
                rate = LEARNING_RATES[options.shape]
                facts["trained_steps"], facts["loss"] = train(base, rate, options.steps)
        results = measure(stack, base, options, console)
    write_json(options.json, {**facts, **vars(options), "results": results})


def measure(
    stack: ExitStack, base: Path, options: argparse.Namespace, console: Console
) -> dict[str, dict[str, list[float]]]:
    shared = {"num_threads": options.threads, "kv_pool_tokens": 1 << 15, "log_level": "WARNING"}
    shared["quantization"] = options.quantization
    clients = {
        way: stack.enter_context(launch_scheduler(base, speculation=way, **shared))
        for way in ("none", "suffix")
    }
    scenes = {"lone": lone, "last_eight": last_eight, "eight": eight, "epoch": epoch}
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=options.temperature, ignore_eos=True
    )
    results, rows = {}, []
    for name in options.scenes:
        ways = {way: partial(scenes[name], client, params) for way, client in clients.items()}
        results[name] = in_turns(ways, options.repeats)
        none, suffix = (statistics.median(results[name][way]) for way in ("none", "suffix"))
        rows.append((name.replace("_", " "), f"{none:,.0f}", f"{suffix:,.0f}", f"{suffix / none:.2f} x"))
    console.print(table(None, ["", "none tok/s", "suffix tok/s", ""], rows))
    return results


if __name__ == "__main__":
    main()
