"""However a rank ends, the whole engine does, at once, and everybody who waits is told why.

Where rank 0 may be waiting is driven in one process by tests/loop/test_lost_ranks.py.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from support.lanes import quick
from support.waiting import eventually

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.exceptions import EngineDied, EngineError
from caesura.client.launch.launcher import LaunchedScheduler

pytestmark = pytest.mark.slow

OPTIONS = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 4096, "tp": 2, "log_level": "WARNING"}
LONG = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture
def launched(tiny_model) -> Iterator[LaunchedScheduler]:
    launched = launch_scheduler(str(tiny_model), **OPTIONS)
    yield launched
    with suppress(EngineError):
        launched.close()


def processes_of(launched: LaunchedScheduler) -> tuple[psutil.Process, psutil.Process]:
    (rank,) = launched.client.status().ranks
    return psutil.Process(launched.pid), psutil.Process(rank.pid)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("state", quick(["mid-step", "idle", "paused", "mid-update"]))
def test_a_worker_that_is_killed_ends_the_engine(launched, other_model, state):
    client, before = launched.client, shared_memory()
    zero, one = processes_of(launched)
    handles = []
    if state in ("mid-step", "paused"):
        handles = [client.submit(input_ids=[1, 2, 3 + n], sampling_params=LONG) for n in range(8)]
        eventually(lambda: client.status().running_requests == 8)
    if state == "paused":
        client.pause("in_place")
    if state == "mid-update":
        session = client.begin_weight_update().session_id
        client.update_weights_from_disk(other_model, flush_cache=False, session_id=session)
    one.kill()
    for handle in handles:
        with pytest.raises(EngineDied, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            handle.result()
    eventually(lambda: launched.returncode is not None)
    assert launched.returncode == 1
    assert not is_alive(zero)
    assert not is_alive(one)
    assert shared_memory() <= before


@pytest.mark.long
def test_workers_end_when_rank_0_is_killed(launched):
    client, before = launched.client, shared_memory()
    zero, one = processes_of(launched)
    handle = client.submit(input_ids=[1, 2, 3], sampling_params=LONG)
    eventually(lambda: client.status().running_requests == 1)
    zero.kill()
    with pytest.raises(EngineDied):
        handle.result()
    eventually(lambda: not is_alive(one))
    assert shared_memory() <= before
