"""Weight updates by every transport, beside what the same bytes cost without an engine, in one run.

References, each on the same tensors and in the same process: a plain read + copy of the files (disk), a plain copy of
the tensors (ipc), a bare ZeroMQ loop of 64 MB frames with an answer for each (tensor). ``of reference`` is the
reference's time over the update's, so 100 % means that the engine adds nothing. Repeats are interleaved; medians.

    python benchmarks/weight_update.py --gb 0.1 1.2
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq
from checkpoints import SHAPES, Shape, write_checkpoint
from harness.machine import describe, machine_facts
from harness.reference import plain_read_and_copy
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from caesura.client import SchedulerClient, launch_scheduler
from caesura.client.tensors import buckets
from caesura.io_struct import WeightUpdateReqOutput

BUCKET_BYTES = 64 << 20
MEDIUM = Shape(
    num_hidden_layers=8,
    hidden_size=768,
    intermediate_size=2304,
    num_attention_heads=12,
    num_key_value_heads=6,
    head_dim=64,
    vocab_size=4096,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
)
"""About 0.1 GB in bfloat16."""

Weights = dict[str, torch.Tensor]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_once(weights: Weights, destination: Weights) -> None:
    for name, tensor in weights.items():
        destination[name].copy_(tensor)


class BareLoop:
    """A DEALER and a ROUTER in another thread that copies each frame and answers: what ZeroMQ alone takes."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        endpoint = f"ipc://{folder}/bare.sock"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(endpoint)
        self._memory = torch.empty(2 * BUCKET_BYTES, dtype=torch.uint8)
        threading.Thread(target=self._serve, daemon=True).start()

    def send(self, weights: Weights) -> None:
        for bucket in buckets(weights.items(), BUCKET_BYTES):
            frames = [piece.rows.view(torch.uint8).reshape(-1).numpy().data for piece in bucket.pieces]
            self._dealer.send_multipart([b"header", *frames], copy=False)
            self._dealer.recv()

    def _serve(self) -> None:
        while True:
            client = self._router.recv()
            while self._router.rcvmore:
                frame = self._router.recv(copy=False).buffer
                if len(frame) > len(b"header"):
                    self._memory[: len(frame)].copy_(torch.frombuffer(frame, dtype=torch.uint8))
            self._router.send_multipart([client, b""])


def measure(client: SchedulerClient, folders: list[Path], repeats: int, scratch: Path) -> Table:
    """One table row per transport."""
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    total = sum(tensor.nbytes for tensor in weights[0].values())
    destination = {name: torch.zeros_like(tensor) for name, tensor in weights[0].items()}
    bare = BareLoop(scratch)
    transports: dict[str, Callable[[int], WeightUpdateReqOutput]] = {
        "disk": lambda which: client.update_weights_from_disk(folders[which]),
        "tensor": lambda which: client.update_weights_from_tensor(
            weights[which].items(), bucket_bytes=BUCKET_BYTES
        ),
        "ipc": lambda which: client.update_weights_from_ipc(
            weights[which].items(), bucket_bytes=BUCKET_BYTES
        ),
    }
    references: dict[str, Callable[[int], float]] = {
        "disk": lambda which: plain_read_and_copy(folders[which], repeats=1)["seconds"],
        "tensor": lambda which: timed(lambda: bare.send(weights[which])),
        "ipc": lambda which: timed(lambda: copy_once(weights[which], destination)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in transports}
    reference: dict[str, list[float]] = {name: [] for name in transports}
    copies: dict[str, list[float]] = {name: [] for name in transports}
    which = 0
    for turn in range(repeats + 1):
        for name, update in transports.items():
            which = 1 - which  # other weights than those in place, whatever transport brought them
            expected, start = references[name](which), time.perf_counter()
            reply = update(which)
            took = time.perf_counter() - start
            assert reply.committed and reply.changed_tensors, name
            if turn:  # the first turn touches memory for the first time
                seconds[name].append(took)
                reference[name].append(expected)
                copies[name].append(reply.stages.receive + reply.stages.copy)
    table = Table(title=f"{total / 1e9:.2f} GB, {len(weights[0])} tensors, medians of {repeats}")
    for column in (
        "transport",
        "update ms",
        "GB/s",
        "engine's read + copy ms",
        "reference ms",
        "of reference",
    ):
        table.add_column(column, justify="left" if column == "transport" else "right")
    for name in transports:
        update_s, reference_s = statistics.median(seconds[name]), statistics.median(reference[name])
        table.add_row(
            name,
            f"{1e3 * update_s:.1f}",
            f"{total / 1e9 / update_s:.2f}",
            f"{1e3 * statistics.median(copies[name]):.1f}",
            f"{1e3 * reference_s:.1f}",
            f"{reference_s / update_s:.0%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="+", choices=(0.1, 1.2), default=[0.1])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    console = Console(width=120)
    console.print(describe(machine_facts()))
    for size in options.gb:
        with tempfile.TemporaryDirectory() as scratch:
            folders = [
                write_checkpoint(
                    Path(scratch) / str(seed), MEDIUM if size == 0.1 else SHAPES["0.6b"], seed=seed
                )
                for seed in (0, 1)
            ]
            with launch_scheduler(
                str(folders[0]), num_threads=1, kv_pool_tokens=4096, log_level="WARNING"
            ) as client:
                console.print(measure(client, folders, options.repeats, Path(scratch)))


if __name__ == "__main__":
    main()
