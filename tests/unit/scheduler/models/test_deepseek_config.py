"""DeepSeek configs as transformers reads them, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import FAMILIES, ROPE_YARN, rewrite_config_as_v4
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.layers.rotary import inverse_frequencies
from caesura.scheduler.models.config import (
    ModelConfig,
    config_difference,
    load_model_config,
    parse_model_config,
)

MINIMAL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config({**MINIMAL, **changes})


def transformers_model(family: str, **fields: Any) -> Any:
    config_class, model_class, defaults = FAMILIES[family]
    shape = {
        name: value for name, value in MINIMAL.items() if name not in ("architectures", "num_key_value_heads")
    }
    with torch.device("meta"):
        return model_class(config_class(**{**shape, **defaults, **fields}))


@pytest.mark.parametrize("v4", [False, True])
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("rope", [None, ROPE_YARN])
def test_fields_are_those_of_transformers(family: str, v4: bool, rope: Any, tmp_path: Path) -> None:
    model = transformers_model(family, rope_parameters=rope, first_k_dense_replace=2)
    theirs = model.config
    theirs.architectures, theirs.dtype = [type(model).__name__], torch.bfloat16
    theirs.save_pretrained(tmp_path)
    if v4:
        rewrite_config_as_v4(tmp_path)
    ours = load_model_config(tmp_path)
    assert ours.mla is not None
    assert ours.moe is not None
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(ours.mla, name) == getattr(theirs, name)
    attention = model.model.layers[0].self_attn
    assert ours.mla.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.qk_head_dim, theirs.num_attention_heads)
    assert ours.mla.latent_width == theirs.kv_lora_rank + theirs.qk_rope_head_dim
    assert (ours.moe.num_experts, ours.moe.top_k) == (6, 3)
    assert (ours.moe.num_groups, ours.moe.top_groups) == (theirs.n_group, theirs.topk_group)
    assert ours.moe.routed_scale == theirs.routed_scaling_factor
    assert ours.moe.sparse_layers == (False, False, True, True, True, True)
    assert ours.num_mtp_layers == getattr(theirs, "num_nextn_predict_layers", 0)


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16},
        {"mscale": 1.0},
        {"attention_factor": 0.7, "beta_slow": 3},
        {"factor": 0.5},
        {"original_max_position_embeddings": 8},
    ],
)
def test_yarn_is_that_of_transformers(size: int, changes: dict[str, Any]) -> None:
    rope = {**YARN, "rope_theta": 10_000.0, **changes}
    theirs = transformers.DeepseekV3Config(
        qk_rope_head_dim=size, rope_parameters=dict(rope), max_position_embeddings=163_840
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = parse(rope_parameters=rope, qk_rope_head_dim=size).rope
    torch.testing.assert_close(inverse_frequencies(ours, size), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_absent_fields_are_the_defaults_of_transformers() -> None:
    v3, v2 = parse(n_group=8), parse(**V2)
    for ours, theirs in (
        (v3, transformers.DeepseekV3Config()),
        (v2, transformers.DeepseekV2Config(num_experts_per_tok=6)),
    ):
        assert ours.mla is not None
        assert ours.moe is not None
        assert ours.mla.q_lora_rank == theirs.q_lora_rank
        assert ours.mla.latent_width == theirs.kv_lora_rank + theirs.qk_rope_head_dim
        assert (ours.mla.qk_nope_head_dim, ours.mla.v_head_dim) == (
            theirs.qk_nope_head_dim,
            theirs.v_head_dim,
        )
        assert ours.moe.num_experts == theirs.n_routed_experts
        assert ours.moe.intermediate_size == theirs.moe_intermediate_size
        assert ours.moe.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
        assert ours.moe.routed_scale == theirs.routed_scaling_factor
        assert ours.moe.sparse_layers.index(True) == theirs.first_k_dense_replace
    assert (v3.moe.normalize, v3.moe.scoring, v3.moe.score_bias) == (True, "sigmoid", True)
    assert (v2.moe.normalize, v2.moe.scoring, v2.moe.score_bias) == (False, "softmax", False)


def test_the_released_configs_are_understood() -> None:
    v3 = parse(
        aux_loss_alpha=0.001,
        ep_size=1,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        moe_layer_freq=1,
        n_group=8,
        norm_topk_prob=True,
        num_key_value_heads=4,
        num_nextn_predict_layers=1,
        q_lora_rank=1536,
        rope_scaling={
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        scoring_func="sigmoid",
        seq_aux=True,
        topk_group=4,
        topk_method="noaux_tc",
        torch_dtype="bfloat16",
    )
    assert v3.mla.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert (v3.rope.attention_factor, v3.num_mtp_layers) == (1.0, 1)
    lite = parse(
        **V2,
        moe_layer_freq=1,
        n_group=1,
        norm_topk_prob=False,
        q_lora_rank=None,
        rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        scoring_func="softmax",
        topk_group=1,
        topk_method="greedy",
    )
    assert (lite.mla.q_lora_rank, lite.moe.num_groups, lite.num_mtp_layers) == (None, 1, 0)


def test_layers_with_experts() -> None:
    sparse = parse(first_k_dense_replace=1, moe_layer_freq=2).moe.sparse_layers
    assert sparse == (False, False, True, False, True, False)
    assert parse(first_k_dense_replace=None).moe.sparse_layers == (True,) * 6
    assert not any(parse(first_k_dense_replace=6).moe.sparse_layers)
    assert parse(n_shared_experts=None).moe.shared_size == 0


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"scoring_func": "softmax"}, ["scoring_func"]),
        ({"topk_method": "greedy"}, ["topk_method"]),
        ({**V2, "scoring_func": "sigmoid"}, ["scoring_func"]),
        ({**V2, "topk_method": "noaux_tc"}, ["topk_method"]),
        ({**V2, "norm_topk_prob": True}, ["norm_topk_prob"]),
        ({"num_key_value_heads": 2}, ["num_attention_heads", "num_key_value_heads"]),
        ({"attention_bias": True, "q_lora_rank": None}, ["attention_bias"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["rope_scaling"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(CaesuraError) as caught:
        parse(**changes)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.detail["fields"] == fields


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": "wide"}, "q_lora_rank"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 256, "topk_group": 9}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers"),
        ({**V2, "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({**V2, "topk_method": "group_limited_greedy"}, "n_group"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": "all"}}, "mscale_all_dim"),
    ],
)
def test_invalid_values_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CaesuraError, match=field) as caught:
        parse(**changes)
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR


def test_difference_names_what_the_forward_reads() -> None:
    base = parse()
    other = parse(kv_lora_rank=8, routed_scaling_factor=1.0, rope_scaling=YARN)
    assert config_difference(base, other) == ["rope", "mla", "moe"]
    assert config_difference(base, parse(num_nextn_predict_layers=1)) == []


def test_configs_are_json(tmp_path: Path) -> None:
    for name, value in (("null", {"q_lora_rank": None}), ("absent", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**MINIMAL, **value}))
    assert load_model_config(tmp_path / "null").mla.q_lora_rank is None
    assert load_model_config(tmp_path / "absent").mla.q_lora_rank == 1536
