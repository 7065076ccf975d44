"""DeepSeek's weights, routing and memory; logits are in test_models_vs_transformers.py."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import edit_config, make_checkpoint, make_fp8_checkpoint
from support.forward_batches import load_model
from support.stored_weights import mismatch, send, specs, storage
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.cache.pool import MLAPool
from caesura.scheduler.execution.build import build_components, build_runner, kv_bytes_per_token
from caesura.scheduler.kernels import native
from caesura.scheduler.layers.mla import UpProjection
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.memory.residency import MEMORY_TAGS, ComponentResidencyManager
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.weights.loader import WeightLoader

CPU = torch.device("cpu")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
MTP = {
    "model.layers.2.eh_proj.weight": torch.zeros(40, 80),
    "model.layers.2.self_attn.o_proj.weight": torch.zeros(40, 56),
}
"""Some tensors of a third layer in a checkpoint of two layers."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek-v3")
    make_checkpoint(path, "deepseek-v3", seed=1)
    return path


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    path = tmp_path_factory.mktemp("deepseek-v3-other")
    make_checkpoint(path, "deepseek-v3", seed=2)
    return load_file(path / "model.safetensors")


# Weights


def test_fp8_up_projections_are_derived_at_commit_and_not_before(
    folder: Path, other: dict[str, Tensor], tmp_path: Path
) -> None:
    make_fp8_checkpoint(folder, tmp_path, (16, 16), ("gate_proj", "up_proj", "down_proj"))
    model = load_model(str(tmp_path), torch.float32)
    plain = load_model(str(folder), torch.float32)
    derived = {name: tensor for name, tensor in model.named_storage() if name.endswith(("w_kc", "w_vc"))}
    assert sorted(derived) == [f"layers.{i}.attention.{part}" for i in (0, 1) for part in ("w_kc", "w_vc")]
    exact = dict(plain.named_storage())  # in the same layout
    before = {name: tensor.clone() for name, tensor in derived.items()}
    for name, tensor in derived.items():
        assert 0 < (tensor - exact[name]).abs().max() < 0.07 * exact[name].abs().max()
    loader = WeightLoader(model)
    send(loader, KV_B, other[KV_B])
    assert all(torch.equal(tensor, before[name]) for name, tensor in derived.items())
    model.finalize_weights()
    changed = {name for name, tensor in derived.items() if not torch.equal(tensor, before[name])}
    assert changed == {"layers.0.attention.w_kc", "layers.0.attention.w_vc"}


@pytest.mark.parametrize("steps", [(5, 3), (8, 8)], ids=["parts of heads", "heads"])
def test_up_projections_are_the_same_however_their_rows_come(
    folder: Path, other: dict[str, Tensor], steps: tuple[int, int]
) -> None:
    whole, divided = (load_model(str(folder), torch.float32) for _ in range(2))
    slots = [model.weight_slots()[KV_B] for model in (whole, divided)]
    rows, start = other[KV_B].float(), 0
    slots[0].write(rows, 0)
    for step in itertools.cycle(steps):
        if start >= len(rows):
            break
        slots[1].write(rows[start : start + step], start)
        start += step
    assert all(torch.equal(slot.read(), rows) for slot in slots)
    assert not slots[1].differs(rows, 0) and slots[1].differs(rows + 1, 0)
    assert storage(whole) == storage(divided)


def test_heads_are_written_at_once() -> None:
    place = Placement(torch.float32, CPU)
    [slot] = UpProjection("layer", "kv_b_proj", 6, (16, 32), 64, place).slots()
    rows = torch.randn(slot.shape)
    assert len(list(slot.targets(rows, 0))) == 2
    assert len(list(slot.targets(rows[:7], 0))) == 1, "a part of a head's keys"
    slot.write(rows, 0)
    assert torch.equal(slot.read(), rows)


def test_the_router_bias_stays_float32_and_is_required(folder: Path) -> None:
    model = load_model(str(folder), torch.bfloat16)
    slots = model.weight_slots()
    stored = load_file(folder / "model.safetensors")[BIAS]
    assert not torch.equal(stored.bfloat16().float(), stored), "or rounding would not show"
    assert torch.equal(slots[BIAS].read(), stored)
    assert {slot.dtype for name, slot in slots.items() if name != BIAS} == {torch.bfloat16}
    assert BIAS in WeightLoader(model).missing(set(slots) - {BIAS})
    assert "model.layers.0.mlp.gate.weight" not in slots, "the first layer is dense"


