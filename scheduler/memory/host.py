"""The CPU's allocator behind the interface of a torch device module (``torch.cuda`` and the like).

``empty_cache`` exists only where it does something: with glibc's own malloc. A figure that the platform does
not give is 0. "Reserved" is resident anonymous memory (RssAnon); "allocated" is ``uordblks + hblkhd`` of
mallinfo2(3). Fields are those of proc_pid_status(5), proc_meminfo(5), and the kernel's cgroup-v2.rst and
cgroup-v1/memory.rst.
"""

import ctypes
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOREIGN_MALLOC = ("mallctl", "tc_malloc", "mi_malloc")
"""Symbols of jemalloc, tcmalloc and mimalloc, which replace malloc."""
_LOOKED_AT = 1 << 20
"""Most pages whose residency is looked at."""
_STRETCH = 1 << 20
"""Bytes looked at in one go where not all pages are."""
_KB_FIELD = re.compile(r"^([^:\n]+):\s+(\d+) kB$", re.MULTILINE)
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)
_NO_LIMIT = 1 << 62
"""Least bytes that a cgroup of version 1 states where it has no limit."""
_M_ARENA_MAX = -8


class HostDevice:
    """Readings of this process and machine in bytes, from procfs and the cgroups' files."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def share_arena(self) -> None:
        """Do nothing: this malloc is not known."""

    def memory_reserved(self) -> int:
        found = _ANONYMOUS.search(_read_text(self._proc / "self" / "status"))
        return int(found[1]) << 10 if found else 0

    def memory_allocated(self) -> int:
        return 0

    def mem_get_info(self) -> tuple[int, int]:
        """Return (free, total) of the machine, or of the tightest cgroup if that is less."""
        meminfo = _read_kb_fields(self._proc / "meminfo")
        free, total = meminfo.get("MemAvailable", 0), meminfo.get("MemTotal", 0)
        if not total and "SC_PHYS_PAGES" in os.sysconf_names:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for limit, used in self._cgroup_limits():
            free, total = min(free, max(0, limit - used)), min(total, limit)
        return free, total

    def _cgroup_limits(self) -> list[tuple[int, int]]:
        """Return (limit, usage) of every cgroup above this process that sets a limit."""
        limits = []
        for line in _read_text(self._proc / "self" / "cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                root, names = self._cgroup, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                root = self._cgroup / "memory"
            else:
                continue
            # An ancestor may be tighter. Inside a container the path may be the host's: only the root exists
            # then.
            folder = root / path.lstrip("/")
            for level in (folder, *folder.parents):
                pair = _cgroup_limit(level, *names)
                if pair is not None:
                    limits.append(pair)
                if level == root:
                    break
        return limits


class GlibcHostDevice(HostDevice):
    def __init__(self, libc: ctypes.CDLL) -> None:
        super().__init__()
        self._mallopt = libc.mallopt
        self._mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
        self._mallopt.restype = ctypes.c_int
        self._trim = libc.malloc_trim
        self._trim.argtypes = [ctypes.c_size_t]
        self._trim.restype = ctypes.c_int
        self._mallinfo2 = getattr(libc, "mallinfo2", None)
        if self._mallinfo2 is not None:
            self._mallinfo2.argtypes = []
            self._mallinfo2.restype = _Mallinfo2

    def share_arena(self) -> None:
        """Have threads that start from now on allocate where all others do.

        What one thread frees, such as values that an update has replaced, serves the others then. With an
        arena for each of them, free pages add up in all.
        """
        self._mallopt(_M_ARENA_MAX, 1)

    def empty_cache(self) -> None:
        """Return every unused page of all arenas to the system (malloc_trim(3))."""
        self._trim(0)

    def memory_allocated(self) -> int:
        """Return the bytes in use in all arenas, and in blocks of their own; 0 before glibc 2.33."""
        if self._mallinfo2 is None:
            return 0
        info = self._mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # no dynamic loader, or a platform that cannot open its own program
        return None


def _detect() -> HostDevice:
    libc = _libc()
    if libc is None:
        return HostDevice()
    foreign = any(hasattr(libc, symbol) for symbol in _FOREIGN_MALLOC)
    return GlibcHostDevice(libc) if hasattr(libc, "malloc_trim") and not foreign else HostDevice()


def resident_bytes(spans: Sequence[tuple[int, int]]) -> int:
    """Return the resident bytes of ``spans``, (address, bytes), by mincore(2); sampled beyond 1M pages."""
    total = sum(nbytes for _, nbytes in spans)
    if _mincore is None:
        return total
    page = os.sysconf("SC_PAGE_SIZE")
    stride = max(1, -(-total // (_LOOKED_AT * page)))
    found = seen = 0
    vector = bytearray(-(-max((nbytes for _, nbytes in spans), default=0) // page) or 1)
    pages = ctypes.byref(ctypes.c_ubyte.from_buffer(vector))
    for address, nbytes in spans:
        step = nbytes if stride == 1 else _STRETCH * stride
        for start in range(0, nbytes, step):
            length = min(step // stride, nbytes - start)
            count = -(-length // page)
            if _mincore(ctypes.c_void_p(address + start), ctypes.c_size_t(length), pages) != 0:
                return total
            found += vector.count(1, 0, count)
            seen += count
    return min(total, total * found // seen) if seen else 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_kb_fields(path: Path) -> dict[str, int]:
    return {name: int(number) << 10 for name, number in _KB_FIELD.findall(_read_text(path))}


def _cgroup_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> tuple[int, int] | None:
    """Return (limit, usage without inactive page cache) of one cgroup, or None without a limit."""
    limit_text = _read_text(folder / limit).strip()
    if not limit_text.isdigit() or int(limit_text) >= _NO_LIMIT:  # "max": no limit
        return None
    usage_text = _read_text(folder / usage).strip()
    if not usage_text.isdigit():
        return None
    cached = re.search(rf"^{reclaimable} (\d+)$", _read_text(folder / "memory.stat"), re.MULTILINE)
    return int(limit_text), max(0, int(usage_text) - int(cached[1] if cached else 0))


_mincore: Any = getattr(_libc(), "mincore", None) if sys.platform == "linux" else None

HOST = _detect()
