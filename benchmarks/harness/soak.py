"""Pause, update and continue for long, and what one emptying of the device cache costs.

Invariants:
- Requests are in flight all the time (``load.py``): every pause meets some, and tokens were sampled since the
  pause before.
- Memory is read while the engine is paused and nothing of it moves: before the update, which is what it holds
  while it serves, and after it, before the cache is emptied or not; then once more as the continue reports
  it.
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
from .process_memory import read_memory
from .transports import Trainer, Transport
from .workload import Workload

ENGINE = Path(__file__).with_name("soak_engine.py")
STEPS_BETWEEN = 2
"""Steps that run at least between a continue and the next pause."""
WARM_UP_BATCHES = 4
STEPS_AFTER = 10
"""Steps that are timed after each continue."""
SETTLED_AFTER = 5
"""Steps beyond this one are what the first ones are compared with."""
SMALL_WEIGHT = "model.norm.weight"
"""All that an update of :func:`measure_cost` writes: what it costs is the derivation."""
SETTLED = 10
"""Cycle from which growth is counted."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One engine under test, and what is done to it."""

    mode: PauseMode = "in_place"
    transport: Transport = "ipc"
    empty: bool = True
    """Continues run the empty-cache step."""
    fragment: bool = False
    """Commits derive in a way that fragments the allocator (``soak_engine.py``)."""
    threads: int = 1
    device: str = "cpu"
    dtype: str = "bfloat16"
    bucket_bytes: int = 64 << 20


@dataclass
class Series:
    """Bytes in each cycle, and the seconds that all of them took."""

    reserved: list[int] = field(default_factory=list)
    """Reserved at the pause."""
    highest: list[int] = field(default_factory=list)
    """Reserved after the update, before the cache is emptied or not."""
    continued: list[int] = field(default_factory=list)
    """Reserved after the continue."""
    allocated: list[int] = field(default_factory=list)
    """Bytes in use at the pause."""
    anonymous: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    """Resident memory of the engine's process, after the continue."""
    fewest_met: int = sys.maxsize
    """Least number of requests that a pause met, running or waiting."""
    seconds: float = 0.0


