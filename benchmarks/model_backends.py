"""The same rollouts by the engine's own model code and by transformers' modules, in turns.

Two engines of one checkpoint live at a time and generate one after the other, in an order that alternates, so that whatever
else the machine does meets both. Printed are tokens per second of each run, their medians, and the ratio of the medians.

    .venv/bin/python benchmarks/model_backends.py --shape tiny --threads 2 --repeats 5
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from checkpoints import SHAPES, write_checkpoint

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler

BACKENDS = ("native", "transformers")
REQUESTS = {"tiny": (64, 32, 128), "0.6b": (32, 128, 64)}
"""Of each shape: requests, tokens in, tokens out."""


def run(client: SchedulerClient, requests: int, prompt: int, output: int, seed: int) -> float:
    """Tokens per second of one batch."""
    prompts = [[3 + (31 * row + 7 * i + seed) % 4000 for i in range(prompt)] for row in range(requests)]
    params = SamplingParams(max_new_tokens=output, temperature=1.0, seed=seed, ignore_eos=True)
    started = perf_counter()
    results = client.generate(prompts, params, timeout=600)
    return sum(len(result.output_ids) for result in results) / (perf_counter() - started)


def main() -> None:
    """Measure, print, and write ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(REQUESTS), default="tiny")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[options.shape])
        common = {"num_threads": options.threads, "kv_pool_tokens": 1 << 15, "log_level": "WARNING"}
        with (
            launch_scheduler(folder, model_backend="native", **common) as native,
            launch_scheduler(folder, model_backend="transformers", **common) as transformers,
        ):
            clients = {"native": native, "transformers": transformers}
            for client in clients.values():
                run(client, *REQUESTS[options.shape], seed=0)
            for repeat in range(options.repeats):
                order = BACKENDS if repeat % 2 == 0 else BACKENDS[::-1]
                for backend in order:
                    found[backend].append(run(clients[backend], *REQUESTS[options.shape], seed=repeat))
    medians = {backend: statistics.median(values) for backend, values in found.items()}
    for backend, values in found.items():
        print(f"{backend:>12}: {medians[backend]:9,.0f} tok/s   ({', '.join(f'{v:,.0f}' for v in values)})")
    print(f"{'ratio':>12}: {medians['transformers'] / medians['native']:9.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"shape": options.shape, "tokens_per_second": found}, indent=1))


if __name__ == "__main__":
    main()
