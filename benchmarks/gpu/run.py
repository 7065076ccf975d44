"""One run: its sections, what they found, and the file that has it.

Invariants:
- The file is written again before and after every section: a run that is killed leaves the sections it had
  done, and the name of the one that it was at.
- A section that fails says why, and the next one runs. One that takes longer than its limit is interrupted,
  and one that would start after the time is up is left out; both say so.
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


@dataclass(frozen=True, slots=True)
class Section:
    work: Callable[["Run"], Any]
    limit_s: int
    """Longest time for it."""


LATE = {"left_out": "the time was up"}


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
        json_path: Path,
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
    def attention(self) -> str:
        """Attention backend of engines: FlashInfer only once its kernels have been built and tried."""
        return "auto" if not self.on_card or "tokens" in self.found.get("flashinfer", {}) else "triton"

    @property
    def on_card(self) -> bool:
        """True on a card, False in a trial on the CPU."""
        return self.device.type == "cuda"

    def section(self, name: str, section: Section) -> None:
        """Run a section and keep what it returns, or why it failed."""
        limit_s = min(section.limit_s, int(self.left_s()))
        if limit_s < 1:
            self.record(name, LATE)
            return
        self.console.print(f"[dim]{name} …[/dim]")
        began, cut = time.time(), limit_s < section.limit_s
        running = {"section": name, "began": began, "until": began + limit_s, "cut": cut}
        self.record("running", running)
        failed = False
        try:
            with _limited(limit_s):
                found = section.work(self)
        except Exception as error:  # noqa: BLE001  whatever it is, the file says it and the run goes on
            failed, lines = True, traceback.format_exception(error)
            found = {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": "".join(lines)[-4000:]}
            self.console.print(f"[red]{name}: {found['error']}[/red]", markup=True)
            if is_late(running):
                found = LATE
        self.found["seconds"][name] = time.time() - began
        del self.found["running"]
        self.record(name, found)
        if failed and self.on_card:
            self._require_device(name)
        self.free()

    def take_over(self, found: dict[str, Any]) -> None:
        """Take over what a process before this one had found."""
        self.found |= found
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
        write(self._json_path, self.found)

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
            "attention_backend": self.attention,
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


def is_late(running: dict[str, Any]) -> bool:
    """Return True if a section had less than its time, and has used that up."""
    return bool(running["cut"] and time.time() >= running["until"])


def read(path: Path) -> dict[str, Any]:
    """Return what a file of findings has; nothing if there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace a file of findings, which is always complete."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


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
