"""Configs with values that nobody means."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.architectures import tiny_config
from support.checkpoints import FAMILIES, HYBRIDS, ROPE_LLAMA3, SIZES

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.layers.rotary import inverse_frequencies
from caesura.scheduler.models.config import ModelConfig, load_model_config, parse_model_config
from caesura.scheduler.models.config_reader import MAX_TOKEN_ID

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
ROPES: tuple[dict[str, Any] | None, ...] = (None, YARN, {**YARN, "attention_factor": 1.2}, ROPE_LLAMA3)
EXTREMES: tuple[Any, ...] = (-1, 0, 2**31, 2**62, 1e308, 1e-308, math.nan, math.inf, "x", None, [], {}, True)
Place = tuple[str, ...]


def config_of(family: str, rope: dict[str, Any] | None) -> dict[str, Any]:
    config_class, model_class, fields = {**FAMILIES, **HYBRIDS}[family]
    config = json.loads(config_class(**{**SIZES, **fields}).to_json_string(use_diff=False))
    parameters = config["rope_parameters"]
    if rope is not None and "full_attention" not in parameters:
        config["rope_parameters"] = {**parameters, **rope}
    return {**config, "architectures": [model_class.__name__]}


def numbers_in(config: dict[str, Any], above: Place = ()) -> Iterator[Place]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from numbers_in(value, (*above, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield *above, name


def with_value(config: dict[str, Any], path: Place, value: object) -> dict[str, Any]:
    name, *below = path
    return {**config, name: with_value(config[name], tuple(below), value) if below else value}


def parsed(config: dict[str, Any]) -> ModelConfig | None:
    try:
        return parse_model_config(config)
    except CaesuraError as error:
        assert "rope" in error.message, error
        return None


CONFIGS = [
    config
    for family in (*FAMILIES, *HYBRIDS)
    for config in (config_of(family, rope) for rope in ROPES)
    if parsed(config) is not None
]
CASES = [(config, path) for config in CONFIGS for path in numbers_in(config)]


def assert_harmless(config: ModelConfig) -> None:
    assert len(config.windows) == config.num_layers <= 2**12
    assert all(window is None or 0 < window < config.max_position_embeddings for window in config.windows)
    assert config.max_position_embeddings <= 2**27 and config.vocab_size <= 2**24
    assert 0 < config.attention_scale < math.inf and 0 < config.rms_norm_eps <= 1
    assert all(0 <= token <= MAX_TOKEN_ID for token in config.eos_token_ids)
    assert 0 < config.rotary_dim <= config.head_dim and config.rotary_dim % 2 == 0
    for rope in {config.rope, config.local_rope or config.rope}:
        assert torch.isfinite(inverse_frequencies(rope, config.rotary_dim)).all(), rope
        assert 0 < rope.attention_factor < math.inf


def assert_served_or_refused(config: dict[str, Any], *changed: str) -> None:
    try:
        read = parse_model_config(config)
    except CaesuraError as error:
        assert error.code in (ErrorCode.CHECKPOINT_ERROR, ErrorCode.UNSUPPORTED_MODEL)
        assert any(name in error.message for name in changed), error
    else:
        assert_harmless(read)


@pytest.mark.parametrize("value", EXTREMES, ids=repr)
def test_an_extreme_value_is_harmless_or_refused_by_name(value: object) -> None:
    for config, path in CASES:
        assert_served_or_refused(with_value(config, path, value), path[-1])


ANYTHING = st.one_of(
    st.sampled_from(EXTREMES),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@given(st.sampled_from(CASES), ANYTHING, st.sampled_from(CASES), ANYTHING)
@example((CONFIGS[0], ("num_hidden_layers",)), 2**31 - 1, (CONFIGS[0], ("vocab_size",)), 2**31 - 1)
@example((CONFIGS[0], ("num_hidden_layers",)), 10**400, (CONFIGS[0], ("eos_token_id",)), [-1])
def test_two_extreme_values_are_harmless_or_refused(
    case: tuple[dict[str, Any], Place], value: object, other: tuple[dict[str, Any], Place], second: object
) -> None:
    (config, path), (_, further) = case, other
    changed = [path[-1]]
    config = with_value(config, path, value)
    if further in numbers_in(config):
        config = with_value(config, further, second)
        changed.append(further[-1])
    assert_served_or_refused(config, *changed)


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_act", "quux"), ("eos_token_id", -1), ("head_dim", -1), ("vocab_size", 2**62),
    ("max_position_embeddings", 10**12), ("num_experts", -1), ("num_experts_per_tok", 2**62),
    ("factor", -1), ("original_max_position_embeddings", 0), ("beta_fast", "x"),
])  # fmt: skip
@pytest.mark.parametrize("architecture", ["OlmoeForCausalLM", "Qwen3ForCausalLM"])
def test_models_by_transformers_refuse_by_name(architecture, field, value, tmp_path) -> None:
    config = json.loads(tiny_config(architecture).to_json_string(use_diff=False))
    changes = {"rope_parameters": {**YARN, field: value}} if field in YARN else {field: value}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **changes}))
    with pytest.raises(CaesuraError, match=field) as caught:
        load_model_config(tmp_path, "transformers")
    assert caught.value.code in (ErrorCode.CHECKPOINT_ERROR, ErrorCode.UNSUPPORTED_MODEL)
