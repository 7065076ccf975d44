"""Compilers that run below a process: while one does, the process builds kernels and does not hang.

Libraries build kernels at their first use, FlashInfer for minutes with ninja and nvcc, Triton for seconds
with ptxas and a C compiler. Deadlines for a process do not count that time. Where the system does not list
the children of a process (Linux does), nothing is found, and all time counts.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

COMPILERS = frozenset(
    ("ninja", "nvcc", "cicc", "ptxas", "fatbinary", "cudafe++", "nvlink", "hipcc", "lld", "ld")
    + ("gcc", "g++", "cc", "c++", "cc1", "cc1plus", "clang", "clang++", "as")
)
LOOK_S = 1.0
"""Seconds between two looks for a compiler."""

_Result = TypeVar("_Result")


def compiler_below(pid: int) -> str | None:
    """Return the name of a compiler among the processes below ``pid``, or None."""
    for child in _children(pid):
        try:
            name = Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip()
        except OSError:  # it has ended
            continue
        found = name if name in COMPILERS else compiler_below(child)
        if found is not None:
            return found
    return None


def result_of(future: Future[_Result], timeout_s: float, pid: int) -> _Result:
    """Return the result; TimeoutError after ``timeout_s`` seconds without a compiler below ``pid``."""
    while True:
        look_s = min(timeout_s, LOOK_S, threading.TIMEOUT_MAX)
        try:
            return future.result(look_s)
        except TimeoutError:
            if compiler_below(pid) is None:
                timeout_s -= look_s
            if timeout_s <= 0:
                raise


def _children(pid: int) -> Iterator[int]:
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text(encoding="utf-8").split())
    except OSError:  # the process or a thread has ended, or nothing is listed
        return
