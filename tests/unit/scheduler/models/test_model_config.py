"""config.json as transformers 4 and 5 write it, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import FAMILIES, ROPE_LLAMA3, ROPE_YARN, rewrite_config_as_v4
from support.mxfp4 import CONFIG as MXFP4
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.layers.rotary import RopeParameters, inverse_frequencies
from caesura.scheduler.models.config import (
    ModelConfig,
    config_difference,
    load_model_config,
    parse_model_config,
)

Fields = dict[str, Any]

COMMON = {
    "vocab_size": 97, "hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip


def named(architecture: str, **fields: Any) -> Fields:
    return {"architectures": [f"{architecture}ForCausalLM"], **fields}


LLAMA = {**COMMON, **named("Llama", num_hidden_layers=2, num_key_value_heads=2)}
MISTRAL, QWEN2, QWEN3, GPT_OSS, GEMMA3, GLM = (
    {**LLAMA, **named(name)} for name in ("Mistral", "Qwen2", "Qwen3", "GptOss", "Gemma3", "Glm4Moe")
)
EXPERTS = {
    **LLAMA, **named("Qwen3Moe", num_local_experts=5, num_experts_per_tok=3, moe_intermediate_size=24)
}  # fmt: skip
V3 = {**COMMON, **named("DeepseekV3", num_hidden_layers=6)}
V2 = {**V3, **named("DeepseekV2", num_experts_per_tok=6)}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LLAMA3 = RopeParameters(**{"theta" if k == "rope_theta" else k: v for k, v in ROPE_LLAMA3.items()})
PUBLISHED = {
    **named("GptOss"), "attention_bias": True, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "quantization_config": MXFP4, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def parse(base: Fields, **changes: Any) -> ModelConfig:
    return parse_model_config({**base, **changes})


def save(path: Path, family: str, **fields: Any) -> Any:
    config_class, model_class, defaults = FAMILIES[family]
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    config = config_class(**{**defaults, **shape, **fields})
    config.architectures = [model_class.__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    return config


# Fields


SLIDING = {"sliding_window": 128}
SLIDES = {**SLIDING, "use_sliding_window": True}


@pytest.mark.parametrize(("base", "changes", "windows"), [
    (MISTRAL, SLIDING, (128,) * 4),
    (MISTRAL, {"sliding_window": 256}, (None,) * 4),
    (QWEN2, {**SLIDES, "max_window_layers": 3}, (None, None, None, 128)),
    (QWEN3, SLIDES, (None,) * 4),
    (QWEN3, {**SLIDES, "max_window_layers": 1}, (None, 128, 128, 128)),
    (QWEN2, {**SLIDING, "max_window_layers": 0}, (None,) * 4),
    (QWEN2, {**SLIDES, "layer_types": ["sliding_attention", "full_attention"] * 2}, (128, None) * 2),
    (GPT_OSS, SLIDING, (128, None) * 2),
    (GEMMA3, {**SLIDING, "sliding_window_pattern": 3}, (128, 128, None, 128)),
    (LLAMA, SLIDING, (None,) * 4),
])  # fmt: skip
def test_windows_are_where_transformers_has_them(
    base: Fields, changes: Fields, windows: tuple[int | None, ...]
) -> None:
    assert parse(base, num_hidden_layers=4, **changes).windows == windows


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("deepseek")])
def test_fields_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = save(
        tmp_path, family, num_key_value_heads=2, rms_norm_eps=3e-6, tie_word_embeddings=True,
        eos_token_id=[5, 7],
    )  # fmt: skip
    ours = load_model_config(tmp_path)
    assert ours.architecture == FAMILIES[family][1].__name__
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (theirs.num_hidden_layers, 4, 2)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.tie_word_embeddings, ours.eos_token_ids, ours.dtype) == (True, (5, 7), torch.bfloat16)
    assert ours.attention_bias is (family in ("qwen2", "qwen2-moe", "gpt-oss"))
    ropes = theirs.rope_parameters
    if family == "llama3-rope":
        assert ours.rope == LLAMA3
    elif family == "gemma3":
        local = RopeParameters(theta=ropes["sliding_attention"]["rope_theta"])
        assert ours.rope == RopeParameters(theta=ropes["full_attention"]["rope_theta"])
        assert ours.ropes == (local, ours.rope, local)
    elif family == "gpt-oss":
        assert (ours.rope.rope_type, ours.rope.factor, ours.rope.truncate) == ("yarn", 32.0, False)
    else:
        assert ours.rope == RopeParameters(theta=ropes["rope_theta"])
    slides = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    window = theirs.sliding_window if any(slides) else None
    slides = slides or [False] * ours.num_layers
    assert ours.windows == tuple(window if sliding else None for sliding in slides)
    rewrite_config_as_v4(tmp_path)
    assert load_model_config(tmp_path) == ours, "both spellings mean the same"


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("rope", [None, ROPE_YARN])
def test_fields_of_latents_are_those_of_transformers(family: str, rope: Any, tmp_path: Path) -> None:
    config_class, model_class, defaults = FAMILIES[family]
    shape = {**COMMON, "num_hidden_layers": 6, **defaults}
    with torch.device("meta"):
        model = model_class(config_class(**shape | {"rope_parameters": rope, "first_k_dense_replace": 2}))
    theirs = model.config
    theirs.architectures, theirs.dtype = [model_class.__name__], torch.bfloat16
    theirs.save_pretrained(tmp_path)
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
    by = ours.moe.in_groups
    assert (by.groups, by.top_groups) == (theirs.n_group, theirs.topk_group)
    assert by.scale == theirs.routed_scaling_factor
    assert ours.moe.sparse_layers == (False, False, True, True, True, True)
    assert ours.num_mtp_layers == getattr(theirs, "num_nextn_predict_layers", 0)
    rewrite_config_as_v4(tmp_path)
    assert load_model_config(tmp_path) == ours, "both spellings mean the same"


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies(head_dim: int) -> None:
    rope = dict(ROPE_LLAMA3, original_max_position_embeddings=1024)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope), "cpu"
    )
    ours = inverse_frequencies(replace(LLAMA3, original_max_position_embeddings=1024), head_dim)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize("changes", [
    {}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16},
    {"mscale": 1.0}, {"attention_factor": 0.7, "beta_slow": 3}, {"factor": 0.5},
    {"original_max_position_embeddings": 8},
])  # fmt: skip
def test_yarn_is_that_of_transformers(size: int, changes: Fields) -> None:
    rope = {**YARN, "rope_theta": 10_000.0, **changes}
    theirs = transformers.DeepseekV3Config(
        qk_rope_head_dim=size, rope_parameters=dict(rope), max_position_embeddings=163_840
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = parse(V3, rope_parameters=rope, qk_rope_head_dim=size).rope
    torch.testing.assert_close(inverse_frequencies(ours, size), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


# Absent fields


@pytest.mark.parametrize(("base", "kv_heads"), [(LLAMA, 32), (MISTRAL, 8), (QWEN2, 32), (QWEN3, 32)])
def test_defaults_are_those_of_the_family(base: Fields, kv_heads: int) -> None:
    large = {**base, "num_attention_heads": 32, "hidden_size": 4096}
    null = parse(large, num_key_value_heads=None, head_dim=None)
    assert (null.num_kv_heads, null.head_dim) == (32, 128)
    del large["num_key_value_heads"]
    absent = parse(large)
    assert (absent.num_kv_heads, absent.head_dim) == (kv_heads, 128)
    assert (absent.rms_norm_eps, absent.rope.theta, absent.dtype) == (1e-6, 10_000.0, torch.float32)


@pytest.mark.parametrize(("base", "theirs", "expected"), [
    ({**V3, "n_group": 8}, transformers.DeepseekV3Config(), (True, True)),
    (V2, transformers.DeepseekV2Config(num_experts_per_tok=6), (False, False)),
], ids=["v3", "v2"])  # fmt: skip
def test_defaults_of_latents_are_those_of_transformers(base: Fields, theirs: Any, expected: Any) -> None:
    config = parse(base)
    ours, moe = config.mla, config.moe
    assert ours is not None
    assert moe is not None
    assert (ours.q_lora_rank, ours.qk_nope_head_dim, ours.v_head_dim, ours.latent_width) == (
        theirs.q_lora_rank, theirs.qk_nope_head_dim, theirs.v_head_dim,
        theirs.kv_lora_rank + theirs.qk_rope_head_dim,
    )  # fmt: skip
    assert (moe.num_experts, moe.intermediate_size) == (theirs.n_routed_experts, theirs.moe_intermediate_size)
    assert moe.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert moe.in_groups.scale == theirs.routed_scaling_factor
    assert moe.sparse_layers.index(True) == theirs.first_k_dense_replace
    assert (moe.normalize, moe.in_groups.sigmoid) == expected


def test_absent_and_null_expert_fields_of_glm() -> None:
    glm = {**GLM, "use_qk_norm": True, "head_dim": 16}
    null = {"n_routed_experts": None, "routed_scaling_factor": None}
    for changes, expected in (({}, (128, 1, 1.0)), (null, (256, 1, 2.5))):
        found = parse(glm, **changes).moe
        assert found is not None
        assert (found.num_experts, found.in_groups.groups, found.in_groups.scale) == expected


def test_absent_expert_fields_are_those_of_transformers() -> None:
    ours = parse({**LLAMA, **named("Qwen3Moe")}, num_hidden_layers=5)
    assert ours.moe is not None
    assert (ours.moe.num_experts, ours.moe.top_k, ours.moe.intermediate_size) == (128, 8, 768)
    assert (ours.moe.normalize, ours.moe.sparse_layers) == (False, (True,) * 5)


def test_a_null_rank_of_queries_is_no_absent_one() -> None:
    assert parse(V3, q_lora_rank=None).mla.q_lora_rank is None
    assert parse(V3).mla.q_lora_rank == 1536


@pytest.mark.parametrize(("base", "changes", "sparse"), [
    (V3, {"first_k_dense_replace": 1, "moe_layer_freq": 2}, (False, False, True, False, True, False)),
    (V3, {"first_k_dense_replace": None}, (True,) * 6),
    (V3, {"first_k_dense_replace": 6}, (False,) * 6),
    (EXPERTS, {"num_hidden_layers": 5}, (True,) * 5),
    (EXPERTS, {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3, 4]},
     (False, True, False, False, False)),
])  # fmt: skip
def test_layers_with_experts(base: Fields, changes: Fields, sparse: tuple[bool, ...]) -> None:
    assert parse(base, **changes).moe.sparse_layers == sparse


def test_experts_that_everything_goes_through_may_be_missing() -> None:
    assert parse(V3, n_shared_experts=None).moe.shared_size == 0


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model_config(tmp_path).eos_token_ids == ()


# Published configs


def test_the_released_configs_of_deepseek_are_understood() -> None:
    yarn = {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}}
    v3 = parse(
        V3, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=3, kv_lora_rank=512, moe_layer_freq=1,
        n_group=8, norm_topk_prob=True, num_key_value_heads=4, num_nextn_predict_layers=1, q_lora_rank=1536,
        rope_scaling={**yarn, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        scoring_func="sigmoid", seq_aux=True, topk_group=4, topk_method="noaux_tc", torch_dtype="bfloat16",
    )  # fmt: skip
    assert v3.mla.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert (v3.rope.attention_factor, v3.num_mtp_layers) == (1.0, 1)
    lite = parse(
        V2, moe_layer_freq=1, n_group=1, norm_topk_prob=False, q_lora_rank=None,
        rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, scoring_func="softmax",
        topk_group=1, topk_method="greedy",
    )  # fmt: skip
    assert (lite.mla.q_lora_rank, lite.moe.in_groups.groups, lite.num_mtp_layers) == (None, 1, 0)


def test_the_released_config_of_gpt_oss_is_understood() -> None:
    config = parse(PUBLISHED)
    assert (config.dtype, config.quantization) == (torch.bfloat16, None)
    wide = parse(PUBLISHED, quantization_config=None, torch_dtype="bfloat16")
    assert config_difference(config, wide) == config_difference(wide, config) == []
    assert parse(PUBLISHED, torch_dtype="float32").dtype == torch.float32


# FP8


@pytest.mark.parametrize("spelling", ["modules_to_not_convert", "ignored_layers"])
def test_converted_modules(spelling: str) -> None:
    names = ["model.layers.1", "layers.0.self_attn.o_proj", "mlp.up_proj", "proj", "yers.3"]
    stated = {"weight_block_size": [64, 32], "activation_scheme": "dynamic", "fmt": "e4m3", spelling: names}
    fp8 = parse(QWEN3, quantization_config=FP8 | stated).quantization
    assert fp8 is not None
    assert (fp8.rows, fp8.columns) == (64, 32)
    assert fp8.converts("model.layers.0.self_attn.q_proj")
    assert fp8.converts("model.layers.10.self_attn.q_proj")  # not below model.layers.1
    assert fp8.converts("model.layers.0.mlp.gate_proj")  # proj is a part of its last component
    assert fp8.converts("model.layers.3.self_attn.q_proj")
    assert not fp8.converts("model.vision.proj")
    plain = "1.self_attn.q_proj", "0.self_attn.o_proj", "0.mlp.up_proj", "0.mlp.gate"
    for name in ("lm_head", *(f"model.layers.{name}" for name in plain)):
        assert not fp8.converts(name), name


# Refusals


def fp8(**changes: Any) -> Fields:
    return {"quantization_config": FP8 | changes}


@pytest.mark.parametrize(("base", "changes", "fields"), [
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, {"quantization_config": "fp8"}, "quantization_config"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (LLAMA, {"layer_types": [["full_attention"], {}]}, "layer_types"),
    (LLAMA, {"dtype": "float8_e4m3fn"}, "dtype"),
    (LLAMA, {"torch_dtype": "int8"}, "torch_dtype"),
    (MISTRAL, {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (EXPERTS, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"architectures": ["Gemma2ForCausalLM"]}, "architectures"),
    (LLAMA, {"architectures": []}, "architectures"),
    (LLAMA, {"architectures": None}, "architectures"),
    (LLAMA, {"mlp_bias": True, "hidden_act": "relu"}, "mlp_bias hidden_act"),
    (V3, {"scoring_func": "softmax"}, "scoring_func"),
    (V3, {"topk_method": "greedy"}, "topk_method"),
    (V2, {"scoring_func": "sigmoid"}, "scoring_func"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
    (V3, {"num_key_value_heads": 2}, "num_attention_heads num_key_value_heads"),
    (V3, {"attention_bias": True, "q_lora_rank": None}, "attention_bias"),
    (V3, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
    (V3, {"mlp_bias": True}, "mlp_bias"),
    (V3, {"hidden_act": "gelu"}, "hidden_act"),
    (QWEN3, fp8(quant_method="gptq"), "quantization_config.quant_method"),
    (QWEN3, fp8(quant_method=None), "quantization_config.quant_method"),
    (QWEN3, fp8(weight_block_size=None), "quantization_config.weight_block_size"),
    (QWEN3, fp8(weight_block_size=[128]), "quantization_config.weight_block_size"),
    (QWEN3, fp8(weight_block_size=[128, 0]), "quantization_config.weight_block_size"),
    (QWEN3, fp8(weight_block_size=[128, 1.5]), "quantization_config.weight_block_size"),
    (QWEN3, fp8(activation_scheme="static"), "quantization_config.activation_scheme"),
    (QWEN3, fp8(fmt="e5m2"), "quantization_config.fmt"),
    (QWEN3, fp8(scale_fmt="ue8m0"), "quantization_config.scale_fmt"),
    (QWEN3, fp8(expert_dtype="fp4"), "quantization_config.expert_dtype"),
    (QWEN3, fp8(modules_to_convert=["model.embed_tokens"]), "quantization_config.modules_to_convert"),
    (QWEN3, fp8(modules_to_not_convert=[r"layers\.\d+"]), "quantization_config.modules_to_not_convert"),
    (QWEN3, fp8(modules_to_not_convert=[3]), "quantization_config.modules_to_not_convert"),
    (QWEN3, fp8(kv_cache_scheme={"type": "float"}), "quantization_config.kv_cache_scheme"),
    (QWEN3, fp8(fmt="e5m2", activation_scheme="static"),
     "quantization_config.fmt quantization_config.activation_scheme"),
    (PUBLISHED, {"quantization_config": {**MXFP4, "group_size": 16}}, "quantization_config.group_size"),
])  # fmt: skip
def test_unsupported_config_fields_are_refused_by_name(base: Fields, changes: Fields, fields: str) -> None:
    with pytest.raises(CaesuraError) as caught:
        parse(base, **changes)
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.detail["fields"] == fields.split()
    assert all(field.removesuffix("s") in caught.value.message for field in fields.split())


def test_mxfp4_is_refused_in_other_families() -> None:
    with pytest.raises(CaesuraError) as caught:
        parse(PUBLISHED, **named("Qwen3", layer_types=None))
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    quantization = {f"quantization_config.{name}" for name in ("quant_method", "weight_block_size")}
    assert quantization <= set(caught.value.detail["fields"])


@pytest.mark.parametrize(("base", "changes"), [
    (LLAMA, {"mlp_bias": False, "quantization_config": None}),
    (LLAMA, {"partial_rotary_factor": 1.0, "rope_scaling": None}),
    (MISTRAL, {"sliding_window": None}),
    (GEMMA3, {"use_bidirectional_attention": ""}),
    (QWEN2, {"use_sliding_window": False, **SLIDING}),
    (QWEN2, {"max_window_layers": 2, **SLIDES}),
    (QWEN3, {"layer_types": ["full_attention"] * 2}),
])  # fmt: skip
def test_fields_that_ask_for_nothing_are_accepted(base: Fields, changes: Fields) -> None:
    assert parse(base, **changes).windows == (None, None) or base is GEMMA3


@pytest.mark.parametrize(("base", "changes", "told"), [
    (LLAMA, {"vocab_size": None}, "vocab_size"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA, {"hidden_size": "40"}, "hidden_size"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (LLAMA, {"head_dim": 7}, "head_dim rotates"),
    (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps"),
    (LLAMA, {"rope_theta": "big"}, "rope_theta"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    (LLAMA, {"eos_token_id": ["</s>"]}, "eos_token_id"),
    (LLAMA, {"hidden_size": 2**31}, "hidden_size"),
    (LLAMA, {"head_dim": 10**400}, "head_dim"),
    (LLAMA, {"num_hidden_layers": 2**64}, "num_hidden_layers"),
    (MISTRAL, {"sliding_window": "wide"}, "sliding_window"),
    (MISTRAL, {**SLIDING, "layer_types": ["full_attention"]}, "layer_types"),
    (QWEN2, {**SLIDES, "max_window_layers": -1}, "max_window_layers"),
    (GLM, {"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
    (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    (GLM, {"partial_rotary_factor": 0.45, "head_dim": 20}, "partial_rotary_factor rotates"),
    (EXPERTS, {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    (EXPERTS, {"num_local_experts": 0}, "num_local_experts"),
    (EXPERTS, {"num_experts": 6}, "num_experts"),
    (EXPERTS, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    (EXPERTS, {"mlp_only_layers": [True]}, "mlp_only_layers"),
    (EXPERTS, {"mlp_only_layers": "0"}, "mlp_only_layers"),
    (EXPERTS, {"moe_intermediate_size": 2.5}, "moe_intermediate_size"),
    (V3, {"kv_lora_rank": 0}, "kv_lora_rank"),
    (V3, {"q_lora_rank": "wide"}, "q_lora_rank"),
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim rotates"),
    (V3, {"n_group": 3}, "n_group"),
    (V3, {"n_group": 256, "topk_group": 9}, "n_group"),
    (V3, {"topk_group": 9}, "topk_group"),
    (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor"),
    (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    (V3, {"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers"),
    (V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
    (V2, {"topk_method": "group_limited_greedy"}, "n_group"),
    (V3, {"rope_scaling": {"type": "yarn"}}, "factor"),
    (V3, {"rope_scaling": {**YARN, "mscale_all_dim": "all"}}, "mscale_all_dim"),
])  # fmt: skip
def test_invalid_values_are_named(base: Fields, changes: Fields, told: str) -> None:
    with pytest.raises(CaesuraError, match=told) as caught:
        parse_model_config({**base, **changes}, source="here/config.json")
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
    assert caught.value.detail["path"] == "here/config.json"


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_missing_or_broken_file(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CaesuraError) as caught:
        load_model_config(tmp_path)
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR
    missing = content is None
    assert caught.value.detail["path"] == str(tmp_path if missing else tmp_path / "config.json")


# Differences


@pytest.mark.parametrize(("base", "changes", "difference"), [
    (LLAMA, {}, []),
    (LLAMA, {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
     ["rms_norm_eps", "rope", "tie_word_embeddings"]),
    (LLAMA, {"eos_token_id": 3, "dtype": "bfloat16", "max_position_embeddings": 99}, []),
    (V3, {"kv_lora_rank": 8, "routed_scaling_factor": 1.0, "rope_scaling": YARN}, ["rope", "mla", "moe"]),
    (V3, {"num_nextn_predict_layers": 1}, []),
    (EXPERTS, {"num_experts_per_tok": 2}, ["moe"]),
    (EXPERTS, {"norm_topk_prob": True}, ["moe"]),
    (EXPERTS, {"mlp_only_layers": [0]}, ["moe"]),
    (EXPERTS, {"moe_intermediate_size": 25}, ["moe"]),
    (EXPERTS, {"output_router_logits": True, "router_aux_loss_coef": 0.5}, []),
    (QWEN3, fp8(), ["quantization"]),
    ({**QWEN3, **fp8()}, {"quantization_config": None}, []),
    ({**QWEN3, **fp8()}, fp8(weight_block_size=[8, 128]), ["quantization"]),
])  # fmt: skip
def test_difference_names_what_the_forward_reads(
    base: Fields, changes: Fields, difference: list[str]
) -> None:
    assert config_difference(parse(base), parse(base, **changes)) == difference
