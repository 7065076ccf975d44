"""Processes of the replicas: one supervisor each, which restarts its engine at the same endpoint.

Invariants:
- Either all replicas have become ready, or all have ended and the first reason is raised.
- Later each replica ends or is restarted by itself. Listeners are called in the supervisors' threads.
- Options of the command line stay as they are; only devices, threads and memory that it leaves open are
  divided. Replicas share no CUDA device, unless ``--device`` names one.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from ..connection.client_options import ConnectionOptions
from ..exceptions import EngineError, InvalidRequest
from ..launch.launcher import option_value
from ..launch.restart_policy import RestartPolicy
from ..launch.supervisor import Ended, Listener, State, Supervisor

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED_FRACTION = 0.5
"""Share of the free memory that all replicas which share it plan for their KV pools together."""
PER_CORE = 4
"""Maximum number of ranks for each core, if they have no devices: more only wait for each other."""
_OWN = ("--endpoint", "--state-file", "--tp-joined", "--tp-address", "--nnodes")


class ReplicaProcesses:
    def __init__(
        self,
        arguments: Sequence[str],
        replicas: int,
        policy: RestartPolicy,
        **keys: Unpack[ConnectionOptions],
    ) -> None:
        """``arguments`` are those of each ``caesura scheduler``, ``--model`` included."""
        self.keys = keys
        self.ranks = ranks_of(arguments)
        """Number of ranks of each replica (``--tp``)."""
        self.replicas = [
            Supervisor(
                [*place.arguments, "--log-name", f"replica-{index}"],
                policy=policy,
                replica=f"replica-{index}",
                environment=place.environment,
                **keys,
            )
            for index, place in enumerate(placed(arguments, replicas))
        ]

    def start(self) -> None:
        """Start all of them, and return when all are ready; raise the first reason after the end of all."""
        try:
            for replica in self.replicas:
                replica.begin()
            wait([replica.started for replica in self.replicas], return_when=FIRST_EXCEPTION)
            for replica in self.replicas:
                if replica.started.done():
                    try:
                        replica.started.result()
                    except EngineError as error:
                        error.add_note(f"{replica.name} of {len(self.replicas)}")
                        raise
        except BaseException:
            self.close()
            raise

    def follow(self, listener: Callable[[str, State], None]) -> None:
        """Call ``listener`` with name and present state of every replica, and with every later one."""
        for replica in self.replicas:
            replica.subscribe(partial(listener, replica.name))

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` when the last replica has ended for good, at once if it has already."""
        lock, ended = threading.Lock(), list[EngineError | None]()

        def hear(_: str, state: State) -> None:
            if isinstance(state, Ended):
                with lock:
                    ended.append(state.error)
                    if len(ended) == len(self.replicas):
                        listener(Ended(next(filter(None, ended), None)))

        self.follow(hear)

    def hurry(self) -> None:
        """End the requests that engines still finish while :meth:`close` waits in another thread."""
        for replica in self.replicas:
            replica.hurry()

    def close(self) -> None:
        for replica in self.replicas:
            replica.stop()
        with ExitStack() as stack:  # all of them, whatever one says
            for replica in self.replicas:
                stack.callback(replica.close)


@dataclass(frozen=True, slots=True)
class Place:
    arguments: list[str]
    environment: dict[str, str]


def placed(
    arguments: Sequence[str], replicas: int, environment: Mapping[str, str] = os.environ
) -> list[Place]:
    """Return the places of schedulers; InvalidRequest if cores or devices are too few."""
    for option in _OWN:
        if option_value(arguments, option) is not None:
            raise InvalidRequest(
                f"{option} is for one engine: with --replicas every engine has its own", field=option
            )
    ranks = ranks_of(arguments)
    devices = _assigned(option_value(arguments, "--device"), replicas, ranks, environment)
    if not devices and replicas * ranks > PER_CORE * _cores():
        raise InvalidRequest(
            f"{replicas} replicas of {ranks} ranks are {replicas * ranks} processes, and there are "
            f"{_cores()} cores: at most {PER_CORE} for each core",
            field="--replicas",
            value=replicas,
        )
    more = []
    if option_value(arguments, "--num-threads") is None:
        more += ["--num-threads", str(max(1, _threads(environment) // (replicas * ranks)))]
    sizes = ("--kv-pool-tokens", "--kv-memory-fraction")
    if not devices and all(option_value(arguments, size) is None for size in sizes):
        more += ["--kv-memory-fraction", f"{SHARED_FRACTION / replicas:.4g}"]
    return [
        Place(
            [*arguments, *more],
            {VISIBLE: ",".join(devices[index * ranks : (index + 1) * ranks])} if devices else {},
        )
        for index in range(replicas)
    ]


def ranks_of(arguments: Sequence[str]) -> int:
    """Return ``--tp`` of a scheduler with these arguments; 1 if it is no number, which is refused later."""
    with suppress(ValueError):
        return max(1, int(option_value(arguments, "--tp") or 1))
    return 1


def _assigned(device: str | None, replicas: int, ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Return the devices to divide; none if there are none, or ``device`` names one for all."""
    if device not in (None, "auto", "cuda"):
        return []
    devices, needed = cuda_devices(environment), replicas * ranks
    if devices and len(devices) < needed:
        each = "one each" if ranks == 1 else f"{ranks} each (--tp {ranks})"
        raise InvalidRequest(
            f"{replicas} replicas need {needed} CUDA devices, {each}, and there are {len(devices)}: give "
            "fewer --replicas, or --device cuda:0 to have all of them share one (with --kv-pool-tokens), or "
            "--device cpu",
            field="--replicas",
            value=replicas,
        )
    return devices


def cuda_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the CUDA devices that a process with this environment sees, by index or UUID; needs no torch."""
    given = environment.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        end = next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end]
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is no driver
        return []
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [str(index) for index in range(count.value)]


def _threads(environment: Mapping[str, str]) -> int:
    with suppress(KeyError, ValueError):
        return int(environment["OMP_NUM_THREADS"])
    return _cores()


def _cores() -> int:
    """Return the number of cores that this process may run on; hardware threads of one core count once."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(path.read_text())
        except OSError:  # a container that hides it
            siblings.add(str(cpu))
    return len(siblings)
