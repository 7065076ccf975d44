"""Compiled kernels beside torch's own operations, on shapes of a 0.6B model and of the tiny one.

Every case runs its variants in turn, round by round, over enough copies of the weights that none is found in
a cache; a figure is the median. ``of torch`` is the time of torch's best variant over that of the kernel, so
above 1 the kernel is faster. GB/s counts the bytes that must be moved once (weights, K and V, logits); ``of
limit`` is the time that these need at the read bandwidth, or the arithmetic at the rate of torch's largest
product, whichever is longer, over the kernel's. Both limits are measured and printed first. Products of
``numbers``, weights that are whole numbers, are compared with those of packed weights instead of torch's.

    python benchmarks/kernels.py --threads 2 --isa avx512bf16 avx2 --operation linear attention
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from harness.script import begin, parser, table, write_json
from rich.console import Console
from torch.nn import functional

from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.sampler import Sampler, noise, noise_stream
from caesura.scheduler.kernels import linear, native
from caesura.scheduler.kernels.attention import PagedAttention, plan_tasks
from caesura.scheduler.kernels.attention_form import HeadNorms
from caesura.scheduler.kernels.elementwise import gate_mul, rms_norm, rope_store
from caesura.scheduler.layers.norm import normalize
from caesura.scheduler.layers.rotary import rotate
from caesura.scheduler.models.config import WHOLE_NUMBERS
from caesura.scheduler.runtime.engine_config import PAGE_SIZE

LINEAR_SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate+up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151_936, 1024),
    "tiny qkv": (512, 256),
    "tiny head": (4096, 256),
}
"""Outputs and inputs of each product."""
LOGITS_SHAPES = [(32, 151_936), (1, 151_936), (64, 4096)]
FILTERED_SHAPES = [(64, 151_936), (64, 4096)]

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INTERMEDIATE = 16, 8, 128, 1024, 3072
ATTENTION_SHAPES = {
    "decode": [(32, 1, 160), (8, 1, 2000), (1, 1, 2000)],
    "prefill": [(1, 256, 256), (1, 256, 2256)],
    "tiny decode": [(64, 1, 40), (64, 1, 96), (64, 1, 150)],
}
"""Requests, new tokens of each, KV length of each after the step."""
TINY_HEADS = 4, 2, 64
"""Query heads, KV heads and their size."""
ELEMENTWISE_TOKENS = [32, 512]

COLD_BYTES = 96 << 20
"""Bytes that no last-level cache holds."""
CACHE_BYTES = 32 << 20
"""Bytes that a last-level cache may hold: with less, bandwidth limits nothing."""

PEERS = ("F.linear", "oneDNN packed", "packed", "torch")
OPERATIONS = ("linear", "numbers", "layout", "attention", "elementwise", "sampler")

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
    """Return the median seconds of each, interleaved; the first two rounds are not counted."""
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
    """Return ``run`` with the kernels limited to ``isa``."""

    def limited(copy: int) -> None:
        with native.limited_to(isa):
            run(copy)

    return limited


def linear_cases(dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """Yield products with packed weights, beside ``F.linear`` and oneDNN's own packed layout."""
    for name, (outputs, inputs) in LINEAR_SHAPES.items():
        size = outputs * inputs * dtype.itemsize
        copies = max(1, min(16, COLD_BYTES // size))
        plain = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
        packed = [_packed(weight) for weight in plain]
        reordered = []
        if dtype == torch.bfloat16:
            reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, 32) for weight in plain]
        for m in rows:
            yield _product(f"linear {name}", m, (plain, reordered, packed), copies)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    storage = torch.zeros(linear.storage_shape(outputs, inputs, weight.dtype), dtype=weight.dtype)
    linear.pack_rows(storage, weight, 0)
    return storage


