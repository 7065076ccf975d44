"""A scheduler process like any other, but that its wall clock jumps on request and that it looks for lost
clients more often.

Invariants: nothing else differs from ``python -m caesura.scheduler``. ``time.time`` is replaced before
anything imports it: it adds the double that stands in a file. The monotonic clock is never touched. (No
signal: an engine takes every one that it handles for a request to end.)

    python tests/campaigns/faults/fault_engine.py CLOCK_FILE <options of caesura scheduler>
"""

import mmap
import struct
import sys
import time
from pathlib import Path

DAY_S = 86_400.0
KEEPALIVE_S = 0.25
"""Instead of two seconds, so that a fault takes less time; the mechanism is the same."""
_OFFSET = struct.Struct("d")


def set_clock(file: Path, offset_s: float) -> None:
    """Set how far the wall clock of the engine that was started with ``file`` is ahead from now on."""
    mode = "r+b" if file.exists() else "wb"
    with file.open(mode) as target:
        target.write(_OFFSET.pack(offset_s))


def follow_clock(file: Path) -> None:
    """Make the wall clock of this process follow :func:`set_clock`."""
    original = time.time
    with file.open("rb") as source:
        shared = mmap.mmap(source.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    time.time = lambda: original() + _OFFSET.unpack_from(shared)[0]


def main() -> None:
    follow_clock(Path(sys.argv[1]))
    from caesura.scheduler.__main__ import main as run_scheduler
    from caesura.scheduler.runtime import housekeeping

    housekeeping.KEEPALIVE_S = KEEPALIVE_S
    run_scheduler(sys.argv[2:])


if __name__ == "__main__":
    main()
