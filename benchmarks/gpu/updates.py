"""Sections about weight updates: each transport as a share of the link that its bytes must cross, NCCL."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu.run import Run
from harness.bare import plain_read_and_copy
from harness.soak import SETTLED
from harness.transports import Trainer, Transport
from safetensors.torch import load_file

from caesura.client import SamplingParams, SchedulerClient
from caesura.client.trainer import WeightUpdateGroup

BUCKET_BYTES = 64 << 20
HOST_TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor", "ipc", "ipc-shared", "distributed")
NCCL_BYTES = 256 << 20


def transports(run: Run) -> dict[str, Any]:
    """Update the small model by every transport; ``share`` is of the link's or the device's bandwidth."""
    found: dict[str, Any] = {}
    folders = [run.small(seed) for seed in (0, 1)]
    plain = plain_read_and_copy(folders[0])
    found["plain_read_bytes_per_s"] = plain["bytes"] / plain["seconds"]
    with run.launch(folders[0]) as client, Trainer(client, folders, HOST_TRANSPORTS, BUCKET_BYTES) as trainer:
        for name in HOST_TRANSPORTS:
            found[name] = _measured(
                run,
                lambda which, name=name: trainer.push(name, which, flush_cache=False),
                run.link.host_to_device,
            )
        if run.on_card:
            found["cuda-ipc"] = _cuda_ipc(run, client, folders)
            found["nccl"] = _nccl_of_two(run, client, folders)
    return found


def nccl(run: Run) -> dict[str, Any]:
    """Make, use and abort a group as the engine does, alone; without a card over gloo."""
    from caesura.transfer.process_group import Membership, make_backend, release

    backend = "nccl" if run.on_card else "gloo"
    member = Membership("alone", "127.0.0.1:0", 1, 0, backend)
    device = torch.device("cuda", 0) if run.on_card else run.device
    made = make_backend(member, dist.HashStore(), timedelta(seconds=30), device=device)
    data = torch.ones(NCCL_BYTES if run.on_card else 1 << 10, dtype=torch.uint8, device=device)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        made.broadcast([data], options).wait()
        seconds.append(time.perf_counter() - start)
    start, holder = time.perf_counter(), [made]
    del made
    release(holder)
    return {"backend": backend, "broadcast_s": seconds, "abort_s": time.perf_counter() - start}


def growth(run: Run) -> dict[str, Any]:
    """Record reserved bytes after each of many updates in place, with requests in flight."""
    plan, folders = run.plan, [run.small(seed) for seed in (0, 1)]
    reserved: list[int] = []
    paused_s, update_s = [], []
    params = SamplingParams(max_new_tokens=max(4, plan.steps // 4), ignore_eos=True)
    with run.launch(folders[0]) as client:
        for turn in range(1, plan.updates + 1):
            handles = [
                client.submit(prompt, params)
                for prompt in run.prompts(4, plan.prompt_tokens, turn, plan.small)
            ]
            start = time.perf_counter()
            client.pause("in_place")
            paused_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            client.update_weights_from_disk(folders[turn % 2], flush_cache=False)
            update_s.append(time.perf_counter() - start)
            after = client.continue_generation().reserved_after
            assert after is not None, "an engine that was paused says it"
            reserved.append(after)
            for handle in handles:
                handle.result()
    total, late = reserved[-1] - reserved[SETTLED - 1], reserved[-1] - reserved[len(reserved) // 2 - 1]
    return {
        "updates": len(reserved), "reserved": reserved, "growth_bytes": total, "late_bytes": late,
        "pause_s": paused_s, "update_s": update_s,
    }  # fmt: skip


def _measured(run: Run, push: Any, link: float) -> dict[str, Any]:
    """Time ``push`` to each of the two checkpoints in turn; the first time is not counted."""
    seconds, sent = [], 0
    for turn in range(1 + run.plan.transport_updates):
        start = time.perf_counter()
        reply = push(1 - turn % 2)
        seconds.append(time.perf_counter() - start)
        sent = sum(file.stat().st_size for file in run.small(0).glob("*.safetensors"))
        assert reply.committed, reply
    rate = sent / min(seconds[1:])
    return {
        "seconds": seconds[1:],
        "first_s": seconds[0],
        "bytes": sent,
        "bytes_per_s": rate,
        "share": rate / link,
    }


def _cuda_ipc(run: Run, client: SchedulerClient, folders: list[Path]) -> dict[str, Any]:
    weights = [load_file(folder / "model.safetensors", device="cuda") for folder in folders]
    found = _measured(
        run,
        lambda which: client.update_weights_from_ipc(
            weights[which].items(), bucket_bytes=BUCKET_BYTES, flush_cache=False
        ),
        run.link.on_device,
    )
    return found


def _nccl_of_two(run: Run, client: SchedulerClient, folders: list[Path]) -> dict[str, Any]:
    """Update from another card of this machine: NCCL refuses two ranks on one."""
    if torch.cuda.device_count() < 2:
        return {"left_out": "one card: NCCL takes one rank on each"}
    torch.cuda.set_device(1)
    try:
        weights = [load_file(folder / "model.safetensors", device="cuda:1") for folder in folders]
        with WeightUpdateGroup.create([client], backend="nccl", group_name="nccl") as group:
            return _measured(
                run,
                lambda which: group.update(
                    weights[which].items(), bucket_bytes=BUCKET_BYTES, flush_cache=False
                )[0],
                run.link.on_device,
            )
    finally:
        torch.cuda.set_device(0)
