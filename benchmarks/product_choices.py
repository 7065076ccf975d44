"""What a tuner of the CPU's products could choose: the compiled product as it is beside others that compute the same bits.

Each choice is a constant of ``scheduler/kernels/cpu/linear.cpp``, which is compiled again with another value (half a minute
each), or the number of threads. They take turns, call by call, over copies of the weight that no cache holds together. A figure is
the median over rounds of the time of the product as it is over that of the choice, so above 1 the choice is faster. Bits are
compared, and must be equal.

    python benchmarks/product_choices.py --rounds 60
"""

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from harness.machine import describe, machine_facts
from kernels import COLD_BYTES, LINEAR_SHAPES
from rich.console import Console
from rich.table import Table

from caesura.scheduler.kernels import linear, native

SOURCES = Path(native.__file__).parent / "cpu"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fPIC",
    "-w",
)
CHOICES = {
    "8 rows to a block": ("ROWS = LANES == 16 ? 12", "ROWS = LANES == 16 ? 8"),
    "13 rows to a block": ("ROWS = LANES == 16 ? 12", "ROWS = LANES == 16 ? 13"),
    "asked for 2 tiles ahead": ("AHEAD = 4 * 2", "AHEAD = 2 * 2"),
    "16 tiles ahead": ("AHEAD = 4 * 2", "AHEAD = 16 * 2"),
    "chunks of 96 KB": (
        "CHUNK_BYTES = 384 << 10, CHUNK_ROWS = 48",
        "CHUNK_BYTES = 96 << 10, CHUNK_ROWS = 16",
    ),
    "threads from 32k words": ("PARALLEL = 1 << 16", "PARALLEL = 1 << 15"),
}
"""What the source says, and what it says instead."""
AS_IT_IS, ONE_THREAD = "as it is", "one thread"
ROWS = (1, 8, 32, 64)
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def build(folder: Path, was: str, becomes: str) -> Product:
    """The product of a library in which ``was`` is replaced."""
    folder.mkdir()
    for path in SOURCES.iterdir():
        text = path.read_text()
        if path.name == "linear.cpp":
            assert was in text, f"linear.cpp has changed: it does not say {was!r}"
            text = text.replace(was, becomes)
        (folder / path.name).write_text(text)
    library = folder / "product.so"
    command = [
        "g++",
        "-shared",
        *FLAGS,
        str(folder / "linear.cpp"),
        str(folder / "native.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.caesura_use_isa(native.ISAS.index(native.isa()))
    compute = loaded.caesura_linear_bf16
    pointer, size, integer = native.POINTER, native.SIZE, native.INT
    compute.argtypes = [
        pointer,
        size,
        pointer,
        pointer,
        size,
        pointer,
        pointer,
        *[size] * 4,
        integer,
        integer,
    ]
    compute.restype = None

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        (rows, inputs), outputs = x.shape, out.shape[1]
        tensors = (x.data_ptr(), inputs, weight.data_ptr(), None, 0, None, out.data_ptr(), outputs)
        compute(*tensors, rows, outputs, inputs, 0, threads)

    return product


def measure(
    products: dict[str, Product], outputs: int, inputs: int, rows: int, rounds: int, threads: int
) -> tuple[float, dict[str, float]]:
    """Microseconds of the product as it is, and by choice how many times faster that choice is; medians."""
    packed = torch.zeros(linear.storage_shape(outputs, inputs, torch.bfloat16), dtype=torch.bfloat16)
    linear.pack_rows(packed, torch.randn(outputs, inputs).mul_(0.02).bfloat16(), 0)
    copies = [packed.clone() for _ in range(max(1, min(len(products) * 8, COLD_BYTES // packed.nbytes)))]
    x, out = torch.randn(rows, inputs).bfloat16(), torch.empty(rows, outputs, dtype=torch.bfloat16)
    names, calls = list(products), 0
    expected: torch.Tensor | None = None
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            weight, calls = copies[calls % len(copies)], calls + 1
            started = time.perf_counter()
            products[name](x, weight, out, 1 if name == ONE_THREAD else threads)
            times[name].append(1e6 * (time.perf_counter() - started))
            expected = out.clone() if expected is None else expected
            assert torch.equal(out, expected), f"{name} computes other bits"
    now = times.pop(AS_IT_IS)[1:]
    gains = {
        name: median(a / b for a, b in zip(now, found[1:], strict=True)) for name, found in times.items()
    }
    return median(now), gains


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=LINEAR_SHAPES, default=list(LINEAR_SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    console = Console(width=180)
    console.print(describe(machine_facts()), native.isa(), f"{options.threads} threads", highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        products = {AS_IT_IS: build(Path(scratch) / "now", "", "")}
        products[ONE_THREAD] = products[AS_IT_IS]
        for number, (name, (was, becomes)) in enumerate(CHOICES.items()):
            products[name] = build(Path(scratch) / str(number), was, becomes)
        table = Table("product", "rows", "µs", *list(products)[1:])
        for shape in options.shapes:
            for rows in ROWS:
                now, gains = measure(products, *LINEAR_SHAPES[shape], rows, options.rounds, options.threads)
                table.add_row(shape, str(rows), f"{now:.1f}", *(f"{gain:.2f}" for gain in gains.values()))
    console.print(table)


if __name__ == "__main__":
    main()
