"""Pause, update and continue for long, and what one emptying of the device cache costs: measured, not yet summarised.

Invariants:
- Requests are in flight all the time (``load.py``): every pause meets some, and tokens were sampled since the pause before.
- Memory is read while the engine is paused and nothing of it moves: once before the update, which is what it holds while it
  serves, and once after it, before the cache is emptied or not.
- Workspaces that follow the largest batch are filled before the first cycle.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open

from caesura.client import SamplingParams, SchedulerClient
from caesura.client.launch.launcher import LaunchedScheduler
from caesura.io_struct import PauseGenerationReqOutput, PauseMode
from caesura.process import private_directory

from .load import Load
from .transports import Trainer
from .workload import Workload

ENGINE = Path(__file__).with_name("soak_engine.py")
STEPS_BETWEEN = 2
"""Steps that run at least between a continue and the next pause."""
WARM_UP_BATCHES = 4
BUCKET_BYTES = 64 << 20
STEPS_AFTER = 10
"""That are timed after each continue."""
SETTLED_AFTER = 5
"""The steps beyond this one are what the first ones are compared with."""
SMALL_WEIGHT = "model.norm.weight"
"""All that an update of :func:`measure_cost` writes: what it costs is the derivation."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Of the engine under test."""

    threads: int = 1
    device: str = "cpu"
    dtype: str = "bfloat16"


@dataclass
class Series:
    """Bytes in each cycle, and the seconds that all of them took."""

    reserved: list[int] = field(default_factory=list)
    """At the pause."""
    highest: list[int] = field(default_factory=list)
    """Reserved after the update, before the cache is emptied or not."""
    allocated: list[int] = field(default_factory=list)
    """At the pause: what is really in use."""
    fewest_met: int = sys.maxsize
    """Requests that a pause met, running or waiting."""
    seconds: float = 0.0


