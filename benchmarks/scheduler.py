"""Cost of a step in Python: the real scheduler and socket over a model that computes nothing.

    python benchmarks/scheduler.py                 # a decode step by batch size, and how it grows
    python benchmarks/scheduler.py --profile 256   # where the time goes at 256 requests
    python benchmarks/scheduler.py --vllm-python /opt/peer-vllm/bin/python   # beside vLLM's scheduler

Everything of the engine runs in this process, on one thread; a message goes through a real socket. vLLM's
figures are of ``peers/vllm_scheduler.py``: its scheduler alone, without socket and batch.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from checkpoints import Shape, write_checkpoint
from harness.script import table
from rich.console import Console
from rich.table import Table

from caesura.io_struct import GenerateReqInput, SamplingParams, encode
from caesura.scheduler.execution.forward import ForwardBatch, HostOutput
from caesura.scheduler.runtime.engine import Engine
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.scheduling.batcher import Batcher

SHAPE = Shape(
    num_hidden_layers=1,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=40_000,
    bos_token_id=0,
    eos_token_id=1,
)


COUNTS, TURNS = (64, 256, 1024, 4096), 3


class NullRunner:
    """A runner that samples token 7 without computing anything."""

    def execute(self, batch: ForwardBatch) -> "NullRunner":
        self._rows = len(batch.sample_tokens)
        return self

    def fetch(self) -> HostOutput:
        return HostOutput(
            token_ids=np.full(self._rows, 7, np.int32),
            logprobs=np.zeros(self._rows, np.float32),
            raw_logprobs=None,
            sampled_logprobs=None,
        )

    def set_last_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()


class Bench:
    """An engine with a null model, and a client's socket."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "max_running_requests": 1024,
            "kv_pool_tokens": 1_500_000,
            "chunked_prefill_size": 1 << 16,
        }
        config = EngineConfig(
            model_path=str(model), endpoint=f"ipc://{folder}/bench.sock", device="cpu",
            max_waiting_requests=1 << 20,
            **{**defaults, **options},
        ).resolve()  # fmt: skip
        self.engine = Engine(config, make_runner=lambda *_: NullRunner())
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self.engine.router.endpoint)
        self._rng = np.random.default_rng(0)

    def close(self) -> None:
        self._socket.close(0)
        self.engine.close()
        self._context.term()

    def submit(self, count: int, prompt_tokens: int, new_tokens: int, *, stream: bool = False) -> None:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, temperature=1.0)
        for _ in range(count):
            prompt = self._rng.integers(3, 1000, prompt_tokens).tolist()
            self._socket.send(
                encode(GenerateReqInput(input_ids=prompt, sampling_params=params, stream=stream))
            )
        live = len(self.engine.live)
        while len(self.engine.live) < live + count:
            self.engine.scheduler.receive(0)

    def drain(self) -> None:
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def run(self) -> None:
        """Tick until every request has ended."""
        while self.engine.live:
            self.engine.scheduler.tick(None)
            self.drain()

    def steps(self, count: int) -> list[float]:
        """Return the milliseconds of ``count`` ticks."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.engine.scheduler.tick(None)
            times.append(1e3 * (time.perf_counter() - start))
            self.drain()
        return times

    def prefilled(self) -> None:
        """Tick until every request that can run decodes."""
        batcher = self.engine.batcher
        assert isinstance(batcher, Batcher)
        self.engine.scheduler.tick(None)
        while batcher.num_prefilling or (batcher.waiting and batcher.table.num_free):
            self.engine.scheduler.tick(None)
        self.drain()


Measure = Callable[[Bench], list[float]]


def decode(requests: int, prompt_tokens: int = 32, *, stream: bool = False, steps: int = 100) -> Measure:
    def measure(bench: Bench) -> list[float]:
        bench.submit(requests, prompt_tokens, steps + 64, stream=stream)
        bench.prefilled()
        times = bench.steps(steps)
        bench.run()
        return times

    return measure


def with_queue(waiting: int) -> Measure:
    def measure(bench: Bench) -> list[float]:
        bench.submit(256, 32, 400)
        bench.prefilled()
        bench.submit(waiting, 32, 1)
        return bench.steps(100)

    return measure


def with_tree(tokens: int) -> Measure:
    """Decode while the prefix cache holds ``tokens``, and admit a request that shares nothing, every step."""

    def measure(bench: Bench) -> list[float]:
        for _ in range(tokens // 30_000):
            bench.submit(1, 30_000, 1)
            bench.run()
        bench.submit(256, 32, 400)
        bench.prefilled()
        times = []
        for _ in range(50):
            bench.submit(1, 64, 1)
            times += bench.steps(1)
        return times

    return measure


def beside_vllm(model: Path, python: str) -> Table:
    """Measure both by turns, each number of requests three times."""
    script = Path(__file__).parent / "peers" / "vllm_scheduler.py"
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    rows = []
    for _ in range(TURNS):
        for count in COUNTS:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(model, Path(folder), max_running_requests=count)
                found["ours", count] += decode(count)(bench)
                bench.close()
        command = [python, str(script), str(model), *map(str, COUNTS)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=model)
        for count, times in json.loads(done.stdout.rstrip().rpartition("\n")[2])["ms"].items():
            found["vLLM", int(count)] += times
    for count in COUNTS:
        ours, theirs = (statistics.median(found[name, count]) for name in ("ours", "vLLM"))
        rows.append([f"{count:,}", f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f} x"])
    title = "milliseconds of Python per decode step, null model, medians"
    return table(title, ["requests", "Caesura, whole step", "vLLM, scheduler alone", "ratio"], rows)


def measured_table(model: Path) -> Table:
    rows = []
    cases: list[tuple[str, Measure, dict[str, object]]] = [
        ("decode, 1 request", decode(1), {}),
        ("decode, 64 requests", decode(64), {}),
        ("decode, 256 requests", decode(256), {}),
        ("decode, 256 requests, all streaming", decode(256, stream=True), {}),
        ("decode, 1,024 requests", decode(1024), {}),
        ("decode, 4,096 requests", decode(4096), {"max_running_requests": 4096}),
        (
            "decode, 16,384 requests",
            decode(16384),
            {"max_running_requests": 16384, "kv_pool_tokens": 4 << 20},
        ),
        ("decode, 8 requests at context 32,000", decode(8, 32_000), {}),
        ("decode, 256 requests, 100,000 more wait", with_queue(100_000), {"max_running_requests": 256}),
        ("decode, 256 requests + 1 admitted", with_tree(0), {}),
        ("the same, 10M tokens cached", with_tree(10_000_000), {"kv_pool_tokens": 11 << 20}),
    ]
    for name, measure, options in cases:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(model, Path(folder), **options)
            times = sorted(measure(bench))
            bench.close()
        figures = (statistics.median(times), times[int(0.99 * len(times))], times[-1])
        rows.append([name, *(f"{value:.2f}" for value in figures)])
    title = "milliseconds of Python per step, null model"
    return table(title, ["case", "p50", "p99", "max"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--profile", type=int, metavar="REQUESTS", help="profile decode steps of this many requests"
    )
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vLLM: compare with its scheduler"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch) / "model", SHAPE, seed=0)
        if options.profile is None:
            beside = options.vllm_python
            Console(width=100).print(beside_vllm(model, beside) if beside else measured_table(model))
            return
        bench = Bench(model, Path(scratch))
        bench.submit(options.profile, 32, 600)
        bench.prefilled()
        profiler = cProfile.Profile()
        profiler.runcall(bench.steps, 500)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        bench.close()


if __name__ == "__main__":
    main()
