"""Expert fields of a config.

Invariants:
- One value describes the routing of every architecture with experts; features that one lacks are neutral.
- Two equal values mean the same routing over equal router logits.
"""

from dataclasses import dataclass
from typing import Any, Literal

from .config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    """Weights of the chosen experts are divided by their sum."""
    sparse_layers: tuple[bool, ...]
    """True for each layer with experts; others are dense."""
    shared_size: int = 0
    """Width of the shared experts; 0 without them."""
    shared_gate: bool = False
    """A sigmoid of the token's own weights the shared experts' result."""
    grouped: bool = False
    """Routing by groups, in float32; the fields below are about that."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """Score of a group: the best in it, or the sum of its two best."""
    routed_scale: float = 1.0
    score_bias: bool = False
    """A learnt bias is added to scores for the choice, and not for the weights."""


def parse_qwen3_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    experts, top_k = _experts(config, reader, 128, 8)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size", 768),
        normalize=bool(config.get("norm_topk_prob") or False),
        sparse_layers=_qwen_layers(config, reader, num_layers),
    )


def parse_qwen2_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    experts, top_k = _experts(config, reader, 60, 4)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size", 1408),
        normalize=bool(config.get("norm_topk_prob") or False),
        sparse_layers=_qwen_layers(config, reader, num_layers),
        shared_size=reader.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def parse_qwen3_next(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    experts, top_k = _experts(config, reader, 512, 10)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size", 512),
        normalize=bool(config.get("norm_topk_prob", True)),
        sparse_layers=_qwen_layers(config, reader, num_layers),
        shared_size=reader.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def parse_qwen3_5_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    experts, top_k = _experts(config, reader, 256, 8)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size", 512),
        normalize=True,
        sparse_layers=(True,) * num_layers,
        shared_size=reader.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def parse_mixtral(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    return _all_layers(config, reader, num_layers, 8, 2)


def parse_gpt_oss(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Parse gpt-oss: a softmax over the chosen logits is one over all, divided by the chosen ones' sum."""
    return _all_layers(config, reader, num_layers, 128, 4)


def _all_layers(
    config: dict[str, Any], reader: ConfigReader, num_layers: int, num_experts: int, most: int
) -> MoeConfig:
    experts, top_k = _experts(config, reader, num_experts, most)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("intermediate_size"),
        normalize=True,
        sparse_layers=(True,) * num_layers,
    )


def _experts(config: dict[str, Any], reader: ConfigReader, absent: int, top_absent: int) -> tuple[int, int]:
    experts, top_k = _num_experts(config, reader, absent), reader.count("num_experts_per_tok", top_absent)
    if top_k > experts:
        raise reader.invalid("num_experts_per_tok", f"= {top_k} of {experts} experts")
    return experts, top_k


def _qwen_layers(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step = reader.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.invalid("mlp_only_layers", f"= {dense!r} is not a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _num_experts(config: dict[str, Any], reader: ConfigReader, absent: int) -> int:
    counts = {
        name: reader.count(name)
        for name in ("num_experts", "num_local_experts")
        if config.get(name) is not None
    }
    if len(set(counts.values())) > 1:
        raise reader.invalid("num_experts", f"contradicts itself: {counts}")
    return next(iter(counts.values()), absent)