@dataclass
class Cost:
    """Costs of the empty-cache step: its own time, and the time of the steps after it."""

    emptying: list[float] = field(default_factory=list)
    """Seconds of each call."""
    freed: list[int] = field(default_factory=list)
    """Bytes that each call gave back."""
    steps: dict[bool, list[list[float]]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of the :data:`STEPS_AFTER` first steps after each continue is sent; by whether it emptied."""

    def steady(self) -> float:
        """Return the median seconds of a step that is no longer one of the first."""
        late = [step for found in self.steps.values() for steps in found for step in steps[SETTLED_AFTER:]]
        return statistics.median(late)


def launch_engine(folder: Path, workload: Workload, cell: Cell, emptyings: Path) -> LaunchedScheduler:
    """Start ``soak_engine.py``; seconds of its emptyings go into the file ``emptyings``."""
    directory = private_directory.make()
    engine = {
        "model": folder,
        "endpoint": f"ipc://{directory}/scheduler.sock",
        "device": cell.device,
        "dtype": cell.dtype,
        "num-threads": cell.threads,
        "context-len": workload.context_len,
        "kv-pool-tokens": workload.kv_tokens,
        "max-running-requests": workload.requests,
        "idle-empty-s": 86_400.0,  # the cycles alone empty the cache, however long they take
        "log-level": "WARNING",
    }
    command = [sys.executable, str(ENGINE), "--emptyings", str(emptyings)]
    command += ["--fragment"] if cell.fragment else []
    command += itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in engine.items())
    return LaunchedScheduler(command, directory=directory)


def read_emptyings(path: Path) -> list[float]:
    """Return the seconds of each emptying so far, in order."""
    return [float(line) for line in path.read_text(encoding="utf-8").split()]


def warm_up(client: SchedulerClient, workload: Workload) -> None:
    """Run the largest batch, as after a retraction of all, then some with prompts like the load's."""
    longest = replace(workload, prompt_tokens=workload.context_len - 1)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=1)
    client.generate(input_ids=longest.prompts(seed=0), sampling_params=once)
    params = SamplingParams(max_new_tokens=workload.load_new_tokens // 4, ignore_eos=True, seed=1)
    prompts = [prompt for number in range(WARM_UP_BATCHES) for prompt in workload.prompts(seed=1 + number)]
    client.generate(input_ids=prompts, sampling_params=params)


def soak(
    workload: Workload, folders: Sequence[Path], turns: Iterable[int], cell: Cell, scratch: Path
) -> Series:
    """Run a cycle for each of ``turns`` on an engine of its own; updates alternate between ``folders``."""
    series = Series()
    engine = launch_engine(folders[0], workload, cell, scratch / "emptyings")
    with engine as client, Trainer(client, folders, [cell.transport], cell.bucket_bytes) as trainer:
        warm_up(client, workload)
        pid = client.status().pid
        with Load(client.endpoint, workload, seed=0) as load:
            began = time.perf_counter()
            for turn in turns:
                paused = _pause_among_requests(client, load, workload, cell.mode)
                before = client.status().device_memory
                reply = trainer.push(cell.transport, 1 - turn % 2, flush_cache=cell.mode != "in_place")
                assert reply.committed and reply.changed_tensors, "the update changed nothing"
                after = client.status().device_memory
                continued = client.continue_generation(torch_empty_cache=cell.empty).reserved_after
                memory = read_memory(pid)
                load.following(paused.step, STEPS_BETWEEN)
                series.reserved.append(before.reserved)
                series.allocated.append(before.allocated)
                series.highest.append(after.reserved)
                series.continued.append(after.reserved if continued is None else continued)
                series.anonymous.append(memory.anonymous)
                series.shared.append(memory.shared)
                series.fewest_met = min(series.fewest_met, _met(paused))
            series.seconds = time.perf_counter() - began
    return series


def _pause_among_requests(
    client: SchedulerClient, load: Load, workload: Workload, mode: PauseMode
) -> PauseGenerationReqOutput:
    """Pause while requests run; a pause that finds none, on a busy machine, is taken back."""
    while True:
        present = 0
        while present < workload.requests // 2:  # the load's process may have lagged behind
            load.steady(1)
            status = client.status()
            present = status.running_requests + status.prefilling_requests + status.waiting_requests
        paused = client.pause(mode)
        if _met(paused):
            return paused
        client.continue_generation()


def _met(paused: PauseGenerationReqOutput) -> int:
    return paused.held_requests + paused.waiting_requests + paused.aborted_requests


def measure_cost(workload: Workload, folder: Path, turns: Iterable[int], cell: Cell, scratch: Path) -> Cost:
    """Run two cycles in place for each of ``turns`` on one engine, with and without the step."""
    cost, path = Cost(), scratch / "emptyings"
    with (
        launch_engine(folder, workload, cell, path) as client,
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
    """Return the seconds of the first steps after a continue, and the bytes it gave back."""
    load.steady(1)
    paused = client.pause("in_place")
    with client.weight_update():
        client.update_weights_from_tensor([(SMALL_WEIGHT, weight)], flush_cache=False)
    began = time.perf_counter()
    reply = client.continue_generation(torch_empty_cache=empty)
    arrivals = load.following(paused.step, STEPS_AFTER)
    times = [began, *(at for _, at in arrivals)]
    return [later - earlier for earlier, later in itertools.pairwise(times)], reply.freed


def growth(values: Sequence[int]) -> dict[str, float]:
    """Return bytes gained since the tenth value, in the second half, and per thousand (least squares)."""
    settled = values[SETTLED - 1 :]
    slope = statistics.linear_regression(range(len(settled)), settled).slope
    return {
        "total": settled[-1] - settled[0],
        "second_half": values[-1] - values[len(values) // 2 - 1],
        "per_thousand": 1000 * slope,
    }
