"""Facts about the machine that figures were measured on."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Return CPU model, usable cores, memory, kernel, Python and torch."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "isa": _isa(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def busy_share(window_s: float = 0.5) -> float:
    """Return the share of all cores in use, 0 to 1; call it while nothing of one's own runs."""
    busy, total = _cpu_times()
    time.sleep(window_s)
    busy_after, total_after = _cpu_times()
    return (busy_after - busy) / max(1, total_after - total)


def _cpu_times() -> tuple[int, int]:
    """Return clock ticks since boot over all cores: busy ones, and all. Zeros where there is no /proc."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0, 0
    ticks = [int(value) for value in path.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # 3 and 4: idle and waiting for I/O


def describe(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']} ({facts['isa']}), {facts['cores']} cores, {facts['memory_gb']} GB, "
        f"torch {facts['torch']}, Python {facts['python']}"
    )


def _cpu_model() -> str:
    return _cpuinfo().get("model name", platform.machine())


def _isa() -> str:
    """Return the widest of the instruction sets that decide the speed of bf16 arithmetic."""
    flags = set(_cpuinfo().get("flags", "").split())
    for flag, name in (("amx_bf16", "AMX bf16"), ("avx512_bf16", "AVX-512 bf16"), ("avx512f", "AVX-512")):
        if flag in flags:
            return name
    return "AVX2" if "avx2" in flags else platform.machine()


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's fields; empty where there is no /proc."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
