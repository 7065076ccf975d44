"""Weight updates by every transport, beside what the same bytes cost without an engine, in one run.

References, each on the same bytes and in the same process: a plain read + copy of the files (disk), a bare
ZeroMQ loop with an answer for each bucket (tensor), a plain copy of the tensors (ipc), a bare gloo broadcast
+ copy (distributed). ``of reference`` is the reference's time over the update's, so 100 % means that the
engine adds nothing. Stages are the engine's own figures, summed over all buckets; total is from the first
message to the last answer, and so contains what the engine waits for the trainer. Turns are interleaved;
medians.

A model's ``commit`` line is what the commit alone takes: a session is filled, then ``end`` is sent.

``peak`` is how far the engine's resident memory (shared memory included) rose above what it was before the
update, the largest of all turns; with ipc-shared that is the trainer's own memory, mapped. The target is at
most ``workspace`` and 5 % of weights and KV. The first turn starts from a trimmed heap and is not timed.

    python benchmarks/weight_update.py --models dense dense-1.2 moe mla mla-fp8 --json out.json
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from checkpoints import SHAPES, CheckpointShape, Shape
from harness.bare import BareGloo, BareZeroMQ, copy_seconds, plain_read_and_copy
from harness.process_memory import MB, read_memory, reset_peak
from harness.script import begin, parser, table, two_checkpoints, write_json
from harness.transports import TRANSPORTS, Trainer, Transport
from rich.console import Console
from rich.table import Table

from caesura.client import SchedulerClient, launch_scheduler

STAGES = ("receive", "copy", "derive", "flush", "total")
DISK_BUCKET_BYTES = 8 << 20
"""The engine's default: a disk update needs one such bucket, others what the trainer sends at once."""
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
MODELS: dict[str, CheckpointShape] = {
    "dense": MEDIUM,
    "dense-1.2": SHAPES["0.6b"],
    **{name: ARCHITECTURES[name] for name in ("moe", "mla", "mla-fp8")},
}
COMMITS = 5

Reference = Callable[[int], float]
"""Returns the seconds that the weights number ``which`` take without an engine."""


@dataclass
class Measured:
    """Turns of one transport."""

    seconds: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in STAGES})
    peak_bytes: list[int] = field(default_factory=list)
    """Bytes by which resident memory rose, the first turn included."""


