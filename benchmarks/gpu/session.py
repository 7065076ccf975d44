"""One session: sections in a process of their own, which may crash or hang, under a budget of time.

Invariants:
- This process never touches the device. Whatever ends the other one, the file has all earlier sections, the
  section that was running says how it ended, and a new process goes on behind it.
- A section is interrupted after its own limit, or when the session's time is up; a process that does not let
  itself be interrupted is killed :data:`GRACE_S` later.
- What a session had no time for says ``left_out``, and is what the next one begins with.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu.run import LATE, is_late, read, write

GRACE_S = 15.0
"""Seconds for a section to end, and its engines with it."""
_LOOK_S = 0.1


def is_due(found: dict[str, Any], name: str) -> bool:
    """Return True if no session has run a section yet."""
    return name not in found or "left_out" in found[name]


def taken_up(path: Path) -> dict[str, Any]:
    """Return what earlier sessions have found. A section that ended one, or the machine, is not due again."""
    found = read(path)
    if (running := found.pop("running", None)) is not None:
        found[running["section"]] = {"error": "the session ended in it"}
    return found


def run_session(command: Sequence[str], path: Path, grace_s: float = GRACE_S) -> dict[str, Any]:
    """Run ``command`` until it has ended well, again after each section that it did not survive.

    It runs sections with a :class:`~gpu.run.Run` that writes to ``path``, and takes up what is there.
    """
    while True:
        before = read(path)
        process = subprocess.Popen(command, process_group=0)
        try:
            how = _ending(process, path, grace_s)
        finally:
            with suppress(ProcessLookupError):  # what the sections have started, engines apart, which notice
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = read(path)
        running = found.pop("running", None)
        if running is not None:
            found["seconds"][running["section"]] = time.time() - running["began"]
            found[running["section"]] = LATE if is_late(running) else {"error": how}
        elif process.returncode != 0 and found.keys() == before.keys():
            found |= {"session": {"error": how}, "seconds": found.get("seconds", {})}
        write(path, found)
        if process.returncode == 0 or "session" in found:
            return found


def _ending(process: "subprocess.Popen[bytes]", path: Path, grace_s: float) -> str:
    """Return how the process ended; kill it if a section is not interrupted in time."""
    while process.poll() is None:
        running = read(path).get("running")
        if running is not None and time.time() > running["until"] + grace_s:
            os.killpg(process.pid, signal.SIGKILL)
            return f"killed {grace_s:g} s after its time was up"
        time.sleep(_LOOK_S)
    if process.returncode < 0:
        return f"its process was killed by {signal.Signals(-process.returncode).name}"
    return f"its process ended with status {process.returncode}"
