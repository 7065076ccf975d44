"""What a gigabyte costs on its way into a process, by the roads that a weight update could take.

One thread, pieces as named, every way once per round and rounds interleaved; medians of all rounds but the first. The
file lies in the page cache. This is why disk updates read with ``pread`` into one bucket, why shared memory stays mapped,
and why no thread reads ahead.

    python benchmarks/host_copies.py --gb 1
"""

import argparse
import mmap
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from harness.machine import describe, machine_facts
from rich.console import Console
from rich.table import Table
from torch import Tensor

MIB = 1 << 20


def ways(descriptor: int, size: int, target: Tensor) -> dict[str, Callable[[], None]]:
    """How ``size`` bytes behind ``descriptor`` may reach ``target``; each call does it once."""
    mapped = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def copy(source: Tensor) -> None:
        for start in range(0, size, 8 * MIB):
            target[start : start + 8 * MIB].copy_(source[start : start + 8 * MIB])

    def fresh(flags: int) -> None:
        copy(torch.frombuffer(mmap.mmap(descriptor, size, flags=flags), dtype=torch.uint8))

    def through(bucket: Tensor) -> None:
        step = len(bucket)
        for start in range(0, size, step):
            os.preadv(descriptor, [bucket.numpy().data], start)
            target[start : start + step].copy_(bucket)

    def straight() -> None:
        view = target.numpy().data
        for start in range(0, size, 8 * MIB):
            os.preadv(descriptor, [view[start : start + 8 * MIB]], start)

    found: dict[str, Callable[[], None]] = {
        "a mapping that exists": lambda: copy(mapped),
        "a fresh mapping": lambda: fresh(mmap.MAP_SHARED),
        "a fresh mapping, populated": lambda: fresh(mmap.MAP_SHARED | mmap.MAP_POPULATE),
        "pread into its place": straight,
    }
    for mib in (1, 8):
        bucket = torch.ones(mib * MIB, dtype=torch.uint8)
        found[f"pread into a bucket of {mib} MB"] = lambda bucket=bucket: through(bucket)  # type: ignore[misc]
        pair = [torch.ones(mib * MIB, dtype=torch.uint8) for _ in range(2)]
        found[f"a thread that reads ahead, 2 x {mib} MB"] = lambda pair=pair: read_ahead(  # type: ignore[misc]
            descriptor, size, pair, target
        )
    return found


def read_ahead(descriptor: int, size: int, buckets: list[Tensor], target: Tensor) -> None:
    """Copy each bucket out while a thread fills the next."""
    step, count = len(buckets[0]), len(buckets)
    room, ready = threading.Semaphore(count), queue.SimpleQueue[int]()

    def read() -> None:
        for number, start in enumerate(range(0, size, step)):
            room.acquire()
            os.preadv(descriptor, [buckets[number % count].numpy().data], start)
            ready.put(number)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(0, size, step):
        number = ready.get()
        target[number * step : (number + 1) * step].copy_(buckets[number % count])
        room.release()
    reader.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    size = max(1, round(options.gb * 1e9 / (8 * MIB))) * 8 * MIB
    torch.set_num_threads(1)
    target = torch.ones(size, dtype=torch.uint8)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(memory := os.memfd_create("host-copies"), 0, size)
        block = os.urandom(8 * MIB)
        for descriptor in (file.fileno(), memory):
            for start in range(0, size, len(block)):
                os.pwrite(descriptor, block, start)
        roads = {"file": ways(file.fileno(), size, target), "shared memory": ways(memory, size, target)}
        for _ in range(options.rounds):
            for source, found in roads.items():
                for name, run in found.items():
                    began = time.perf_counter()
                    run()
                    times.setdefault(f"{source}: {name}", []).append(time.perf_counter() - began)
    console = Console()
    console.print(describe(machine_facts()), highlight=False)
    table = Table(title=f"{size / 1e9:.2f} GB, one thread")
    for heading in ("way", "ms", "GB/s"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for name, seconds in sorted(times.items(), key=lambda item: statistics.median(item[1][1:])):
        median = statistics.median(seconds[1:])
        table.add_row(name, f"{1e3 * median:.0f}", f"{size / median / 1e9:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
