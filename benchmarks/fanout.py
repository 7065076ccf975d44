"""Cost of an update of 1, 2 and 4 engines of this host to its trainer, and a model of a thousand.

Routes: ``shared`` (one export of shared memory, read by all), ``chain`` (each engine passes on what it
receives, gloo over loopback), ``broadcast`` (one group of all, gloo) and ``clone`` (no trainer: an engine
sends to the others down a chain). Columns:

    CPU         time of all threads of the trainer's process
    own         time of its calling thread: copies into buckets, messages, handing over broadcasts
    committed   until every engine serves the new weights
    sent        copies of the weights that its TCP connections had acknowledged, from the kernel's counters

All engines share this machine's cores with the trainer, so ``committed`` grows with their number; ``CPU`` and
``sent`` say if the trainer's cost is flat. Turns are interleaved; medians. The second table puts the measured
cost of a hop into the model of ``harness/fan_out_model.py`` (alone: ``--hop-ms``).

    python benchmarks/fanout.py --turns 7 --json out.json
"""

import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from checkpoints import SHAPES, write_checkpoint
from harness.fan_out_model import ROADS, FanOut, best_bucket
from harness.script import begin, parser, table, write_json
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from weight_update import MODELS

from caesura.client import ControlClient, launch_scheduler
from caesura.client.trainer import (
    SharedTensors,
    WeightUpdateChain,
    WeightUpdateGroup,
    clone_weights,
    update_from_shared,
)

MIB = 1 << 20
SIZES = {**MODELS, "tiny": SHAPES["tiny"]}
GB = 1e9
_BYTES_ACKED = 120
"""Offset of tcpi_bytes_acked in the kernel's struct tcp_info (include/uapi/linux/tcp.h)."""
Weights = dict[str, torch.Tensor]


@dataclass
class Measured:
    """The turns of one route with one number of engines."""

    cpu_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    sent_copies: list[float] = field(default_factory=list)


def acknowledged_bytes() -> int:
    """Return the bytes that the other ends of this process's TCP connections have acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except OSError:  # closed meanwhile, or no connection
            continue
    return total


class Trainer:
    """Weights that differ in every tensor from turn to turn, and every route to some of the engines."""

    def __init__(self, engines: Sequence[ControlClient], weights: Weights, bucket_bytes: int) -> None:
        self._engines = engines
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._stack = ExitStack()
        self._shared = self._stack.enter_context(SharedTensors(weights))
        self._chains: dict[int, WeightUpdateChain] = {}
        self._groups: dict[int, WeightUpdateGroup] = {}
        self._turns = 0
        self.num_tensors = len(weights)
        self.nbytes = sum(tensor.nbytes for tensor in weights.values())

    def close(self) -> None:
        self._stack.close()

    def turn(self, road: str, number: int, into: Measured, *, bucket_bytes: int | None = None) -> None:
        """Update the first ``number`` engines."""
        self._turns += 1
        for tensor in self._weights.values():
            tensor.view(-1)[0] = self._turns % 251  # which bfloat16 holds exactly
        push = self._push(road, self._engines[:number], bucket_bytes or self._bucket_bytes)
        acknowledged, cpu, began = acknowledged_bytes(), time.process_time(), time.perf_counter()
        own = time.thread_time()
        push()
        ended = time.perf_counter()
        into.own_s.append(time.thread_time() - own)
        into.cpu_s.append(time.process_time() - cpu)
        into.committed_s.append(ended - began)
        into.sent_copies.append((acknowledged_bytes() - acknowledged) / self.nbytes)

    def _push(self, road: str, engines: Sequence[ControlClient], bucket: int) -> Callable[[], object]:
        weights, number = self._weights, len(engines)
        if road == "shared":

            def share() -> None:
                self._shared.copy_from(weights)
                update_from_shared(engines, self._shared)

            return share
        if road == "broadcast":
            if number not in self._groups:
                made = WeightUpdateGroup.create(engines, group_name=f"all of {number}")
                self._groups[number] = self._stack.enter_context(made)
            return lambda: self._groups[number].update(weights, bucket_bytes=bucket)
        if road == "chain":
            if number not in self._chains:
                chain = WeightUpdateChain.create(engines, group_name=f"chain of {number}")
                self._chains[number] = self._stack.enter_context(chain)
            return lambda: self._chains[number].update(weights, bucket_bytes=bucket)
        source, *targets = self._engines
        source.update_weights_from_ipc(weights)
        return lambda: clone_weights(source, targets[:number], bucket_bytes=bucket)


@contextmanager
def engines_of(folder: Path, number: int) -> Iterator[list[ControlClient]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(launch_scheduler(str(folder), num_threads=1, kv_pool_tokens=1024))
            for _ in range(number)
        ]


def measure(
    trainer: Trainer, numbers: Sequence[int], roads: Sequence[str], turns: int
) -> dict[str, dict[int, Measured]]:
    """Run interleaved turns of every route with every number of engines, after one that is not counted."""
    found = {road: {number: Measured() for number in numbers} for road in roads}
    for turn in range(turns + 1):
        for road, by_number in found.items():
            for number, measured in by_number.items():
                if road == "clone" and number == max(numbers):
                    continue  # one of them is the source
                trainer.turn(road, number, measured if turn else Measured())
    return found


def hop_seconds(trainer: Trainer, number: int, turns: int) -> float:
    """Return the seconds a broadcast costs on a hop beside its bytes: one per tensor against one for all."""
    each, all_in_one = Measured(), Measured()
    for turn in range(turns + 1):
        for into, bucket in ((each, 1), (all_in_one, trainer.nbytes)):
            trainer.turn("chain", number, into if turn else Measured(), bucket_bytes=bucket)
    more = trainer.num_tensors - 1
    return max(0.0, min(each.committed_s) - min(all_in_one.committed_s)) / more


def measured_table(found: dict[str, dict[int, Measured]], nbytes: int) -> Table:
    """Show medians, and the trainer's CPU seconds beside those of one engine."""
    rows = []
    for road, by_number in found.items():
        counted = {number: each for number, each in by_number.items() if each.cpu_s}
        first = statistics.median(counted[min(counted)].cpu_s)
        for number, each in counted.items():
            cpu = statistics.median(each.cpu_s)
            times = [statistics.median(seconds) for seconds in (each.own_s, each.committed_s)]
            sent = statistics.median(each.sent_copies)
            figures = [f"{1e3 * cpu:.0f}", f"{cpu / first:.2f}", *(f"{1e3 * each:.0f}" for each in times)]
            rows.append([road, str(number), *figures, f"{sent:.2f}"])
    headings = "route|engines|CPU ms|of one engine|own ms|committed ms|sent"
    return table(f"one update of {nbytes / GB:.2f} GB", headings.split("|"), rows)


