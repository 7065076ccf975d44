"""Compiled kernels beside torch's own operations, on shapes of a 0.6B model and of the tiny one.

Every case runs its variants in turn, round by round, over enough copies of the weights that none is found in a cache; a
figure is the median. ``of torch`` is the time of torch's best variant over that of the kernel, so above 1 the kernel is
faster. GB/s counts the bytes that must be read once (weights, logits), to be held against the read bandwidth printed
first; GFLOP/s are to be held against the largest product that torch can do at that moment.

    python benchmarks/kernels.py --threads 2 --isa avx512bf16 avx2 --operation linear
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from harness.machine import describe, machine_facts
from rich.console import Console
from rich.table import Table

from caesura.scheduler.forward import SamplingBatch
from caesura.scheduler.kernels import linear, native
from caesura.scheduler.kernels.sampling import RowSampler
from caesura.scheduler.runner.sampler import Sampler, noise

LINEAR_SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate+up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151_936, 1024),
    "tiny qkv": (512, 256),
    "tiny head": (4096, 256),
}
"""Outputs, inputs."""
LOGITS_SHAPES = [(32, 151_936), (1, 151_936), (64, 4096)]

COLD_BYTES = 96 << 20
"""More than a last-level cache holds."""

Run = Callable[[int], object]
"""One call; the argument numbers the copy of the data to take."""


@dataclass(frozen=True)
class Case:
    """One row of the table, and of what the kernels are compared with."""

    name: str
    detail: str
    peers: dict[str, Run]
    kernel: Run
    copies: int
    read_bytes: int
    flops: int = 0


def in_turn(runs: dict[str, Run], copies: int, seconds: float) -> dict[str, float]:
    """Median seconds of each, interleaved; the first two rounds are not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 7 or time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run(turn % copies)
            times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def on(isa: str, run: Run) -> Run:
    """``run`` with the kernels limited to ``isa``."""

    def limited(copy: int) -> None:
        with native.limited_to(isa):
            run(copy)

    return limited


