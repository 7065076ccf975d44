"""What ranks hold of each tensor, put together, is the checkpoint's tensor."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint

from caesura.io_struct import CaesuraError, ErrorCode, TensorSpec
from caesura.scheduler.models.base import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.reading import Held, is_divided, require_placeable
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint

CPU = torch.device("cpu")
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}
CASES = {
    "qwen3": ("qwen3", 2, {}),
    "vocabulary and heads of three": ("llama", 3, {**THREE, "attention_bias": True}),
    "experts": ("qwen3-moe", 2, {}),
    "latent": ("deepseek-v3", 2, {}),
    "states by key head": ("qwen3-next", 2, {}),
    "states": ("qwen3.5", 2, {}),
}


def shards(path: Path, size: int, dtype: torch.dtype = torch.float32) -> list[CausalLM]:
    models = []
    for rank in range(size):
        model = build_model(load_model_config(path), dtype, CPU, TensorParallel(rank, size))
        load_from_disk(WeightLoader(model), open_checkpoint(path), 1 << 20, None)
        models.append(model)
    return models


def assert_parts_make_the_checkpoint(path: Path, size: int) -> int:
    expected, models = load_file(path / "model.safetensors"), shards(path, size)
    by_rank = [model.weight_slots() for model in models]
    require_placeable(iter(by_rank[0].values()))
    divided = 0
    for name, slots in ((name, [each[name] for each in by_rank]) for name in by_rank[0]):
        if name not in expected:  # the head of tied embeddings
            continue
        value = expected[name].to(slots[0].dtype)
        spec = TensorSpec(
            name=name, dtype=NAMES[value.dtype], shape=list(value.shape), offset=3, nbytes=value.nbytes
        )
        buffer = torch.full((value.nbytes + 6,), 171, dtype=torch.uint8)
        for slot in slots:
            said = msgspec.msgpack.decode(msgspec.msgpack.encode(Held.of(slot)), type=Held)
            said.place(buffer, spec)
        assert bytes(buffer[3:-3].numpy()) == bytes(
            value.contiguous().reshape(-1).view(torch.uint8).numpy()
        ), name
        assert buffer[:3].tolist() == buffer[-3:].tolist() == [171] * 3
        divided += is_divided(slots[0])
    return divided


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_checkpoint(tmp_path, case):
    family, size, overrides = CASES[case]
    make_checkpoint(tmp_path, family, tied=False, seed=4, **overrides)
    assert assert_parts_make_the_checkpoint(tmp_path, size) > 4


def test_blocks_and_their_scales_do_as_well(tmp_path):
    make_checkpoint(tmp_path / "plain", "qwen3", tied=True, seed=3, **_even_blocks())
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (16, 16))
    assert assert_parts_make_the_checkpoint(tmp_path / "fp8", 2) > 4


def _even_blocks() -> dict[str, Any]:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return {**sizes, "hidden_size": 64, "intermediate_size": 64}


def test_columns_by_turns_are_refused_by_name(tmp_path):
    make_checkpoint(tmp_path, "gpt-oss", tied=False, seed=4)
    (model, _) = shards(tmp_path, 2)
    with pytest.raises(CaesuraError, match="experts") as caught:
        require_placeable(iter(model.weight_slots().values()))
    assert caught.value.code == ErrorCode.UNSUPPORTED
    assert "gate_up_proj" in str(caught.value.detail["name"])