def numbers_cases(dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """Yield products with weights that are whole numbers, beside packed ones in ``dtype``."""
    for name, (outputs, inputs) in LINEAR_SHAPES.items():
        copies = max(1, min(16, COLD_BYTES // (outputs * inputs * dtype.itemsize)))
        wide = [_packed(torch.randn(outputs, inputs).to(dtype)) for _ in range(copies)]
        for form, (columns, codes) in WHOLE_NUMBERS.items():
            numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
            if codes is not None:
                numbers = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
            packed = [_packed(numbers) for _ in range(copies)]
            lines = torch.rand(linear.scales_shape(outputs, inputs, columns))
            scales = linear.Scales(lines, columns, linear.INT8, codes)
            for m in rows:
                yield _of_numbers(f"{form} {name}", m, inputs, outputs, wide, packed, scales)


def _of_numbers(
    name: str,
    m: int,
    inputs: int,
    outputs: int,
    wide: list[torch.Tensor],
    packed: list[torch.Tensor],
    scales: linear.Scales,
) -> Case:
    dtype = wide[0].dtype
    x, out = torch.randn(m, inputs).to(dtype), torch.empty(m, outputs, dtype=dtype)
    return Case(
        name,
        f"M={m} {outputs}x{inputs}",
        {"packed": lambda i: linear.Product(wide[i], outputs, inputs)(x, None, out)},
        lambda i: linear.Product(packed[i], outputs, inputs, scales, dtype)(x, None, out),
        len(wide),
        packed[0].nbytes + scales.lines.nbytes,
        2 * m * outputs * inputs,
    )


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
        lambda i: linear.Product(packed[i], outputs, inputs)(x, None, out),
        copies,
        plain[0].nbytes,
        2 * m * outputs * inputs,
    )


def layout_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield operations of an update on packed weights, beside copying and comparing plain ones."""
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


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield paged attention, beside torch's on K and V that lie in one piece."""
    for name, shapes in ATTENTION_SHAPES.items():
        for requests, tokens, length in shapes:
            yield _attention(name, requests, tokens, length, dtype)


def _attention(name: str, requests: int, tokens: int, length: int, dtype: torch.dtype) -> Case:
    heads, kv_heads, size = TINY_HEADS if name.startswith("tiny") else (HEADS, KV_HEADS, HEAD_SIZE)
    pages = -(-length // PAGE_SIZE)
    kv_bytes = 2 * requests * length * kv_heads * size * dtype.itemsize
    copies = max(1, min(8, COLD_BYTES // kv_bytes))
    pool = MHAPool(
        num_layers=copies,
        num_pages=requests * pages + 1,
        kv_heads=kv_heads,
        head_size=size,
        dtype=dtype,
    )
    for copy in range(copies):
        for storage in pool.layer(copy):
            storage.copy_(torch.randn(storage.shape))
    shuffled = 1 + torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
    table = shuffled.to(torch.int32).view(requests, pages)
    q = torch.randn(requests * tokens, heads, size).to(dtype)
    out = torch.empty(requests * tokens, heads * size, dtype=dtype)
    kernel = PagedAttention(dtype, kv_heads, heads // kv_heads, size, size**-0.5)
    tasks = plan_tasks([tokens] * requests, [length] * requests, heads // kv_heads)
    dense = [torch.randn(2, requests, kv_heads, length, size).to(dtype) for _ in range(copies)]
    queries = q.view(requests, tokens, heads, size).transpose(1, 2)
    visible = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    seen = tokens * (length - tokens) + tokens * (tokens + 1) // 2
    return Case(
        name,
        f"{requests} x {tokens} of {length}",
        {
            "torch": lambda i: functional.scaled_dot_product_attention(
                queries, dense[i][0], dense[i][1], attn_mask=visible, enable_gqa=True
            )
        },
        lambda i: kernel(q, *pool.layer(i), table, tasks, out),
        copies,
        kv_bytes,
        4 * requests * seen * heads * size,
    )


def elementwise_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield operations between the products, beside torch's sequence; everything stays in the caches."""
    for tokens in ELEMENTWISE_TOKENS:
        yield _norm(tokens, dtype)
        yield _gate(tokens, dtype)
        yield _rotation(tokens, dtype)


def _norm(tokens: int, dtype: torch.dtype) -> Case:
    x, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
    weight = torch.randn(HIDDEN).to(dtype)
    return Case(
        "add, norm",
        f"[{tokens}, {HIDDEN}]",
        {"torch": lambda _: normalize(residual.add_(x), 1e-6).mul_(weight)},
        lambda _: rms_norm(x, weight, 1e-6, residual=residual),
        1,
        4 * x.nbytes,
    )


def _gate(tokens: int, dtype: torch.dtype) -> Case:
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    return Case(
        "silu * up",
        f"[{tokens}, {INTERMEDIATE}]",
        {"torch": lambda _: functional.silu(gate).mul_(up)},
        lambda _: gate_mul(gate_up),
        1,
        gate_up.nbytes * 3 // 2,
    )


def _rotation(tokens: int, dtype: torch.dtype) -> Case:
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE).to(dtype)
    weight = torch.randn(HEAD_SIZE).to(dtype)
    cos, sin = torch.rand(2, tokens, 1, HEAD_SIZE // 2).to(dtype)
    slots = torch.arange(PAGE_SIZE, PAGE_SIZE + tokens)
    out = torch.empty(tokens, HEADS, HEAD_SIZE, dtype=dtype)
    pool = MHAPool(
        num_layers=1,
        num_pages=2 + tokens // PAGE_SIZE,
        kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=dtype,
    )

    def peer(_: int) -> None:
        qk = rotate(normalize(qkv[:, :-KV_HEADS], 1e-6).mul_(weight), cos, sin)
        pool.store(0, qk[:, HEADS:], qkv[:, -KV_HEADS:], slots)

    return Case(
        "rotate, store",
        f"{tokens} tokens",
        {"torch": peer},
        lambda _: rope_store(
            qkv, HEADS, cos, sin, slots, *pool.layer(0), out=out, norm=HeadNorms(weight, weight, 1e-6)
        ),
        1,
        2 * qkv.nbytes,
    )


def sampling_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield sampling of one token a row with temperature and filters, and its logprob."""
    for rows, vocab_size in LOGITS_SHAPES:
        for temperature in (1.0, 0.7):
            yield _sampling((torch.randn(rows, vocab_size) * 4).to(dtype), f"T={temperature}", temperature)
    for rows, vocab_size in FILTERED_SHAPES:
        for spread in (1, 4):
            logits = (torch.randn(rows, vocab_size) * spread).to(dtype)
            yield _sampling(logits, f"x{spread} top-p 0.95", top_p=0.95)
            yield _sampling(logits, f"x{spread} top-k 50", top_k=50)


def _sampling(
    logits: torch.Tensor,
    detail: str,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Case:
    rows, vocab_size = logits.shape
    counter = np.arange(rows)
    batch = SamplingBatch(
        temperature=torch.full((rows,), temperature),
        greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=torch.full((rows,), vocab_size if top_k is None else top_k),
        top_p=torch.full((rows,), top_p),
        uniforms=torch.from_numpy(noise(noise_stream(counter, counter), counter)),
        any_sampled=True,
        any_filtered=top_k is not None or top_p < 1,
        want_raw=False,
        want_sampled=False,
    )
    kernel = Sampler(vocab_size, rows, "cpu", logits.dtype)
    with native.limited_to("torch"):
        peer = Sampler(vocab_size, rows, "cpu", logits.dtype)
    return Case(
        "sample",
        f"[{rows}, {vocab_size}] {detail}",
        {"torch": lambda _: peer.sample(logits, batch)},
        lambda _: kernel.sample(logits, batch),
        1,
        logits.nbytes,
    )


def cases(operations: Sequence[str], dtype: torch.dtype, rows: list[int]) -> Iterator[Case]:
    """Yield the chosen cases, made when their turn comes."""
    if "linear" in operations:
        yield from linear_cases(dtype, rows)
    if "numbers" in operations:
        yield from numbers_cases(dtype, rows)
    if "layout" in operations:
        yield from layout_cases(dtype)
    if "attention" in operations:
        yield from attention_cases(dtype)
    if "elementwise" in operations:
        yield from elementwise_cases(dtype)
    if "sampler" in operations:
        yield from sampling_cases(dtype)


def limits() -> tuple[float, float]:
    """Return the bytes read and the operations of a bfloat16 product in a second."""
    data = torch.ones(64 << 20)  # 256 MB
    square = torch.randn(2048, 2048).bfloat16()
    best = in_turn({"read": lambda _: data.sum(), "product": lambda _: torch.mm(square, square)}, 1, 1.0)
    return data.nbytes / best["read"], 2 * 2048**3 / best["product"]


def row(case: Case, isas: list[str], times: dict[str, float], limits: tuple[float, float]) -> list[str]:
    """Return the milliseconds of all, and the rates of the last kernel."""
    torch_best = min(times[peer] for peer in case.peers)
    kernel, (bandwidth, rate) = times[isas[-1]], limits
    least = max(case.read_bytes / bandwidth, case.flops / rate)
    return [
        case.name,
        case.detail,
        *(f"{1e3 * times[name]:.3f}" if name in times else "-" for name in PEERS),
        *(f"{1e3 * times[isa]:.3f} ({torch_best / times[isa]:.2f}x)" for isa in isas),
        f"{case.read_bytes / kernel / 1e9:.1f}",
        f"{case.flops / kernel / 1e9:.0f}" if case.flops else "-",
        f"{least / kernel:.0%}" if case.flops or case.copies * case.read_bytes >= CACHE_BYTES else "-",
    ]


@torch.inference_mode()
def main() -> None:
    made = parser(__doc__)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    made.add_argument("--isa", nargs="+", choices=native.ISAS[1:], help="default: the best this machine has")
    made.add_argument("--operation", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    sizes = [1, 8, 32, 64, 256, 1024]
    made.add_argument("--rows", type=int, nargs="+", default=sizes, help="M of the products")
    made.add_argument("--seconds", type=float, default=0.3, help="for each row of the table")
    options = made.parse_args()
    if reason := native.why_not():
        made.error(f"no compiled kernels: {reason}")
    torch.set_num_threads(options.threads)
    isas = options.isa or [native.isa()]
    console = Console(width=150)
    bandwidth, rate = limits()
    facts = begin(console, threads=options.threads)
    console.print(
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s, torch's product of 2048 x 2048 in bfloat16 "
        f"{rate / 1e9:.0f} GFLOP/s"
    )
    rows: list[list[str]] = []
    seconds = []
    for case in cases(options.operation, getattr(torch, options.dtype), options.rows):
        runs = case.peers | {isa: on(isa, case.kernel) for isa in isas}
        times = in_turn(runs, case.copies, options.seconds)
        rows.append(row(case, isas, times, (bandwidth, rate)))
        seconds.append({"name": case.name, "detail": case.detail, **times})
    headings = ["operation", "", *PEERS, *isas, "GB/s", "GFLOP/s", "of limit"]
    console.print(table(None, headings, rows, words=2), "ms (times faster than torch's best)")
    write_json(options.json, {"machine": facts, "seconds": seconds})


if __name__ == "__main__":
    main()
