"""Logits against transformers, for every family and every way that a token can be computed."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    ROPE_LINEAR,
    ROPE_YARN,
    edit_config,
    make_checkpoint,
    rewrite_config_as_v4,
)
from support.foreign_comparison import WAYS, Compared, compare_models, prompt
from support.forward_batches import PagedModel, Row, Sequence, forward_batch, load_model
from support.stored_weights import storage
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from caesura.scheduler import models
from caesura.scheduler.layers.norm import RMSNorm
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.models import registry
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.models.config import load_model_config
from caesura.scheduler.models.registry import build_model

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    v4: bool
    overrides: dict[str, Any]


def heads(query: int, kv: int, size: int, hidden: int) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": size, "hidden_size": hidden}


def latent(query: int, hidden: int, kv: int, nope: int, rope: int, value: int) -> dict[str, Any]:
    return {
        **heads(query, query, rope, hidden),
        "kv_lora_rank": kv,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }


def case(family: str, *, tied: bool = False, v4: bool = False, **overrides: Any) -> Case:
    return Case(family, tied, v4, overrides)


UPPER = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
CASES = {
    "llama": case("llama"),
    "llama-tied-v4": case("llama", tied=True, v4=True),
    "llama-bias": case("llama", attention_bias=True),
    "llama-groups-of-3": case("llama", **heads(6, 2, 10, 36)),
    "llama3-rope": case("llama3-rope"),
    "llama3-rope-tied-v4": case("llama3-rope", tied=True, v4=True),
    "linear-rope": case("llama", rope_parameters=ROPE_LINEAR),
    "mistral": case("mistral", **heads(3, 3, 14, 42)),
    "mistral-tied": case("mistral", tied=True),
    "mistral-window": case("mistral", sliding_window=18),
    "qwen2-upper-windows": case("qwen2", **UPPER),
    "qwen3-yarn": case("qwen3", rope_parameters={**ROPE_YARN, "truncate": False}),
    "gemma3": case("gemma3", tied=True),
    "gemma3-tied-v4": case(
        "gemma3", tied=True, v4=True, layer_types=None, sliding_window_pattern=2, head_dim=14
    ),
    "gemma3-bias-scaled-rope": case(
        "gemma3", attention_bias=True, rope_parameters=ROPES, **heads(3, 1, 14, 42)
    ),
    "qwen2": case("qwen2", **heads(4, 2, 10, 40)),
    "qwen2-tied-v4": case("qwen2", tied=True, v4=True, **heads(6, 2, 6, 36)),
    "qwen3": case("qwen3", **heads(6, 2, 16, 44)),
    "qwen3-tied": case("qwen3", tied=True),
    "qwen3-one-kv-head": case("qwen3", **heads(5, 1, 8, 36)),
    "qwen3-moe": case("qwen3-moe", **heads(6, 2, 16, 44)),
    "qwen3-moe-every-second-layer-v4": case(
        "qwen3-moe", v4=True, num_hidden_layers=3, decoder_sparse_step=2, moe_intermediate_size=33,
        num_experts=7, num_experts_per_tok=2, norm_topk_prob=False, **heads(5, 1, 8, 36),
    ),
    "qwen3-moe-dense-layer-tied": case(
        "qwen3-moe", tied=True, num_hidden_layers=3, mlp_only_layers=[1], moe_intermediate_size=16,
        num_experts=3, attention_bias=True,
    ),
    "qwen3-moe-one-of-many": case(
        "qwen3-moe", moe_intermediate_size=1, num_experts=300, num_experts_per_tok=1, norm_topk_prob=False
    ),
    "qwen2-moe": case("qwen2-moe", **heads(6, 2, 10, 44)),
    "qwen2-moe-windows": case(
        "qwen2-moe", decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False, **UPPER
    ),
    "mixtral": case("mixtral", **heads(6, 2, 16, 44)),
    "mixtral-window-v4": case("mixtral", v4=True, sliding_window=21),
    "gpt-oss": case("gpt-oss"),
    "gpt-oss-groups-of-3": case(
        "gpt-oss", intermediate_size=33, sliding_window=40,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3}, **heads(6, 2, 10, 36),
    ),
    "glm4-moe": case("glm4-moe"),
    "glm4-moe-bias-v4": case(
        "glm4-moe", v4=True, attention_bias=True, use_qk_norm=False, n_group=3, topk_group=2,
        routed_scaling_factor=1.7, **heads(6, 2, 20, 36),
    ),
    "deepseek-v2": case("deepseek-v2", **latent(3, 42, 20, 10, 6, 14)),
    "deepseek-v2-lite": case(
        "deepseek-v2", tied=True, q_lora_rank=None, topk_method="greedy", first_k_dense_replace=0,
        n_shared_experts=1, **latent(5, 45, 18, 14, 4, 9),
    ),
    "deepseek-v2-yarn-bias-v4": case(
        "deepseek-v2", v4=True, rope_parameters=ROPE_YARN, attention_bias=True, rms_norm_eps=1e-3
    ),
    "deepseek-v3": case("deepseek-v3", **latent(3, 43, 20, 10, 6, 14)),
    "deepseek-v3-one-group-tied": case(
        "deepseek-v3", tied=True, n_group=1, topk_group=1, first_k_dense_replace=0,
        **latent(7, 40, 9, 5, 2, 3),
    ),
    "deepseek-v3-halves-yarn-v4": case(
        "deepseek-v3", v4=True, rope_parameters=ROPE_YARN, rope_interleave=False, q_lora_rank=None,
        norm_topk_prob=False, **latent(1, 40, 33, 4, 8, 17),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_and_updates(name: str, tmp_path: Path) -> None:
    case, models = CASES[name], []
    for number, path in enumerate((tmp_path / "old", tmp_path / "new")):
        seed = len(name) + number
        models.append(make_checkpoint(path, case.family, tied=case.tied, seed=seed, **case.overrides))
        if case.v4:
            rewrite_config_as_v4(path)
    model = load_model(str(tmp_path / "old"), torch.float32)
    only_sampled_tokens_reach_the_head(model)
    compared = compare_models(Compared(*models, model, tmp_path / "new", {}))
    assert compared.gaps.keys() == WAYS - ({"in_place update"} if "deepseek" in case.family else set())
    assert max(compared.gaps.values()) <= TOLERANCE, compared.gaps
    assert storage(model) == storage(load_model(str(tmp_path / "new"), torch.float32))
    with torch.inference_mode():
        assert models[0](torch.tensor([prompt(20)])).logits.std() > 0.3, "the tolerance would mean nothing"


def only_sampled_tokens_reach_the_head(model: CausalLM) -> None:
    paged, sequence = PagedModel(model, torch.float32), Sequence(prompt(21))
    (logits,) = paged.step([], [(sequence, 21)])
    batch = forward_batch([Row(sequence.tokens, 0, sequence.pages)], 0)
    batch.sample_tokens = torch.tensor([20, 4])
    with torch.inference_mode():
        paged.backend.plan(batch)
        hidden = model.forward(batch, paged.backend)
        assert hidden.shape == (2, model.config.hidden_size)
        torch.testing.assert_close(model.logits(hidden), logits[[20, 4]], atol=TOLERANCE, rtol=0)
        batch.sample_tokens = torch.tensor([], dtype=torch.int64)
        assert model.forward(batch, paged.backend).shape == (0, model.config.hidden_size)


NARROW = {torch.bfloat16: 0.03, torch.float16: 0.004}
"""Mean error of the logits by their standard deviation; transformers' own modules have a fifth of it in these
dtypes.
"""


@pytest.mark.parametrize("compiled", [False, True], ids=["by part", "at once"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "deepseek-v2", "deepseek-v3"]
)
def test_two_bytes(family: str, dtype: torch.dtype, compiled: bool, tmp_path: Any) -> None:
    """Compare with float32: roundings differ with the order of operations; a wrong one gives far more."""
    reference = make_checkpoint(tmp_path, family, dtype=dtype, sharded=True)
    tokens = prompt(40)
    model = load_model(str(tmp_path), dtype)
    if compiled and not model.in_one_call:
        pytest.skip("no compiled kernels")
    paged = PagedModel(model, dtype, compiled=compiled)
    sequence = Sequence(tokens)
    first = paged.step([], [(sequence, 30)])[0]
    got = torch.cat([first, *(paged.step([sequence])[0] for _ in range(10))])
    assert got.dtype == dtype
    with torch.inference_mode():
        expected = reference.float()(torch.tensor([tokens])).logits[0]
    assert (got.float() - expected).abs().mean() < NARROW[dtype] * expected.std()


def test_norm_rounds_as_transformers_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).mul(3).bfloat16()
    ours = RMSNorm("n", "n", 64, 1e-5, place=Placement(torch.bfloat16, torch.device("cpu")))
    theirs = LlamaRMSNorm(64, 1e-5).bfloat16()
    weight = torch.randn(64, generator=generator).bfloat16()
    next(ours.slots()).write(weight, 0)
    with torch.inference_mode():
        theirs.weight.copy_(weight)
        assert torch.equal(ours.forward(x), theirs(x))
        residual, update = x.clone(), x.flip(0)
        assert torch.equal(ours.add(update, residual), theirs(x + update))
        assert torch.equal(residual, x + update)


def test_a_new_architecture_is_one_new_file(tmp_path: Any) -> None:
    (tmp_path / "renamed.py").write_text(
        "from caesura.scheduler.models.family import Family\n"
        "from caesura.scheduler.models.qwen3 import Qwen3ForCausalLM\n"
        "FAMILIES = {'RenamedForCausalLM': Family(num_kv_heads=1, head_dim=6)}\n"
        "class RenamedForCausalLM(Qwen3ForCausalLM):\n    pass\n"
    )
    known = set(registry.families())
    assert "RenamedForCausalLM" not in known
    make_checkpoint(tmp_path / "model", "qwen3")
    edit_config(tmp_path / "model", architectures=["RenamedForCausalLM"])
    models.__path__.append(str(tmp_path))
    registry._modules.cache_clear()
    try:
        assert set(registry.families()) - known == {"RenamedForCausalLM"}
        model = build_model(load_model_config(tmp_path / "model"), torch.float32, torch.device("cpu"))
        assert type(model).__name__ == "RenamedForCausalLM"
    finally:
        models.__path__.remove(str(tmp_path))
        del sys.modules["caesura.scheduler.models.renamed"]
        registry._modules.cache_clear()


def test_parameters_are_aligned_and_stay_where_they_are(tmp_path: Any) -> None:
    make_checkpoint(tmp_path, "qwen3", tied=True)
    model = build_model(load_model_config(tmp_path), torch.float32, torch.device("cpu"))
    before = {name: tensor.data_ptr() for name, tensor in model.named_storage()}
    assert all(address % 64 == 0 for address in before.values())
    loaded = load_model(str(tmp_path), torch.float32)
    storage = dict(loaded.named_storage())
    assert "lm_head.weight" not in storage  # tied: one storage, one owner
    assert len({tensor.data_ptr() for tensor in storage.values()}) == len(storage)
    assert {name: tuple(t.shape) for name, t in storage.items()} == {
        name: tuple(t.shape) for name, t in model.named_storage()
    }


def test_the_documentation_shows_the_file_as_it_is() -> None:
    code = Path(models.__file__).with_name("qwen3.py").read_text().partition("\n\n")[2]
    assert code in (Path(__file__).parents[4] / "docs" / "contributing" / "architectures.md").read_text()
