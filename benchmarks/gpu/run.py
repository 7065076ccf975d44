"""One run: its sections, what they found, and the file that has it.

Invariants:
- The file is written again after every section: a run that is killed leaves the sections it had done.
- A section that fails says why, and the next one runs. One that takes too long is interrupted, and one that
  would start after the time is up is left out; both say so.
- A failure may leave the device useless to this process (an illegal access does): whoever runs the sections
  is told, since only a new process can go on.
"""

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import CheckpointShape, write_checkpoint
from gpu.plan import OnDevice, Plan
from harness.limits import Ceilings
from harness.machine import machine_facts
from rich.console import Console

from caesura.client import LaunchedScheduler, launch_scheduler

Section = Callable[["Run"], Any]
SECTION_S = 240
"""Longest time for one section."""


class DeviceLostError(Exception):
    """The device cannot be used by this process any more."""


@dataclass(frozen=True, slots=True)
class Link:
    """Measured link between host and device."""

    host_to_device: float
    """Bytes per second, from pinned memory."""
    on_device: float
    """Bytes copied per second within the device."""


class Run:
    """State that sections share."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        work: Path,
        json_path: Path | None,
        budget_s: float = 600.0,
        peer_timeout_s: float = 150.0,
    ) -> None:
        self.plan, self.device, self.work, self._json_path = plan, device, work, json_path
        self.console = Console(width=None if sys.stdout.isatty() else 120)
        self.found: dict[str, Any] = {
            "machine": machine_facts() | {"device": _device_name(device)},
            "seconds": {},
        }
        self.ceilings = Ceilings(1.0, 1.0, 1.0)
        self.link = Link(1.0, 1.0)
        self.peer_timeout_s = peer_timeout_s
        self._until = time.monotonic() + budget_s
        self._folders: dict[tuple[str, int], Path] = {}

    def left_s(self) -> float:
        """Return the seconds until no section begins any more."""
        return max(0.0, self._until - time.monotonic())

    @property
    def on_card(self) -> bool:
        """True on a card, False in a trial on the CPU."""
        return self.device.type == "cuda"

    def section(self, name: str, work: Section) -> None:
        """Run a section and keep what it returns, or why it failed."""
        if time.monotonic() > self._until:
            self.record(name, {"left_out": "the time was up"})
            return
        self.console.print(f"[dim]{name} …[/dim]")
        started = time.perf_counter()
        failed = False
        try:
            with _limited(SECTION_S):
                found = work(self)
        except Exception as error:  # noqa: BLE001  whatever it is, the file says it and the run goes on
            failed, lines = True, traceback.format_exception(error)
            found = {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": "".join(lines)[-4000:]}
            self.console.print(f"[red]{name}: {found['error']}[/red]", markup=True)
        self.found["seconds"][name] = time.perf_counter() - started
        self.record(name, found)
        if failed and self.on_card:
            self._require_device(name)
        self.free()

    def take_over(self, found: dict[str, Any]) -> None:
        """Take over what a process before this one had found."""
        self.found = found
        known = found.get("ceilings", {})
        if "flops" in known:
            self.ceilings = Ceilings(known["read_bytes_per_s"], known["copy_bytes_per_s"], known["flops"])
            self.link = Link(known["host_to_device"], known["copy_on_device"])

    def _require_device(self, name: str) -> None:
        try:
            torch.zeros(1, device=self.device).item()
        except RuntimeError as error:
            raise DeviceLostError(f"after {name}: {error}") from error

    def record(self, name: str, value: Any) -> None:
        """Keep ``value`` and write everything so far; the file is replaced and always complete."""
        self.found[name] = value
        if self._json_path is not None:
            beside = self._json_path.with_name(f".{self._json_path.name}.new")
            beside.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")
            os.replace(beside, self._json_path)

    def free(self) -> None:
        """Give the device's memory back between two sections."""
        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()

    def folder(self, name: str, shape: CheckpointShape, seed: int = 0, shards: int = 1) -> Path:
        path = self.work / f"{name}-{seed}"
        if (name, seed) not in self._folders and (
            path / "config.json"
        ).exists():  # of a process before this one
            self._folders[name, seed] = path
        if (name, seed) not in self._folders:
            self._folders[name, seed] = write_checkpoint(
                path, OnDevice(shape, self.device), seed=seed, shards=shards
            )
            self.free()
        return self._folders[name, seed]

    def large(self, seed: int = 0) -> Path:
        return self.folder("large", self.plan.shape, seed, shards=8 if self.on_card else 1)

    def small(self, seed: int = 0) -> Path:
        return self.folder("small", self.plan.small, seed)

    def launch(self, folder: Path, **options: Any) -> LaunchedScheduler:
        sizes: dict[str, Any] = {
            "context_len": self.plan.context_len,
            "kv_pool_tokens": self.plan.kv_tokens,
            "max_running_requests": self.plan.rows,
            "chunked_prefill_size": self.plan.chunk_tokens,
            "prefix_cache": False,
        }
        return launch_scheduler(
            folder,
            device=self.device.type,
            dtype="bfloat16",
            log_path=self.log_of(folder),
            **{**sizes, **options},
        )

    def log_of(self, folder: Path) -> Path:
        """Return the file to which the engine on ``folder`` logs."""
        return self.work / f"engine-{folder.name}.log"

    def prompts(
        self, count: int, length: int, seed: int, shape: CheckpointShape | None = None
    ) -> list[list[int]]:
        rng = random.Random(seed)
        size = (shape or self.plan.shape).tensor_shapes()["model.embed_tokens.weight"][0]
        return [[rng.randrange(size) for _ in range(length)] for _ in range(count)]


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this thread, which must be the main one, after a time."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (smoke: measures nothing)"