@contextmanager
def references(
    trainer: Trainer, folders: Sequence[Path], transports: Sequence[Transport], bucket_bytes: int
) -> Iterator[dict[Transport, Reference]]:
    """Make the reference of each of ``transports``."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        found: dict[Transport, Reference] = {}
        if "disk" in transports:
            found["disk"] = lambda which: plain_read_and_copy(folders[which], repeats=1)["seconds"]
        if "tensor" in transports:
            bare = BareZeroMQ(Path(scratch), trainer.weights, bucket_bytes)
            stack.callback(bare.close)
            found["tensor"] = bare.seconds
        destination = {name: torch.zeros_like(tensor) for name, tensor in trainer.weights[0].items()}
        found["ipc"] = lambda which: copy_seconds(trainer.weights[which], destination)
        found["ipc-shared"] = found["ipc"]
        if "distributed" in transports:
            gloo = BareGloo(trainer.weights, bucket_bytes)
            stack.callback(gloo.close)
            found["distributed"] = gloo.seconds
        yield {transport: found[transport] for transport in transports}


def measure(
    client: SchedulerClient, trainer: Trainer, references: dict[Transport, Reference], repeats: int
) -> dict[Transport, Measured]:
    """Run ``repeats`` timed turns of every transport, after one for memory alone."""
    results = {transport: Measured() for transport in references}
    pid, which = client.status().pid, 0
    for turn in range(repeats + 1):
        for transport, result in results.items():
            which = 1 - which  # other weights than those in place, whatever transport brought them
            expected = references[transport](which)
            if turn == 0:
                client.flush_cache(torch_empty_cache=True)
            reset_peak(pid)
            before = read_memory(pid).resident
            start = time.perf_counter()
            reply = trainer.push(transport, which)
            took = time.perf_counter() - start
            result.peak_bytes.append(read_memory(pid).peak - before)
            assert reply.committed and reply.changed_tensors, transport
            if turn:
                result.seconds.append(took)
                result.reference_s.append(expected)
                for stage in STAGES:
                    result.stages_s[stage].append(getattr(reply.stages, stage))
    return results


def workspace_bytes(transport: Transport, sizes: Sequence[int], bucket_bytes: int) -> int:
    """Return the bytes an update may need beside weights and KV; a broadcast tensor comes undivided."""
    match transport:
        case "disk":
            return DISK_BUCKET_BYTES
        case "ipc-shared":
            return sum(sizes)
        case "distributed":
            return max(min(bucket_bytes, sum(sizes)), *sizes)
        case "tensor" | "ipc":
            return min(bucket_bytes, sum(sizes))


def summarise(result: Measured, total: int, workspace: int) -> dict[str, float]:
    """Return medians in ms, and memory in MB."""
    update, reference = statistics.median(result.seconds), statistics.median(result.reference_s)
    return {
        "update_ms": 1e3 * update,
        "gb_per_s": total / 1e9 / update,
        **{f"{stage}_ms": 1e3 * statistics.median(result.stages_s[stage]) for stage in STAGES},
        "reference_ms": 1e3 * reference,
        "of_reference": reference / update,
        "peak_mb": max(result.peak_bytes) / MB,
        "workspace_mb": workspace / MB,
    }


def measure_commit(client: SchedulerClient, trainer: Trainer) -> dict[str, float]:
    """Measure the time and the memory of a commit alone."""
    pid, rises, seconds = client.status().pid, [], []
    for turn in range(COMMITS):
        client.begin_weight_update()
        client.update_weights_from_tensor(trainer.weights[turn % 2].items())
        client.flush_cache(torch_empty_cache=True)
        reset_peak(pid)
        before, start = read_memory(pid).resident, time.perf_counter()
        reply = client.end_weight_update()
        seconds.append(time.perf_counter() - start)
        rises.append(read_memory(pid).peak - before)
        assert reply.committed
    return {
        "commit_ms": 1e3 * statistics.median(seconds),
        "commit_peak_mb": max(rises) / MB,
    }


def run_model(model: str, options: argparse.Namespace, shape: Any = None) -> dict[str, Any]:
    """Measure all transports on one model: sizes in bytes, and a row and every measurement per transport."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = two_checkpoints(scratch, shape or MODELS[model], dtype="bfloat16")
        client = stack.enter_context(
            launch_scheduler(
                folders[0],
                num_threads=options.threads,
                kv_pool_tokens=4096,
                load_bucket_bytes=DISK_BUCKET_BYTES,
                quantization=options.quantization,
                log_level="WARNING",
            )
        )
        trainer = stack.enter_context(Trainer(client, folders, options.transports, options.bucket_bytes))
        chosen = stack.enter_context(references(trainer, folders, options.transports, options.bucket_bytes))
        sizes = [tensor.nbytes for tensor in trainer.weights[0].values()]
        measured = measure(client, trainer, chosen, options.repeats)
        memory = client.status().device_memory
        return {
            "bytes": sum(sizes),
            "tensors": len(sizes),
            "commit": measure_commit(client, trainer),
            "weights_and_kv_bytes": memory.weights + memory.kv_cache,
            "rows": {
                name: summarise(one, sum(sizes), workspace_bytes(name, sizes, options.bucket_bytes))
                for name, one in measured.items()
            },
            "measurements": {name: vars(one) for name, one in measured.items()},
        }


def as_table(model: str, size: dict[str, Any], repeats: int) -> Table:
    rows, resident = size["rows"], size["weights_and_kv_bytes"] / MB
    title = (
        f"{model}: {size['bytes'] / 1e9:.2f} GB, {size['tensors']} tensors, medians of {repeats}; "
        f"weights + KV {resident:,.0f} MB, 5 % of it {0.05 * resident:,.0f} MB"
    )
    headings = [
        "transport",
        "update ms",
        "GB/s",
        *STAGES,
        "reference",
        "of reference",
        "peak MB",
        "workspace",
    ]
    formats = {"update_ms": ".1f", "gb_per_s": ".2f", **{f"{stage}_ms": ".1f" for stage in STAGES}}
    formats |= {"reference_ms": ".1f", "of_reference": ".0%", "peak_mb": ".1f", "workspace_mb": ".0f"}
    cells = ([name, *(format(row[key], how) for key, how in formats.items())] for name, row in rows.items())
    return table(title, headings, cells)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["dense"])
    made.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    made.add_argument("--repeats", type=int, default=9)
    made.add_argument("--threads", type=int, default=1, help="of the engine, and of the trainer")
    made.add_argument("--quantization", default="auto", help="of the engine; the trainer sends bfloat16")
    made.add_argument("--bucket-bytes", type=int, default=64 << 20, help="what the trainer sends at once")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=130)
    facts, models = begin(console), {}
    for model in options.models:
        models[model] = run_model(model, options)
        console.print(as_table(model, models[model], options.repeats))
        commit = models[model]["commit"]
        console.print(f"commit {commit['commit_ms']:.1f} ms, peak {commit['commit_peak_mb']:.1f} MB")
    write_json(options.json, {"machine": facts, "models": models})


if __name__ == "__main__":
    main()
