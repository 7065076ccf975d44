"""config.json as transformers 4 and 5 write it, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import FAMILIES, ROPE_LLAMA3, edit_config, rewrite_config_as_v4

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.layers.rotary import RopeParameters, inverse_frequencies
from caesura.scheduler.models.config import (
    ModelConfig,
    config_difference,
    load_model_config,
    parse_model_config,
)

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


EXPERTS = {
    **MINIMAL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LLAMA3 = RopeParameters(**{"theta" if k == "rope_theta" else k: v for k, v in ROPE_LLAMA3.items()})


def save(path: Path, family: str, **fields: Any) -> Any:
    config_class, model_class, defaults = FAMILIES[family]
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    config = config_class(**{**defaults, **shape, **fields})
    config.architectures = [model_class.__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    return config


SLIDING = {"sliding_window": 128}
SLIDES = {**SLIDING, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], **SLIDING}, (128,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], **SLIDES, "max_window_layers": 3}, (None, None, None, 128)),
        ({"architectures": ["Qwen3ForCausalLM"], **SLIDES}, (None,) * 4),
        ({"architectures": ["Qwen3ForCausalLM"], **SLIDES, "max_window_layers": 1}, (None, 128, 128, 128)),
        ({"architectures": ["Qwen2ForCausalLM"], **SLIDING, "max_window_layers": 0}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                **SLIDES,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (128, None) * 2,
        ),
        ({"architectures": ["GptOssForCausalLM"], **SLIDING}, (128, None) * 2),
        (
            {"architectures": ["Gemma3ForCausalLM"], **SLIDING, "sliding_window_pattern": 3},
            (128, 128, None, 128),
        ),
        ({"architectures": ["LlamaForCausalLM"], **SLIDING}, (None,) * 4),
    ],
)
def test_windows_are_where_transformers_has_them(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse_model_config({**MINIMAL, "num_hidden_layers": 4, **changes}).windows == windows


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("sliding_window", {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"}),
        (
            "layer_types",
            {"architectures": ["MistralForCausalLM"], **SLIDING, "layer_types": ["full_attention"]},
        ),
        ("max_window_layers", {"architectures": ["Qwen2ForCausalLM"], **SLIDES, "max_window_layers": -1}),
    ],
)
def test_windows_that_mean_nothing_are_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CaesuraError, match=field) as caught:
        parse_model_config({**MINIMAL, **changes})
    assert caught.value.code == ErrorCode.CHECKPOINT_ERROR


@pytest.mark.parametrize("v4", [False, True])
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("deepseek")])
def test_fields_are_those_of_transformers(family: str, v4: bool, tmp_path: Path) -> None:
    theirs = save(
        tmp_path,
        family,
        num_key_value_heads=2,
        rms_norm_eps=3e-6,
        tie_word_embeddings=True,
        eos_token_id=[5, 7],
    )
    if v4:
        rewrite_config_as_v4(tmp_path)
    ours = load_model_config(tmp_path)
    assert ours.architecture == FAMILIES[family][1].__name__
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (theirs.num_hidden_layers, 4, 2)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.tie_word_embeddings is True
    assert ours.eos_token_ids == (5, 7)
    assert ours.dtype == torch.bfloat16
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
    assert ours.windows == tuple(
        window if sliding else None for sliding in slides or [False] * ours.num_layers
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_mean_the_same(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    v5 = load_model_config(tmp_path)
    rewrite_config_as_v4(tmp_path)
    assert load_model_config(tmp_path) == v5


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies(head_dim: int) -> None:
    rope = dict(ROPE_LLAMA3, original_max_position_embeddings=1024)
    theirs = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    ours = inverse_frequencies(replace(LLAMA3, original_max_position_embeddings=1024), head_dim)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "head_dim"),
    [
        ("LlamaForCausalLM", 32, 128),
        ("MistralForCausalLM", 8, 128),
        ("Qwen2ForCausalLM", 32, 128),
        ("Qwen3ForCausalLM", 32, 128),
    ],
)
def test_defaults_are_those_of_the_family(architecture: str, kv_heads: int, head_dim: int) -> None:
    named = {**MINIMAL, "architectures": [architecture], "num_attention_heads": 32, "hidden_size": 4096}
    null = parse_model_config({**named, "num_key_value_heads": None, "head_dim": None})
    assert (null.num_kv_heads, null.head_dim) == (32, 128)
    config = parse_model_config(
        {name: value for name, value in named.items() if name != "num_key_value_heads"}
    )
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert (config.rms_norm_eps, config.rope.theta, config.dtype) == (1e-6, 10_000.0, torch.float32)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, "eos_token_id": 2}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model_config(tmp_path).eos_token_ids == ()


UNSUPPORTED = [
    ({"mlp_bias": True}, ["mlp_bias"]),
    ({"quantization_config": "fp8"}, ["quantization_config"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["rope_parameters"]),
    ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
    ({"hidden_act": "gelu"}, ["hidden_act"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling"]),
    ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
    ({"rope_scaling": "linear"}, ["rope_scaling"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
    ({"layer_types": [["full_attention"], {}]}, ["layer_types"]),
    ({"dtype": "float8_e4m3fn"}, ["dtype"]),
    ({"torch_dtype": "int8"}, ["torch_dtype"]),
    ({"architectures": ["MistralForCausalLM"], "layer_types": ["chunked_attention"] * 2}, ["layer_types"]),
    ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0}, ["swiglu_limit"]),
    ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"}, ["hidden_activation"]),
    (
        {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
        ["use_bidirectional_attention"],
    ),
    ({**EXPERTS, "hidden_act": "gelu"}, ["hidden_act"]),
    ({"architectures": ["Gemma2ForCausalLM"]}, ["architectures"]),
    ({"architectures": []}, ["architectures"]),
    ({"architectures": None}, ["architectures"]),
    ({"mlp_bias": True, "hidden_act": "relu"}, ["mlp_bias", "hidden_act"]),
]


@pytest.mark.parametrize(("changes", "fields"), UNSUPPORTED)
def test_unsupported_config_fields_are_refused_by_name(changes: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(CaesuraError) as caught:
        parse_model_config({**MINIMAL, **changes})
    assert caught.value.code == ErrorCode.UNSUPPORTED_MODEL
    assert caught.value.detail["fields"] == fields
    assert all(field.removesuffix("s") in caught.value.message for field in fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_bias": False, "quantization_config": None, "partial_rotary_factor": 1.0, "rope_scaling": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": ""},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, **SLIDING},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "max_window_layers": 2,
            **SLIDING,
        },
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(changes: dict[str, Any]) -> None:
    parse_model_config({**MINIMAL, **changes})


def test_absent_expert_fields_of_glm_are_its_own_and_null_is_deepseeks() -> None:
    glm = {**MINIMAL, "architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": True, "head_dim": 16}
    absent = parse_model_config(glm).moe
    null = parse_model_config({**glm, "n_routed_experts": None, "routed_scaling_factor": None}).moe
    assert absent is not None
    assert null is not None
    assert (absent.num_experts, absent.num_groups, absent.routed_scale) == (128, 1, 1.0)
    assert (null.num_experts, null.num_groups, null.routed_scale) == (256, 1, 2.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "40"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"hidden_size": 2**31}, "hidden_size"),
        ({"head_dim": 10**400}, "head_dim"),
        ({"num_hidden_layers": 2**64}, "num_hidden_layers"),
        ({"architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({**EXPERTS, "num_experts_per_tok": 6}, "num_experts_per_tok"),
        ({**EXPERTS, "num_local_experts": 0}, "num_local_experts"),
        ({**EXPERTS, "num_experts": 6}, "num_experts"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**EXPERTS, "mlp_only_layers": [True]}, "mlp_only_layers"),
        ({**EXPERTS, "mlp_only_layers": "0"}, "mlp_only_layers"),
        ({**EXPERTS, "moe_intermediate_size": 2.5}, "moe_intermediate_size"),
    ],
)
def test_invalid_values_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CaesuraError, match=field) as caught:
        parse_model_config({**MINIMAL, **changes}, source="here/config.json")
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


def config_with(**changes: Any) -> ModelConfig:
    return parse_model_config({**MINIMAL, **changes})


def test_difference_names_what_the_forward_reads() -> None:
    base = config_with()
    assert config_difference(base, config_with()) == []
    other = config_with(rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True)
    assert config_difference(base, other) == ["rms_norm_eps", "rope", "tie_word_embeddings"]
    assert (
        config_difference(base, config_with(eos_token_id=3, dtype="bfloat16", max_position_embeddings=99))
        == []
    )


def test_edited_field_is_seen(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    before = load_model_config(tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    edit_config(tmp_path, layer_types=None)
    assert config_difference(before, load_model_config(tmp_path)) == ["num_layers", "windows"]
