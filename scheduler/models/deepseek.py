"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024, arXiv:2405.04434 and arXiv:2412.19437).

They differ in how experts are chosen and in the order of rotated pairs, which their configs say.
"""

import re

from ..layers.experts import Experts
from ..layers.grouped_router import GroupedRouter
from ..layers.mla import LatentAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import MoeBlock, RoutedExperts
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_mla import parse_deepseek_v2_moe, parse_deepseek_v3_moe, refused_by_v2, refused_by_v3
from .config_moe import MoeConfig
from .decoder import DecoderForCausalLM, FeedForward
from .family import Family

FAMILIES = {
    "DeepseekV2ForCausalLM": Family(latent=True, moe=parse_deepseek_v2_moe, refused=refused_by_v2),
    "DeepseekV3ForCausalLM": Family(latent=True, moe=parse_deepseek_v3_moe, refused=refused_by_v3),
}

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekForCausalLM(DecoderForCausalLM):
    """Latent attention; dense layers first, then layers of routed and shared experts."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mla, moe = config.mla, config.moe
        assert mla is not None, "DeepSeek has latent attention"
        assert moe is not None, "DeepSeek has experts"
        attention = [
            LatentAttention(
                f"layers.{layer}.attention",
                f"model.layers.{layer}.self_attn",
                layer,
                mla,
                hidden_size=config.hidden_size,
                num_heads=config.num_heads,
                bias=config.attention_bias,
                place=place,
            )
            for layer in range(config.num_layers)
        ]
        routing = RoutedExperts(config.num_layers, moe.top_k, moe.num_experts, place=place)
        mlp = [_feed_forward(layer, config, moe, routing, place) for layer in range(config.num_layers)]
        super().__init__(config, attention, mlp, place=place, routing=routing)

    def is_skipped(self, name: str) -> bool:
        """The layers of multi-token prediction as well, which lie behind the others."""
        match, layers = _LAYER.match(name), self.config.num_layers
        if match is not None and layers <= int(match[1]) < layers + self.config.num_mtp_layers:
            return True
        return super().is_skipped(name)


def _feed_forward(
    layer: int, config: ModelConfig, moe: MoeConfig, routing: RoutedExperts, place: Placement
) -> FeedForward:
    name, prefix, hidden = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp", config.hidden_size
    if not moe.sparse_layers[layer]:
        return GatedMLP(name, prefix, hidden, config.intermediate_size, place=place)
    router = GroupedRouter(
        f"{name}.gate",
        f"{prefix}.gate",
        hidden,
        moe.num_experts,
        moe.top_k,
        scoring=moe.scoring,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        group_score=moe.group_score,
        normalize=moe.normalize,
        scale=moe.routed_scale,
        bias=moe.score_bias,
        place=place,
    )
    width = moe.intermediate_size
    experts = Experts(f"{name}.experts", f"{prefix}.experts", moe.num_experts, hidden, width, place=place)
    shared: GatedMLP | None = None
    if moe.num_shared:
        shared = GatedMLP(
            f"{name}.shared",
            f"{prefix}.shared_experts",
            hidden,
            moe.num_shared * width,
            place=place,
            partial=True,
        )
    return MoeBlock(layer, router, experts, routing, shared=shared, place=place)


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V2 and V2-Lite."""


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V3 and R1."""
