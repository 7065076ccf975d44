"""An engine process that runs transformers' modules: its tokens, updates by every transport, release and
resume (I7).

Every second layer has a window, which is shorter than the output: pages are given back meanwhile.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import tiny_model
from support.foreign_comparison import prompt

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.exceptions import EngineError
from caesura.client.trainer import SharedTensors, WeightUpdateGroup

ARCHITECTURE = "Olmo3ForCausalLM"
OPTIONS = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 1024, "check_ledger": True}
PROMPT = prompt(20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("olmo3") / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        tiny_model(ARCHITECTURE, seed).save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def engine(folders: list[Path]):
    with launch_scheduler(folders[0], **OPTIONS) as client:
        yield client


def state(client: SchedulerClient) -> tuple[str, list[int]]:
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    total = client.check_weights("checksum").total
    return total, list(client.generate(PROMPT, sampling_params=params).output_ids)


@pytest.fixture(scope="module")
def cold(engine: SchedulerClient) -> tuple[str, list[int]]:
    return state(engine)


def test_tokens_are_those_of_transformers(cold: tuple[str, list[int]], engine: SchedulerClient) -> None:
    model, tokens = tiny_model(ARCHITECTURE, 0), PROMPT + cold[1]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    assert cold[1] == logits.argmax(-1).tolist()
    assert len(set(cold[1])) > 10
    assert "transformers" in engine.status().kernels_reason


@pytest.mark.parametrize(
    ("transport", "paused"),
    [("disk", False), ("tensor", True), ("ipc", False), ("ipc, shared", True), ("distributed", False)],
)
def test_update_equals_cold_load(
    transport: str, paused: bool, engine: SchedulerClient, folders: list[Path], cold: tuple[str, list[int]]
) -> None:
    assert engine.update_weights_from_disk(folders[1]).changed_tensors > 20
    changed = state(engine)
    assert changed[0] != cold[0]
    assert changed[1] != cold[1]
    named = list(load_file(folders[0] / "model.safetensors").items())[::-1]
    if paused:
        engine.pause("in_place")
    if transport == "disk":
        reply = engine.update_weights_from_disk(folders[0])
    elif transport == "tensor":
        reply = engine.update_weights_from_tensor(named, bucket_bytes=1000)
    elif transport == "ipc":
        reply = engine.update_weights_from_ipc(named, bucket_bytes=4096)
    elif transport == "ipc, shared":
        with SharedTensors(named) as shared:
            reply = engine.update_weights_from_ipc(shared)
    else:
        with WeightUpdateGroup.create([engine]) as group:
            reply = engine.update_weights_from_distributed(named, group=group, bucket_bytes=4096)
    assert reply.committed
    engine.continue_generation(torch_empty_cache=False)
    assert state(engine) == cold


def test_release_and_resume(
    engine: SchedulerClient, folders: list[Path], cold: tuple[str, list[int]]
) -> None:
    engine.pause("retract")
    engine.release_memory()
    engine.resume_memory()
    assert engine.status().weights == "invalid"
    assert engine.update_weights_from_tensor(load_file(folders[0] / "model.safetensors").items()).committed
    engine.continue_generation()
    assert state(engine) == cold


def test_unexpected_tensors_are_refused(engine: SchedulerClient, cold: tuple[str, list[int]]) -> None:
    with pytest.raises(EngineError) as caught:
        engine.update_weights_from_tensor([("model.norm.bias", torch.zeros(48))])
    assert caught.value.code == "weight_mismatch"
    with pytest.raises(EngineError, match="experts"):
        engine.generate(PROMPT, return_routed_experts=True)
    assert state(engine) == cold
