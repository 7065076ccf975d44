"""What the forward pass reads of a config about experts.

Invariants:
- One value describes the routing of every architecture with experts; what an architecture does not have is neutral here.
- Two equal values mean the same routing over equal router logits.
"""

from dataclasses import dataclass
from typing import Any, Literal

from .config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The experts of a model, and how a token's are chosen."""

    num_experts: int
    """Routed ones of a layer."""
    top_k: int
    """Of these, computed for a token."""
    intermediate_size: int
    """Of one expert."""
    normalize: bool
    """Whether the weights of the chosen are divided by their sum."""
    sparse_layers: tuple[bool, ...]
    """Per layer: whether it has experts; others are dense."""
    num_shared: int = 0
    """Experts that every token goes through, as one block of this many times the width."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    num_groups: int = 1
    """Groups of neighbouring experts, of equal size."""
    top_groups: int = 1
    """Of these, the ones from which experts are chosen."""
    group_score: Literal["max", "top2"] = "max"
    """What a group is chosen by: the best score in it, or the sum of its two best."""
    routed_scale: float = 1.0
    """Factor on the weights of the chosen."""
    score_bias: bool = False
    """Whether a learnt bias is added to scores for the choice, and not for the weights."""


def parse_qwen3_moe(config: dict[str, Any], reader: ConfigReader, num_layers: int) -> MoeConfig:
    """Of a ``Qwen3MoeForCausalLM``; absent fields are what transformers' config class takes them for."""
    experts, top_k = _num_experts(config, reader), reader.count("num_experts_per_tok", 8)
    if top_k > experts:
        raise reader.invalid("num_experts_per_tok", f"= {top_k} of {experts} experts")
    step = reader.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.invalid("mlp_only_layers", f"= {dense!r} is not a list of layers")
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size", 768),
        normalize=bool(config.get("norm_topk_prob") or False),
        sparse_layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
    )


def _num_experts(config: dict[str, Any], reader: ConfigReader) -> int:
    """transformers 4 writes ``num_experts``, transformers 5 ``num_local_experts``."""
    counts = {
        name: reader.count(name)
        for name in ("num_experts", "num_local_experts")
        if config.get(name) is not None
    }
    if len(set(counts.values())) > 1:
        raise reader.invalid("num_experts", f"contradicts itself: {counts}")
    return next(iter(counts.values()), 128)
