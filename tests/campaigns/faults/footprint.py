"""Resources of a process: descriptors, threads, children, shared memory, resident bytes."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from harness.process_memory import MB, read_memory

RESIDENT_SLACK = 96 * MB
"""Allocators keep some of what was used once; more than this is a leak."""
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Footprint:
    descriptors: int
    threads: int
    children: int
    shared: int
    """Mappings and descriptors of memfds and of files in /dev/shm."""
    resident: int
    kinds: str = ""
    """Kinds of the descriptors and threads, for the report."""

    def over(self, baseline: "Footprint") -> list[str]:
        """Return a line for each count that exceeds ``baseline``'s."""
        found = []
        for name in (field.name for field in fields(self) if field.type in (int, "int")):
            slack = RESIDENT_SLACK if name == "resident" else 0
            mine, theirs = getattr(self, name), getattr(baseline, name)
            if mine > theirs + slack:
                found.append(f"{name} {theirs} -> {mine}")
        if found and self.kinds != baseline.kinds:
            found.append(f"was {baseline.kinds}; is {self.kinds}")
        return found


def footprint(pid: int) -> Footprint:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue  # closed meanwhile
    kinds = Counter(link.split(":")[0].split("/")[-1] if ":" in link else "file" for link in links)
    waits = Counter(f"thread in {_waits_in(pid, task)}" for task in os.listdir(f"/proc/{pid}/task"))
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    shared = sum("/memfd:" in line or SHARED_MEMORY in line for line in maps)
    shared += sum("memfd:" in link or link.startswith(SHARED_MEMORY) for link in links)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return Footprint(
        descriptors=len(links),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        children=len(children),
        shared=shared,
        resident=read_memory(pid).resident,
        kinds=", ".join(f"{count} {kind}" for kind, count in sorted((kinds + waits).items())),
    )


def _waits_in(pid: int, task: str) -> str:
    try:
        return Path(f"/proc/{pid}/task/{task}/wchan").read_text(encoding="utf-8") or "?"
    except OSError:
        return "?"


def wait_until_within(
    baseline: Footprint, pid: int, seconds: float, meanwhile: Callable[[], object]
) -> list[str]:
    """Return what ``pid`` still holds over ``baseline`` after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while (over := footprint(pid).over(baseline)) and time.monotonic() < deadline:
        meanwhile()
    return over


def shared_files_of(pids: set[int]) -> list[str]:
    return [
        f"{SHARED_MEMORY}/{name}"
        for name in os.listdir(SHARED_MEMORY)
        if any(
            part.isdigit() and int(part) in pids
            for part in name.replace("-", "_").replace(".", "_").split("_")
        )
    ]
