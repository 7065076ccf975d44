"""Memory that really runs out: an address-space limit, set on the engine's process while it serves.

A prefill of all of the large prompt needs 118 MB for one temporary alone, a single token 64 KB. So the prompt
cannot be computed in one step, and can in some number of smaller ones. How small they have to be depends on
how the allocator's heap lies, and nothing here does: what is compared are results.
"""

import resource
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.lanes import quick

from caesura.client import (
    EngineOutOfMemory,
    GenerateOutput,
    SamplingParams,
    SchedulerClient,
    launch_scheduler,
)

pytestmark = pytest.mark.executed
MIB = 1 << 20
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LARGE = [3 + (i * 7 + i * i % 11) % 90 for i in range(1800)]
SMALL = [[5 + number, 6, 7] for number in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model"
    make_checkpoint(
        path, "qwen3", seed=3, hidden_size=64, intermediate_size=8192, max_position_embeddings=4096
    )
    return path


@pytest.fixture
def client(model):
    engine = launch_scheduler(
        model,
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_pool_tokens=8192,
        chunked_prefill_size=2048,
        target_step_s=1e6,  # only memory decides how prompts are cut
        prefix_cache=False,
        check_ledger=True,
        log_level="WARNING",
    )
    with engine as client:
        yield client


def limit_address_space(client: SchedulerClient, room: int | None) -> None:
    """Leave the engine's process ``room`` bytes of addresses beyond what it has, or no limit for None."""
    pid = client.status().pid
    limit = resource.RLIM_INFINITY
    if room is not None:
        fields = Path(f"/proc/{pid}/status").read_text().split()
        limit = (int(fields[fields.index("VmSize:") + 1]) << 10) + room
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def outcomes(client: SchedulerClient) -> list[GenerateOutput | EngineOutOfMemory]:
    handles = [client.submit(prompt, PARAMS, return_logprob=True) for prompt in [*SMALL, LARGE]]
    found: list[GenerateOutput | EngineOutOfMemory] = []
    for handle in handles:
        try:
            found.append(handle.result())
        except EngineOutOfMemory as error:
            found.append(error)
    return found


def assert_same(found: GenerateOutput, expected: GenerateOutput) -> None:
    assert found.output_ids == expected.output_ids
    assert found.output_logprobs == pytest.approx(expected.output_logprobs, rel=0, abs=1e-4)


@pytest.mark.parametrize("room", quick([2 * MIB, 64 * MIB, 0]))
def test_an_address_space_that_ends(client, room):
    client.generate(SMALL, PARAMS)  # what a first step allocates is there
    limit_address_space(client, room)
    found = outcomes(client)
    status = client.status()
    assert status.kv.held == 0
    assert 0 < status.step_failures.splits <= status.step_failures.failed < 100
    limit_address_space(client, None)
    expected = outcomes(client)
    for limited, free in zip(found, expected, strict=True):
        assert not isinstance(free, EngineOutOfMemory)
        if isinstance(limited, EngineOutOfMemory) and room == 0:
            partial = limited.output
            assert partial is not None
            assert partial.output_ids == free.output_ids[: len(partial.output_ids)]
        else:
            assert not isinstance(limited, EngineOutOfMemory), limited
            assert_same(limited, free)
    failed = client.status().step_failures.failed
    assert_same(client.generate(LARGE, PARAMS, return_logprob=True), expected[-1])
    status = client.status()
    assert (status.step_failures.failed, status.kv.held) == (failed, 0)