@dataclass
class Cost:
    """What the empty-cache step takes and what it does to the steps after it."""

    emptying: list[float] = field(default_factory=list)
    """Seconds of the call."""
    freed: list[int] = field(default_factory=list)
    """Bytes that each gave back."""
    steps: dict[bool, list[list[float]]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of the :data:`STEPS_AFTER` first steps after each continue is sent; by whether it emptied."""

    def steady(self) -> float:
        """Median seconds of a step that is no longer one of the first."""
        late = [step for found in self.steps.values() for steps in found for step in steps[SETTLED_AFTER:]]
        return statistics.median(late)


def launch_engine(
    folder: Path, workload: Workload, options: EngineOptions, *, fragment: bool, emptyings: Path
) -> LaunchedScheduler:
    """An engine of ``soak_engine.py``; seconds of its emptyings go into the file ``emptyings``."""
    directory = private_directory.make()
    engine = {
        "model": folder,
        "endpoint": f"ipc://{directory}/scheduler.sock",
        "device": options.device,
        "dtype": options.dtype,
        "num-threads": options.threads,
        "context-len": workload.context_len,
        "kv-pool-tokens": workload.kv_tokens,
        "max-running-requests": workload.requests,
        "log-level": "WARNING",
    }
    command = [sys.executable, str(ENGINE), "--emptyings", str(emptyings)]
    command += ["--fragment"] if fragment else []
    for name, value in engine.items():
        command += [f"--{name}", str(value)]
    return LaunchedScheduler(command, directory=directory)


def read_emptyings(path: Path) -> list[float]:
    """Seconds of each emptying so far, in order."""
    return [float(line) for line in path.read_text(encoding="utf-8").split()]


def warm_up(client: SchedulerClient, workload: Workload) -> None:
    """The largest batch, which is everybody computed again after a retraction; then batches with prompts like the load's, to
    their end."""
    longest = replace(workload, prompt_tokens=workload.context_len - 1)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=1)
    client.generate(input_ids=longest.prompts(seed=0), sampling_params=once)
    params = SamplingParams(max_new_tokens=workload.load_new_tokens // 4, ignore_eos=True, seed=1)
    prompts = [prompt for number in range(WARM_UP_BATCHES) for prompt in workload.prompts(seed=1 + number)]
    client.generate(input_ids=prompts, sampling_params=params)


def soak(
    mode: PauseMode,
    workload: Workload,
    folders: Sequence[Path],
    turns: Iterable[int],
    options: EngineOptions,
    *,
    empty: bool,
    fragment: bool,
    scratch: Path,
) -> Series:
    """A cycle for each of ``turns``, on an engine of its own; every update is to the other one of ``folders``."""
    series = Series()
    engine = launch_engine(folders[0], workload, options, fragment=fragment, emptyings=scratch / "emptyings")
    with engine as client, Trainer(client, folders, ["ipc"], BUCKET_BYTES) as trainer:
        warm_up(client, workload)
        with Load(client.endpoint, workload, seed=0) as load:
            began = time.perf_counter()
            for turn in turns:
                _wait_for_load(client, load, workload.requests // 2)
                paused = client.pause(mode)
                while not _met(paused):  # on a busy machine all of them may end before it arrives
                    client.continue_generation()
                    _wait_for_load(client, load, workload.requests // 2)
                    paused = client.pause(mode)
                before = client.status().device_memory
                reply = trainer.push("ipc", 1 - turn % 2, flush_cache=mode != "in_place")
                assert reply.committed and reply.changed_tensors, "the update changed nothing"
                after = client.status().device_memory
                client.continue_generation(torch_empty_cache=empty)
                load.following(paused.step, STEPS_BETWEEN)
                series.reserved.append(before.reserved)
                series.allocated.append(before.allocated)
                series.highest.append(after.reserved)
                series.fewest_met = min(series.fewest_met, _met(paused))
            series.seconds = time.perf_counter() - began
    return series


def _met(paused: PauseGenerationReqOutput) -> int:
    """How many requests the pause met, running or waiting."""
    return paused.held_requests + paused.waiting_requests + paused.aborted_requests


def _wait_for_load(client: SchedulerClient, load: Load, requests: int) -> None:
    """Until steps have run and so many are with the engine: on a busy machine the load's process may have lagged behind."""
    present = 0
    while present < requests:
        load.steady(1)
        status = client.status()
        present = status.running_requests + status.prefilling_requests + status.waiting_requests


def measure_cost(
    workload: Workload,
    folder: Path,
    turns: Iterable[int],
    options: EngineOptions,
    *,
    fragment: bool,
    scratch: Path,
) -> Cost:
    """Two cycles in place for each of ``turns``, one that empties the cache and one that does not, on one engine."""
    cost, path = Cost(), scratch / "emptyings"
    with (
        launch_engine(folder, workload, options, fragment=fragment, emptyings=path) as client,
        Load(client.endpoint, workload, seed=0) as load,
    ):
        with safe_open(folder / "model.safetensors", "pt") as checkpoint:
            weight = checkpoint.get_tensor(SMALL_WEIGHT)
        weights = itertools.cycle((weight * 1.25, weight))
        for empty in (True, False):  # what the first cycles build is not what is measured
            _cost_cycle(client, load, next(weights), empty)
        done = len(read_emptyings(path))
        for _ in turns:
            for empty in (False, True):
                steps, freed = _cost_cycle(client, load, next(weights), empty)
                cost.steps[empty].append(steps)
                if freed is not None:
                    cost.freed.append(freed)
        cost.emptying = read_emptyings(path)[done:]
    assert len(cost.emptying) == len(cost.freed), "somebody else emptied the cache"
    return cost


def _cost_cycle(
    client: SchedulerClient, load: Load, weight: torch.Tensor, empty: bool
) -> tuple[list[float], int | None]:
    """Seconds of the first steps after a continue, and how many bytes it gave back.

    The first counts from the sending of the continue, and so has the emptying in it: by the time the answer is read here,
    the load may have that step's tokens already.
    """
    load.steady(1)
    paused = client.pause("in_place")
    with client.weight_update():
        client.update_weights_from_tensor([(SMALL_WEIGHT, weight)], flush_cache=False)
    began = time.perf_counter()
    reply = client.continue_generation(torch_empty_cache=empty)
    arrivals = load.following(paused.step, STEPS_AFTER)
    times = [began, *(at for _, at in arrivals)]
    return [later - earlier for earlier, later in itertools.pairwise(times)], reply.freed
