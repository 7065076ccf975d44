"""The KV pool on an accelerator leaves what a step takes; on the CPU it does not ask."""

import dataclasses

import pytest
import torch
from support.checkpoints import make_checkpoint

from caesura.scheduler import build
from caesura.scheduler.build import build_pool, kv_bytes_per_token, load_model, step_bytes
from caesura.scheduler.config import PAGE_SIZE, EngineConfig


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_a_step_has_room_beside_the_pool(tmp_path, monkeypatch, family):
    make_checkpoint(tmp_path, family)
    config = EngineConfig(
        model_path=str(tmp_path),
        device="cpu",
        max_running_requests=5000,
        chunked_prefill_size=8192,
        kv_memory_fraction=0.85,
    )
    loaded = load_model(config)
    there = dataclasses.replace(loaded, device=torch.device("meta"))
    assert step_bytes(config, loaded) == 0
    needed = step_bytes(config, there)
    logits = 5000 * loaded.config.vocab_size * 4
    assert needed > logits + 13192 * loaded.config.hidden_size * loaded.dtype.itemsize
    made = []
    monkeypatch.setattr(build, "make_pool", lambda loaded, num_pages, windows: made.append(num_pages - 1))
    monkeypatch.setattr(build, "available_memory_if_known", lambda *of, **options: needed + (64 << 20))
    page = (kv_bytes_per_token(loaded) + build.routing_bytes_per_token(loaded)) * PAGE_SIZE
    for model, share in ((there, 64 << 20), (loaded, needed + (64 << 20))):
        build_pool(config, model, 1 << 14)
        assert made.pop() == min(int(share * 0.85) // page, 5000 * 1024)
