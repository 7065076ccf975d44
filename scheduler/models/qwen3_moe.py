"""Qwen3 with experts (Yang et al., 2025, arXiv:2505.09388)."""

from ..layers.experts import Experts
from ..layers.mlp import GatedMLP
from ..layers.moe import MoeBlock, RoutedExperts, TopKRouter
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import parse_qwen3_moe
from .decoder import DecoderForCausalLM, FeedForward, attention_shape, dense_attention
from .family import Family

FAMILIES = {"Qwen3MoeForCausalLM": Family(num_kv_heads=4, window="switched", moe=parse_qwen3_moe)}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3's attention; layers of experts, and dense ones where the config says so."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        moe = config.moe
        assert moe is not None, "an architecture with experts has a config of them"
        shape = attention_shape(
            config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True
        )
        routing = RoutedExperts(config.num_layers, moe.top_k, moe.num_experts, place=place)
        hidden = config.hidden_size

        def block(layer: int) -> FeedForward:
            name, prefix = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
            if not moe.sparse_layers[layer]:
                return GatedMLP(name, prefix, hidden, config.intermediate_size, place=place)
            router = TopKRouter(
                f"{name}.gate",
                f"{prefix}.gate",
                hidden,
                moe.num_experts,
                moe.top_k,
                normalize=moe.normalize,
                place=place,
            )
            experts = Experts(
                f"{name}.experts",
                f"{prefix}.experts",
                moe.num_experts,
                hidden,
                moe.intermediate_size,
                place=place,
            )
            return MoeBlock(layer, router, experts, routing, place=place)

        attention = dense_attention(config, shape, place)
        mlp = [block(layer) for layer in range(config.num_layers)]
        super().__init__(config, attention, mlp, place=place, routing=routing)
