"""Memory stays flat over in-place updates with requests in flight (I9), measured in a process of its own.

Reserved memory is what the engine itself reports: on the CPU, the resident anonymous pages of its process.
"""

import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.deltas import SentDelta, some_changed
from support.lanes import quick

from caesura.client import GenerationHandle, SamplingParams, SchedulerClient, launch_scheduler
from caesura.transfer.weight_delta import DeltaMetadata, write_delta
from caesura.transfer.weight_digest import digest_of

pytestmark = pytest.mark.executed
WARM_UP = 10
DELTAS = 1000
NEW_TOKENS = 24
MAX_GROWTH = 1 << 20
"""Bytes over 190 cycles: not one and a half pages each. Losing a bucket per cycle would be 47 MB, losing a
copy of the model 530 MB; what is measured is a quarter of a megabyte, up and down, the grain of malloc's
arenas.
"""

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("flat") / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", seed=seed, num_hidden_layers=3, **SHAPE)
    return paths


def pause_amid_requests(
    client: SchedulerClient, prompt: list[int], params: SamplingParams
) -> list[GenerationHandle]:
    """Pause with a request in flight, after steps have run since the last pause; return all it took."""
    taken = []
    while True:
        taken.append(client.submit(prompt, params, stream=True))
        next(taken[-1].deltas())
        if client.pause("in_place").held_requests:
            return taken
        client.continue_generation()


@pytest.mark.slow
@pytest.mark.parametrize("cycles", quick([60, 200]))
def test_many_updates_in_place(models, cycles):
    engine = launch_scheduler(
        models[0],
        dtype="float32",
        device="cpu",
        num_threads=1,
        kv_pool_tokens=4096,
        load_bucket_bytes=1 << 18,
        check_ledger=True,
        log_level="WARNING",
    )
    with engine as client:
        handles, streamed, reserved, tokens = [], [], [], 0
        for cycle in range(cycles):
            params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=cycle)
            prompt = [3 + (cycle * 31 + i * 7) % 500 for i in range(40)]
            handles.append(client.submit(prompt, params, return_logprob=True))
            streamed += pause_amid_requests(client, prompt[:20], params)
            update = client.update_weights_from_disk(
                models[(cycle + 1) % 2], weight_version=str(cycle), flush_cache=False
            )
            assert update.changed_tensors == update.written_tensors
            report = client.continue_generation()
            assert report.freed == max(0, report.reserved_before - report.reserved_after)
            reserved.append(client.status().device_memory.reserved)
        crossed = 0
        for handle in handles:
            output = handle.result()
            tokens += len(output.output_ids)
            crossed += any(span.stale_kv for span in output.weight_versions)
        for handle in streamed:
            handle.result()
        status = client.status()
        assert (status.weights_epoch, status.weight_version) == (cycles, str(cycles - 1))
        assert (status.kv.held, status.running_requests, status.waiting_requests) == (0, 0, 0)
        assert tokens == NEW_TOKENS * cycles
        assert crossed > cycles // 2, "the updates were meant to happen in the middle of requests"
        growth = reserved[-1] - max(reserved[:WARM_UP])
        assert growth <= MAX_GROWTH, f"reserved grew by {growth} bytes: {reserved[::10]}"
        assert max(reserved[WARM_UP:]) - max(reserved[:WARM_UP]) <= MAX_GROWTH
    assert engine.returncode == 0


@pytest.mark.long
def test_a_thousand_deltas_in_place(models, tmp_path):
    old = load_file(models[0] / "model.safetensors")
    new = some_changed(old, 0.02)
    digests = [digest_of(old), digest_of(new)]
    for folder, delta, base in (("to", SentDelta(old, new), 0), ("back", SentDelta(new, old), 1)):
        facts = DeltaMetadata(base_digest=digests[base], digest=digests[1 - base])
        write_delta(tmp_path / folder, delta.specs, [delta.buffer], facts)
    reserved = []
    with launch_scheduler(
        models[0], dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=4096, log_level="ERROR"
    ) as client:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for cycle in range(DELTAS // 2):
            handle = client.submit([3, 4, cycle % 500], params)
            assert client.update_weights_from_disk(tmp_path / "to", flush_cache=False).digest == digests[1]
            if cycle % 3:
                client.update_weights_from_disk(tmp_path / "back", flush_cache=False)
            else:
                client.rollback_weights(flush_cache=False)
            handle.result()
            reserved.append(client.status().device_memory.reserved)
        assert client.status().digest == digests[0]
    assert max(reserved[WARM_UP:]) - max(reserved[:WARM_UP]) <= MAX_GROWTH, reserved[::25]