def model_table(weights: float, engines: int, link: float, hop_s: float) -> Table:
    """Show seconds and copies by route, each with 64 MiB buckets, and the chain with its best."""
    title = (
        f"{engines:,} engines, {weights / GB:.0f} GB, {8 * link / GB:.0f} Gb/s, {1e3 * hop_s:.2f} ms a hop"
    )
    rows = []
    best = best_bucket(weights, engines, link, hop_s)
    for road, bucket in (*((road, 64.0 * MIB) for road in ROADS), ("chain", best)):
        update = FanOut(weights=weights, engines=engines, link=link, bucket=bucket, hop_s=hop_s)
        copies = update.trainer_sends(road) / weights
        rows.append([road, f"{bucket / MIB:.0f} MiB", f"{update.seconds(road):,.1f}", f"{copies:,.0f}"])
    return table(title, ["route", "bucket", "seconds", "copies that leave the trainer"], rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", choices=SIZES, default="dense")
    made.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--roads", nargs="+", default=["shared", "chain", "broadcast", "clone"])
    made.add_argument("--turns", type=int, default=7)
    made.add_argument("--bucket-mib", type=float, default=8)
    made.add_argument("--weights-gb", type=float, default=141.0, help="of the model table: 70B in bfloat16")
    made.add_argument("--replicas", type=int, default=1000)
    made.add_argument("--link-gbits", type=float, default=400.0)
    made.add_argument("--hop-ms", type=float, help="only print the model, with this for a bucket and hop")
    options = made.parse_args()
    console = Console()
    modelled = (options.weights_gb * GB, options.replicas, options.link_gbits * GB / 8)
    if options.hop_ms is not None:
        console.print(model_table(*modelled, options.hop_ms / 1e3))
        return
    torch.set_num_threads(1)
    facts = begin(console)
    with tempfile.TemporaryDirectory() as scratch:
        shape = SIZES[options.model]
        folder = write_checkpoint(Path(scratch) / "model", shape, dtype="bfloat16")
        weights = load_file(folder / "model.safetensors")
        with engines_of(folder, max(options.engines)) as engines:
            trainer = Trainer(engines, weights, round(options.bucket_mib * MIB))
            try:
                found = measure(trainer, options.engines, options.roads, options.turns)
                hop_s = hop_seconds(trainer, min(options.engines), 3 * options.turns)
            finally:
                trainer.close()
    console.print(measured_table(found, trainer.nbytes))
    console.print(model_table(*modelled, hop_s))
    measured = {road: {str(n): asdict(each) for n, each in by_n.items()} for road, by_n in found.items()}
    document = {"machine": facts, "bytes": trainer.nbytes, "hop_s": hop_s, "roads": measured}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
