"""Time of tensor parallelism's collectives between processes, over shared memory and over gloo.

Each rank is a process of one thread. Every operation runs some times in a row, all of them once per round;
printed are the median and the least of all rounds but the first, in microseconds a call. ``gloo's own sum``
is torch's all-reduce, whose order of additions depends on the number of elements; the engine gathers by gloo
and adds in the order of ranks.

    python benchmarks/collectives.py --ranks 2
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness.script import begin, parser, table, write_json
from rich.console import Console
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from caesura.scheduler.parallel import host_group, torch_group
from caesura.scheduler.parallel.group import TensorParallel

ELEMENTS = (1 << 14, 1 << 16, 1 << 18)
ROWS, VOCABULARY = 8, 151_936
TOKENS, HIDDEN = 128, 2048
"""Tokens of each rank, and the size of their rows."""
ANSWER_S = 300.0
CPU = torch.device("cpu")
Operation = Callable[[], object]


def operations(
    groups: dict[str, TensorParallel], store: Any, rank: int, size: int
) -> Iterator[tuple[str, str, Operation]]:
    """Yield the name of each operation, its transport, and a call."""
    bare: Any = dist.ProcessGroupGloo(PrefixStore("bare", store), rank, size, timedelta(seconds=ANSWER_S))
    for elements in ELEMENTS:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"sum of {elements >> 10} k {str(dtype).removeprefix('torch.')}"
            for way, group in groups.items():
                yield name, way, partial(group.all_reduce, torch.zeros(elements, dtype=dtype))
            numbers = torch.zeros(elements, dtype=dtype)
            yield name, "gloo's own sum", partial(_own_sum, bare, numbers)
    part = torch.zeros(ROWS, -(-VOCABULARY // size))
    out = torch.zeros(ROWS, VOCABULARY)
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    for way, group in groups.items():
        yield f"logits of {ROWS} rows, gathered on all", way, partial(group.all_gather, part, out)
        yield f"{ROWS} tokens from one to all", way, partial(group.broadcast, tokens, 0)
        yield "barrier", way, group.barrier
        rows = torch.zeros(size * TOKENS, HIDDEN, dtype=torch.bfloat16)
        own, counts = rows[:TOKENS], [TOKENS] * size
        named = f"of {size} x {TOKENS} rows of {HIDDEN} bfloat16"
        yield f"sum {named}", way, partial(group.all_reduce, rows)
        yield f"gather {named}", way, partial(group.gather_rows, own, counts)
        yield f"reduce-scatter {named}", way, partial(group.reduce_scatter, rows, counts)
        sent = [[TOKENS // size] * size] * size
        yield f"exchange of {TOKENS} rows from each", way, partial(group.all_to_all, own, sent)


def _own_sum(bare: Any, numbers: torch.Tensor) -> None:
    bare.allreduce([numbers]).wait()


def serve(pipe: Any, rank: int, size: int, rounds: int, calls: int) -> None:
    """Run one rank; rank 0 says where the others find it, and what came out."""
    torch.set_num_threads(1)
    memory: Any
    if rank == 0:
        memory, address = host_group.found(size)
        store, host = torch_group.listen("127.0.0.1", size)
        pipe.send((address, host))
    else:
        memory, host = pipe.recv()
        name, _, port = host.rpartition(":")
        store = TCPStore(name, int(port), size, is_master=False)
    groups: dict[str, TensorParallel] = {
        "shared memory": host_group.join(memory, rank, size),
        "gloo": torch_group.join(store, rank, size, CPU, torch.float32),
    }
    found = list(operations(groups, store, rank, size))
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, way, call in found:
            groups["shared memory"].barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            times.setdefault((name, way), []).append(1e6 * (time.perf_counter() - began) / calls)
    pipe.send(times if rank == 0 else None)
    pipe.recv()  # nobody leaves while others compute


def measure(size: int, rounds: int, calls: int) -> dict[tuple[str, str], list[float]]:
    """Return the microseconds a call of every operation and transport in each round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, rank, size, rounds, calls), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        where = _answer(pipes[0])
        for pipe in pipes[1:]:
            pipe.send(where)
        answers = [_answer(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    found: dict[tuple[str, str], list[float]] = answers[0]
    return found


def _answer(pipe: Any) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError("a rank does not answer")
    return pipe.recv()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--rounds", type=int, default=21)
    made.add_argument("--calls", type=int, default=20, help="in a row")
    options = made.parse_args()
    console = Console()
    facts, rows = begin(console), []
    times = measure(options.ranks, options.rounds, options.calls)
    for (name, way), values in times.items():
        kept = values[1:] or values
        rows.append([name, way, f"{statistics.median(kept):.0f}", f"{min(kept):.0f}"])
    title = f"{options.ranks} ranks of one thread, µs a call"
    console.print(table(title, ["operation", "over", "median", "least"], rows, words=2))
    found = [{"operation": name, "over": way, "us": values} for (name, way), values in times.items()]
    write_json(options.json, {"machine": facts, "ranks": options.ranks, "times": found})


if __name__ == "__main__":
    main()