# Multi-token prediction


def config_with(folder: Path, path: Path, **changes: Any) -> CausalLM:
    (path / "config.json").write_text((folder / "config.json").read_text())
    edit_config(path, **changes)
    return build_model(load_model_config(path), torch.float32, CPU)


def test_layers_of_multi_token_prediction_are_skipped(folder: Path, tmp_path: Path) -> None:
    loader = WeightLoader(config_with(folder, tmp_path, num_nextn_predict_layers=1))
    loader.check(specs(MTP), complete=False)
    for name, value in MTP.items():
        send(loader, name, value)
    assert (loader.counts.skipped_tensors, loader.counts.written_tensors, loader.written) == (2, 0, set())


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_layers_behind_those_are_unexpected(folder: Path, tmp_path: Path, num_layers: int) -> None:
    model = config_with(folder, tmp_path, num_nextn_predict_layers=num_layers)
    sent = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(4, 4) for layer in (1, 2, 3, 21)}
    skipped = {f"model.layers.{layer}.eh_proj.weight" for layer in range(2, 2 + num_layers)}
    found = mismatch(WeightLoader(model).check, specs(sent), complete=False)
    assert found["unexpected"] == [name for name in sent if name not in skipped]


# Routing


ROUTING = {
    "v2-groups": ("deepseek-v2", {}),
    "v2-greedy": ("deepseek-v2", {"topk_method": "greedy", "num_experts_per_tok": 1}),
    "v3-groups": ("deepseek-v3", {}),
    "v3-one-group": ("deepseek-v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "v3-many": (
        "deepseek-v3",
        {"n_routed_experts": 300, "n_group": 10, "topk_group": 4, "num_experts_per_tok": 8},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ROUTING)
def test_routing_is_that_of_transformers(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compare the chosen experts and their weights, in bf16 too, since both compute scores in float32."""
    family, overrides = ROUTING[case]
    reference = make_checkpoint(tmp_path, family, dtype=dtype, seed=3, **overrides)
    router = next(
        m for m in reference.modules() if isinstance(m, DeepseekV2TopkRouter | DeepseekV3TopkRouter)
    )
    model = load_model(str(tmp_path), dtype)
    with torch.inference_mode():
        ours = model._layers[1].mlp.router
        x = torch.randn(200, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
        ids, weights = ours.forward(x, torch.empty(200, ours.top_k, dtype=torch.uint8))
        _, their_weights, their_ids = router(x)
    order, their_order = ids.argsort(), their_ids.argsort()
    assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(
        weights.gather(1, order), their_weights.gather(1, their_order).float(), atol=1e-6, rtol=1e-5
    )
    assert weights.dtype == torch.float32
    assert ids.unique().numel() > 1, "or any choice would do"


# Numbers and memory


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder), device="cpu", dtype="float32", kv_pool_tokens=512, **options
    ).resolve()


def test_the_engine_stores_latents_alone(folder: Path) -> None:
    config = engine_config(folder)
    manager = ComponentResidencyManager(CPU)
    loaded, pool, routing, _ = build_components(config, manager)
    assert kv_bytes_per_token(loaded) == 2 * (20 + 6) * 4
    assert isinstance(pool, MLAPool)
    assert pool.nbytes == (512 + 16) * kv_bytes_per_token(loaded)
    assert isinstance(
        build_runner(config, loaded, pool, routing).backend,
        PagedCpuBackend if native.why_not() is None else LatentBackend,
    )
    pool.layer(1).fill_(3.0)
    for step in (manager.release(MEMORY_TAGS), manager.resume(MEMORY_TAGS)):
        for _ in step:
            pass
    assert not pool.layer(1).any()
    assert all(not tensor.any() for _, tensor in loaded.model.named_storage())
    for name, value in load_file(folder / "model.safetensors").items():
        send(loaded.loader, name, value)
    loaded.model.finalize_weights()
    assert storage(loaded.model) == storage(load_model(str(folder), torch.float32))


def test_deterministic_mode_is_refused_without_kernels_alone(folder: Path) -> None:
    config = engine_config(folder, deterministic=True)
    loaded, pool, routing, _ = build_components(config, ComponentResidencyManager(CPU))
    if native.why_not() is None:
        build_runner(config, loaded, pool, routing)
        return
    with pytest.raises(CaesuraError, match="compiled CPU kernels") as caught:
        build_runner(config, loaded, pool, routing)
    assert caught.value.code == ErrorCode.UNSUPPORTED
