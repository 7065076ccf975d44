"""DeepSeek fields of a config: latent attention, its rotary embedding, experts.

Invariants:
- Fields on whose meaning implementations disagree are refused, not guessed.
- Absent fields have the defaults of transformers' config classes.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..layers.mla import LatentShape
from ..layers.rotary import RopeParameters
from .config_moe import MoeConfig
from .config_reader import ConfigReader

LATENT_ROPE_TYPES = ("default", "yarn")

_V2: dict[str, tuple[object, ...]] = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False, None),  # implementations differ in whether the scale applies, too
}
_V3: dict[str, tuple[object, ...]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
"""Supported values of fields that could have others; absent means the first."""


@dataclass(frozen=True, kw_only=True)
class MlaConfig(LatentShape):
    softmax_scale: float
    """Factor of the scores, YaRN's included."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


def parse_mla(config: dict[str, Any], reader: ConfigReader, rope: dict[str, Any]) -> MlaConfig:
    nope, rotated = reader.count("qk_nope_head_dim", 128), reader.count("qk_rope_head_dim", 64)
    interleave = config.get("rope_interleave")
    null = "q_lora_rank" in config and config["q_lora_rank"] is None
    return MlaConfig(
        q_lora_rank=None if null else reader.count("q_lora_rank", 1536),
        kv_lora_rank=reader.count("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=reader.count("v_head_dim", 128),
        rope_interleave=True if interleave is None else bool(interleave),
        softmax_scale=(nope + rotated) ** -0.5 * _mscale(rope, reader, "mscale_all_dim") ** 2,
    )


def parse_yarn(
    rope: dict[str, Any], reader: ConfigReader, theta: float, context: int | None
) -> RopeParameters:
    """Parse YaRN with DeepSeek's two factors; ``context`` stands for an original length that is not named."""
    attention_factor = rope.get("attention_factor")
    if attention_factor is not None:
        attention_factor = reader.positive(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = _mscale(rope, reader, "mscale") / _mscale(rope, reader, "mscale_all_dim")
    else:
        attention_factor = 0.1 * math.log(max(reader.positive(rope, "factor"), 1.0)) + 1.0
    return RopeParameters(
        theta=theta,
        rope_type="yarn",
        factor=reader.positive(rope, "factor"),
        original_max_position_embeddings=reader.integer(
            rope.get("original_max_position_embeddings"), "original_max_position_embeddings", context
        ),
        beta_fast=reader.positive(rope, "beta_fast", 32.0),
        beta_slow=reader.positive(rope, "beta_slow", 1.0),
        truncate=rope.get("truncate") is not False,
        attention_factor=attention_factor,
    )


def _mscale(rope: dict[str, Any], reader: ConfigReader, name: str) -> float:
    """Return the magnitude for a context ``factor`` times as long; 1 without YaRN, or without ``name``."""
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return 1.0
    mscale = reader.positive(rope, name) if rope.get(name) else 0.0
    return 0.1 * mscale * math.log(max(reader.positive(rope, "factor"), 1.0)) + 1.0


def parse_deepseek_v2_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Parse softmax scores; groups by their best expert, if the config asks for groups."""
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
    width = reader.count("moe_intermediate_size", 1407)
    moe = MoeConfig(
        num_experts=reader.count("n_routed_experts", 64),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=width,
        normalize=False,
        sparse_layers=_sparse_layers(config, reader, num_layers, 0),
        shared_size=reader.count_or_zero("n_shared_experts", 2) * width,
        grouped=True,
        num_groups=reader.count("n_group") if grouped else 1,
        top_groups=reader.count("topk_group") if grouped else 1,
        routed_scale=reader.positive(config, "routed_scaling_factor", 1.0),
    )
    return _checked(moe, reader)


def parse_deepseek_v3_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Parse sigmoid scores; a bias decides the choice; groups by the sum of their two best."""
    normalize, width = config.get("norm_topk_prob"), reader.count("moe_intermediate_size", 2048)
    moe = MoeConfig(
        num_experts=reader.count("n_routed_experts", 256),
        top_k=reader.count("num_experts_per_tok", 8),
        intermediate_size=width,
        normalize=True if normalize is None else bool(normalize),
        sparse_layers=_sparse_layers(config, reader, num_layers, 3),
        shared_size=reader.count_or_zero("n_shared_experts", 1) * width,
        grouped=True,
        scoring="sigmoid",
        num_groups=reader.count("n_group", 8),
        top_groups=reader.count("topk_group", 4),
        group_score="top2",
        routed_scale=reader.positive(config, "routed_scaling_factor", 2.5),
        score_bias=True,
    )
    return _checked(moe, reader)


def parse_glm4_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    defaults = {
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    }
    return parse_deepseek_v3_moe({**defaults, **config}, reader.with_defaults(defaults), num_layers)


def parse_num_mtp_layers(config: dict[str, Any], reader: ConfigReader) -> int:
    return reader.count_or_zero("num_nextn_predict_layers", 0)


def refused_by_v2(config: dict[str, Any]) -> list[str]:
    return _refused(config, _V2)


def refused_by_v3(config: dict[str, Any]) -> list[str]:
    return _refused(config, _V3)


def _refused(config: dict[str, Any], done: dict[str, tuple[object, ...]]) -> list[str]:
    found = [name for name, values in done.items() if config.get(name, values[0]) not in values]
    if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
        found += ["num_attention_heads", "num_key_value_heads"]
    if config.get("attention_bias") and config.get("q_lora_rank", 0) is None:
        found.append("attention_bias")
    return found


def _sparse_layers(
    config: dict[str, Any], reader: ConfigReader, num_layers: int, first: int
) -> tuple[bool, ...]:
    first = reader.count_or_zero("first_k_dense_replace", first)
    step = reader.count("moe_layer_freq", 1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


def _checked(moe: MoeConfig, reader: ConfigReader) -> MoeConfig:
    in_group = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or (moe.group_score == "top2" and in_group < 2):
        raise reader.invalid("n_group", f"= {moe.num_groups} for n_routed_experts = {moe.num_experts}")
    if moe.top_groups > moe.num_groups:
        raise reader.invalid("topk_group", f"= {moe.top_groups} of {moe.num_groups} groups")
    if moe.top_k > moe.top_groups * in_group:
        reachable = moe.top_groups * in_group
        raise reader.invalid("num_experts_per_tok", f"= {moe.top_k} of {reachable} experts in chosen groups")
    return moe
