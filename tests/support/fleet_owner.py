"""The process of a fleet of two that gets SIGKILL at a given point of an update.

``fleet_owner.py POINT LEASE_S FOLDER ENDPOINT ENDPOINT``, with ``door`` before them for a server's fleet, or
``fleet_owner.py POINT LEASE_S FOLDER ray ADDRESS NAME MODEL``.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support.intercepted import intercept

from caesura.client.group import EngineAddress, Fleet
from caesura.client.group.replicas import ReplicaFleet
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    Request,
    UpdateWeightFromDiskReqInput,
)

POINTS: dict[str, type[Request]] = {
    "paused": BeginWeightUpdateReqInput,
    "begun": UpdateWeightFromDiskReqInput,
    "one loaded": UpdateWeightFromDiskReqInput,
    "all loaded": EndWeightUpdateReqInput,
    "one committed": EndWeightUpdateReqInput,
    "all committed": ContinueGenerationReqInput,
}
"""The message to a member before which, or for ``one …`` between two of which, the process ends."""


ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 2048, "log_level": "ERROR"}


def killed_owner(point: str, folder: Path, engines: Sequence[str], *, lease_s: float = 600.0) -> None:
    command = [sys.executable, __file__, point, str(lease_s), str(folder), *engines]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def owned(lease_s: float, *engines: str) -> Fleet:
    if engines[0] == "door":
        return ReplicaFleet(
            [EngineAddress(each) for each in engines[1:]], owner="http", lease_s=lease_s, look_interval_s=0
        )
    if engines[0] != "ray":
        return Fleet(engines, lease_s=lease_s, look_interval_s=0)
    import ray

    from caesura.client.group.ray_fleet import RolloutFleet

    _, address, name, model = engines
    ray.init(address, log_to_driver=False, configure_logging=False)
    options = {"placement": {"num_cpus": 1}, "engine_options": ENGINE, "look_interval_s": 0}
    return RolloutFleet(model, 2, name=name, lease_s=lease_s, **options)


async def main(point: str, lease_s: str, folder: str, *engines: str) -> None:
    async with owned(float(lease_s), *engines) as fleet:
        first, second = fleet.members
        done = asyncio.Event()

        async def send_first(send: Callable[[], Awaitable[Any]]) -> Any:
            if not point.startswith("one"):
                die()
            answer = await send()
            done.set()
            return answer

        async def die_after_first(_: Callable[[], Awaitable[Any]]) -> NoReturn:
            await done.wait()
            die()

        intercept(first.client, POINTS[point], send_first)
        intercept(second.client, POINTS[point], die_after_first)
        if isinstance(fleet, ReplicaFleet):
            await fleet.client.update_weights_from_disk(folder, weight_version="second", flush_cache=False)
        await fleet.update(model_path=folder, weight_version="second")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
