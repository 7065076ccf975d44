"""The process of a fleet of two that gets SIGKILL at a given point of an update.

``fleet_owner.py POINT LEASE_S FOLDER ENDPOINT ENDPOINT``
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from caesura.client.fleet import Fleet

POINTS = {
    "paused": "begin_weight_update",
    "begun": "update_weights_from_disk",
    "one loaded": "update_weights_from_disk",
    "all loaded": "end_weight_update",
    "one committed": "end_weight_update",
    "all committed": "continue_generation",
}
"""The call to a member before which, or for ``one …`` between two of which, the process ends."""


def killed_owner(point: str, folder: Path, endpoints: Sequence[str], *, lease_s: float = 600.0) -> None:
    """Have such a process run to its end."""
    command = [sys.executable, __file__, point, str(lease_s), str(folder), *endpoints]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def main(point: str, lease_s: str, folder: str, *endpoints: str) -> None:
    async with Fleet(endpoints, lease_s=float(lease_s), look_interval_s=0) as fleet:
        first, second = fleet.members
        name = POINTS[point]
        done = asyncio.Event()
        call = getattr(first.client, name)

        async def of_first(*args: Any, **options: Any) -> Any:
            if not point.startswith("one"):
                die()
            answer = await call(*args, **options)
            done.set()
            return answer

        async def of_second(*args: Any, **options: Any) -> Any:
            await done.wait()
            die()

        setattr(first.client, name, of_first)
        setattr(second.client, name, of_second)
        await fleet.update(model_path=folder, weight_version="second")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
