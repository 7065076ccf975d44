"""Deltas beside full updates: bytes, and times of the trainer and the engine, by the share that changed.

Every turn changes another random set of elements (one bit of each), finds them against the copy of what the
engine has (``find``), sends them over each transport (``delta``) and, in turn, all tensors (``full``).
``pause`` is what the engine needs between two steps: writing, deriving and flushing; the rest it does while
it generates. ``copy`` is a plain copy of all weights in the trainer; it and ``find`` are CPU time. Turns are
interleaved; medians, in ms.

    python benchmarks/sparse_update.py --models dense-1.2 --json out.json
"""

import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from harness.script import begin, parser, table, two_checkpoints, write_json
from harness.transports import TRANSPORTS, Trainer, Transport, Weights
from rich.console import Console
from weight_update import DISK_BUCKET_BYTES, MODELS

from caesura.client import launch_scheduler
from caesura.client.trainer import DeltaTracker, WeightDelta
from caesura.io_struct import WeightUpdateReqOutput

SPARSE: tuple[Transport, ...] = ("tensor", "ipc", "disk", "distributed")
Times = dict[str, list[float]]


def change(weights: Weights, share: float) -> Weights:
    """Return a copy in which a random ``share`` of the elements differs by a bit."""
    new = {}
    for name, tensor in weights.items():
        new[name] = tensor.clone()
        words = new[name].view(-1).view(torch.int16)
        count = max(1, round(share * words.numel()))
        words[torch.randint(words.numel(), (count,))] ^= 1
    return new


def pause_s(reply: WeightUpdateReqOutput) -> float:
    return reply.stages.copy + reply.stages.derive + reply.stages.flush


def measure(
    trainer: Trainer,
    tracker: DeltaTracker,
    share: float,
    transports: list[Transport],
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    """Run turns of one share; return medians in ms by what was timed, and bytes."""
    times: Times = defaultdict(list)
    sizes = []
    for _ in range(repeats):
        for transport in transports:
            old, trainer.weights[0] = trainer.weights[0], change(trainer.weights[0], share)
            began = time.process_time()
            for name, tensor in old.items():
                old[name] = tensor.clone()
            times["copy"].append(time.process_time() - began)
            began = time.process_time()
            delta = tracker.delta(trainer.weights[0])
            times["find"].append(time.process_time() - began)
            sizes.append(delta.nbytes)
            began = time.perf_counter()
            reply = send(trainer, transport, delta, folder)
            times[f"{transport} delta"].append(time.perf_counter() - began)
            times[f"{transport} pause"].append(pause_s(reply))
            assert reply.committed and reply.digest in ("", delta.digest), reply
            tracker.sent(delta)
            began = time.perf_counter()
            full = trainer.push(
                "ipc" if transport == "disk" else transport, 0
            )  # a folder would be written first
            times[f"{transport} full"].append(time.perf_counter() - began)
            times[f"{transport} full pause"].append(pause_s(full))
    return {"mb": statistics.median(sizes) / 1e6} | {
        name: 1e3 * statistics.median(each) for name, each in times.items()
    }


def send(trainer: Trainer, transport: Any, delta: WeightDelta, folder: Path) -> WeightUpdateReqOutput:
    return trainer.client.update_weights_sparse(
        # the rule that would choose a full update is what the table is for
        WeightDelta(delta, base_digest=delta.base_digest, digest=delta.digest),
        transport=transport,
        folder=folder,
        group=trainer.group,
    )


def run_model(model: str, options: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = two_checkpoints(scratch, MODELS[model], dtype="bfloat16")[:1]
        client = stack.enter_context(
            launch_scheduler(
                folders[0],
                num_threads=options.threads,
                kv_pool_tokens=4096,
                load_bucket_bytes=DISK_BUCKET_BYTES,
                log_level="ERROR",
            )
        )
        trainer = stack.enter_context(Trainer(client, folders, options.transports, 64 << 20))
        tracker = DeltaTracker(trainer.weights[0], like=client.weights_manifest().tensors)
        return {
            "bytes": sum(tensor.nbytes for tensor in trainer.weights[0].values()),
            "shares": {
                share: measure(
                    trainer, tracker, share, options.transports, options.repeats, scratch / "delta"
                )
                for share in options.shares
            },
        }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["dense"])
    made.add_argument(
        "--transports", nargs="+", choices=[t for t in TRANSPORTS if t in SPARSE], default=SPARSE
    )
    made.add_argument("--shares", nargs="+", type=float, default=[0.001, 0.01, 0.03, 0.1])
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--threads", type=int, default=1, help="of the engine, and of the trainer")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=150)
    facts, models = begin(console), {}
    for model in options.models:
        models[model] = run_model(model, options)
        rows = models[model]["shares"]
        columns = list(next(iter(rows.values())))
        cells = [
            [f"{share:.1%}", *(f"{row[column]:.1f}" for column in columns)] for share, row in rows.items()
        ]
        title = f"{model}: {models[model]['bytes'] / 1e9:.2f} GB, medians of {options.repeats}"
        console.print(table(title, ["changed", *columns], cells))
    write_json(options.json, {"machine": facts, "models": models})


if __name__ == "__main__":
    main()
