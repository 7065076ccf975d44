"""Release and resume in a process of its own: the system's count falls and recovers, and so do the tokens."""

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.plain_trainer import weights_of

from caesura.client import SamplingParams, launch_scheduler
from caesura.client.exceptions import EngineError, MemoryReleased

MIB = 1 << 20
SHAPE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
OPTIONS = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "kv_pool_tokens": 16384, "check_ledger": True,
    "log_level": "WARNING",
    "autotune": False,  # a warm engine holds KV pages that nobody has used
}  # fmt: skip
PROMPTS = [[3 + (31 * row + 7 * i) % 2000 for i in range(200)] for row in range(20)]
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("release") / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", seed=seed, num_hidden_layers=6, **SHAPE)
    return paths


@pytest.fixture(scope="module")
def cold(models):
    with launch_scheduler(models[1], **OPTIONS) as client:
        outputs = client.generate(PROMPTS, PARAMS)
        return [output.output_ids for output in outputs], client.check_weights().total


@pytest.mark.slow
@pytest.mark.executed
def test_memory_and_tokens_come_back(models, cold):
    with launch_scheduler(models[0], **OPTIONS) as client:
        process = psutil.Process(client.status().pid)
        client.generate(PROMPTS, PARAMS)
        sizes = client.status().device_memory
        used = len(PROMPTS) * 200 / 16384 * sizes.kv_cache  # what these prompts have written of the pool
        expected = sizes.weights + used
        assert expected > 40 * MIB
        client.pause()
        client.flush_cache()
        before = process.memory_info().rss
        for cycle in range(2):
            released = client.release_memory()
            assert released.reserved_before - released.reserved_after > 0.95 * expected
            assert before - process.memory_info().rss > 0.95 * expected, f"cycle {cycle}"
            with pytest.raises(MemoryReleased):
                client.check_weights()
            client.resume_memory(["weights"])
            with pytest.raises(EngineError, match="their memory was released") as caught:
                client.generate(PROMPTS[0], PARAMS)
            assert caught.value.code == "weights_invalid"
            weights = weights_of(models[1]).items()
            assert client.update_weights_from_tensor(weights, bucket_bytes=MIB, flush_cache=False).committed
            client.continue_generation()
            handles = [client.submit(prompt, PARAMS) for prompt in PROMPTS]
            assert client.status().step == client.status().step, "nothing is launched"
            assert client.resume_memory().released_tags == []
            assert [handle.result().output_ids for handle in handles] == cold[0]
            assert client.check_weights().total == cold[1]
            client.pause()
            client.flush_cache()
            assert abs(process.memory_info().rss - before) < 0.1 * expected + 8 * MIB
