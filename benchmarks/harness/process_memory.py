"""Memory of another process, as Linux counts it."""

from dataclasses import dataclass
from pathlib import Path

MB = 1 << 20


@dataclass(frozen=True)
class ProcessMemory:
    """Resident bytes of one process."""

    resident: int
    """Anonymous memory, shared memory and mapped files."""
    anonymous: int
    """Heap, weights, KV."""
    shared: int
    """Shared memory that it has touched."""
    peak: int
    """Largest ``resident`` since the last reset, kept by the kernel."""


def read_memory(pid: int) -> ProcessMemory:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    )
    resident, anonymous, shared, peak = (
        int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon", "RssShmem", "VmHWM")
    )
    return ProcessMemory(resident, anonymous, shared, peak)


def reset_peak(pid: int) -> None:
    """Let ``peak`` start again from what is resident now; needs the same user (proc(5), clear_refs, 5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