def linear_cases(dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """Products with packed weights, beside ``F.linear`` and, in bfloat16, oneDNN's own packed layout."""
    for name, (outputs, inputs) in LINEAR_SHAPES.items():
        size = outputs * inputs * dtype.itemsize
        copies = max(1, min(16, COLD_BYTES // size))
        plain = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
        packed = [torch.zeros(linear.storage_shape(outputs, inputs, dtype), dtype=dtype) for _ in plain]
        for storage, weight in zip(packed, plain):
            linear.pack_rows(storage, weight, 0)
        reordered = []
        if dtype == torch.bfloat16:
            reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, 32) for weight in plain]
        for m in rows:
            yield _product(f"linear {name}", m, (plain, reordered, packed), copies)


def _product(name: str, m: int, weights: tuple[list[torch.Tensor], ...], copies: int) -> Case:
    plain, reordered, packed = weights
    outputs, inputs = plain[0].shape
    x = torch.randn(m, inputs).to(plain[0].dtype)
    out, target = torch.empty(m, outputs, dtype=x.dtype), torch.empty(m, outputs, dtype=x.dtype)
    peers: dict[str, Run] = {"F.linear": lambda i: torch.mm(x, plain[i].t(), out=target)}
    if reordered:
        product = torch.ops.mkldnn._linear_pointwise
        peers["oneDNN packed"] = lambda i: product(x, reordered[i], None, "none", [], "")
    return Case(
        name,
        f"M={m} {outputs}x{inputs}",
        peers,
        lambda i: linear.linear(x, packed[i], None, out),
        copies,
        plain[0].nbytes,
        2 * m * outputs * inputs,
    )


def layout_cases(dtype: torch.dtype) -> Iterator[Case]:
    """What an update does to packed weights, beside copying and comparing plain ones."""
    outputs, inputs = 16_384, 3072
    rows = torch.randn(outputs, inputs).to(dtype)
    packed = torch.zeros(linear.storage_shape(outputs, inputs, dtype), dtype=dtype)
    plain, bits = rows.clone(), rows.view(torch.int64)
    ids = torch.randint(outputs, (64,))
    some, other = torch.empty(64, inputs, dtype=dtype), torch.empty(64, inputs, dtype=dtype)
    linear.pack_rows(packed, rows, 0)
    for name, peer, kernel, size in (
        ("pack", lambda _: plain.copy_(rows), lambda _: linear.pack_rows(packed, rows, 0), rows.nbytes),
        (
            "compare",
            lambda _: torch.equal(plain.view(torch.int64), bits),
            lambda _: linear.equal_rows(packed, rows, 0),
            rows.nbytes,
        ),
        (
            "gather 64 rows",
            lambda _: torch.index_select(plain, 0, ids, out=some),
            lambda _: linear.gather_rows(packed, ids, other),
            some.nbytes,
        ),
    ):
        yield Case(name, f"{outputs}x{inputs}", {"torch": peer}, kernel, 1, size)


def sampling_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Temperature, one token a row, its logprob."""
    for rows, vocab_size in LOGITS_SHAPES:
        for temperature in (1.0, 0.7):
            yield _sampling((torch.randn(rows, vocab_size) * 4).to(dtype), temperature)


def _sampling(logits: torch.Tensor, temperature: float) -> Case:
    rows, vocab_size = logits.shape
    counter = np.arange(rows)
    batch = SamplingBatch(
        temperature=torch.full((rows,), temperature),
        greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=torch.full((rows,), vocab_size),
        top_p=torch.ones(rows),
        uniforms=torch.from_numpy(noise(counter.astype(np.uint64), counter, counter)),
        any_sampled=True,
        any_filtered=False,
        want_raw=False,
        want_sampled=False,
    )
    peer, kernel = Sampler(vocab_size, rows, "cpu", logits.dtype), RowSampler(vocab_size)
    peer._compiled = None  # what it computes with torch
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    return Case(
        "sample",
        f"[{rows}, {vocab_size}] T={temperature}",
        {"torch": lambda _: peer.sample(logits, batch)},
        lambda _: kernel.sample(
            logits, batch.temperature, batch.greedy, batch.uniforms, tokens, logprobs, None
        ),
        1,
        logits.nbytes,
    )


def cases(operations: list[str], dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """The chosen ones, made when their turn comes."""
    if "linear" in operations:
        yield from linear_cases(dtype, rows)
    if "layout" in operations:
        yield from layout_cases(dtype)
    if "sampler" in operations:
        yield from sampling_cases(dtype)


def limits() -> str:
    """Read bandwidth and the matrix product's rate, as they are now."""
    data = torch.ones(64 << 20)  # 256 MB
    square = torch.randn(2048, 2048).bfloat16()
    best = in_turn({"read": lambda _: data.sum(), "product": lambda _: torch.mm(square, square)}, 1, 1.0)
    return (
        f"read bandwidth {data.nbytes / best['read'] / 1e9:.1f} GB/s, torch's product of 2048 x 2048 in bfloat16 "
        f"{2 * 2048**3 / best['product'] / 1e9:.0f} GFLOP/s"
    )


def add_row(table: Table, case: Case, isas: list[str], times: dict[str, float]) -> None:
    """Milliseconds of all, rates of the last kernel."""
    torch_best = min(times[peer] for peer in case.peers)
    kernel = times[isas[-1]]
    table.add_row(
        case.name,
        case.detail,
        *(f"{1e3 * times[name]:.3f}" if name in times else "-" for name in _peers()),
        *(f"{1e3 * times[isa]:.3f} ({torch_best / times[isa]:.2f}x)" for isa in isas),
        f"{case.read_bytes / kernel / 1e9:.1f}",
        f"{case.flops / kernel / 1e9:.0f}" if case.flops else "-",
    )


def _peers() -> tuple[str, ...]:
    return ("F.linear", "oneDNN packed", "torch")


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--isa", nargs="+", choices=native.ISAS[1:], help="default: the best this machine has"
    )
    parser.add_argument("--operation", nargs="+", default=["linear", "layout", "sampler"])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024], help="M of the products"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row of the table")
    options = parser.parse_args()
    if reason := native.why_not():
        parser.error(f"no compiled kernels: {reason}")
    torch.set_num_threads(options.threads)
    isas = options.isa or [native.isa()]
    console = Console(width=150)
    console.print(describe(machine_facts()), f"\n{options.threads} threads, {limits()}")
    table = Table("operation", "", *_peers(), *isas, "GB/s", "GFLOP/s")
    for case in cases(options.operation, getattr(torch, options.dtype), options.rows):
        runs = case.peers | {isa: on(isa, case.kernel) for isa in isas}
        add_row(table, case, isas, in_turn(runs, case.copies, options.seconds))
    console.print(table, "ms (times faster than torch's best)")


if __name__ == "__main__":
    main()
