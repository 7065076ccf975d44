"""Qwen3 with experts (Yang et al., 2025, arXiv:2505.09388)."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, attention_shape, dense_attention, sparse_mlp
from .family import Family

_MOE = MoeFields(count=128, top_k=8, width=768, normalize=False, stepped=True)
FAMILIES = {"Qwen3MoeForCausalLM": Family(num_kv_heads=4, window="switched", moe=_MOE)}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3's attention; layers of experts, and dense ones if the config says so."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        bias = config.attention_bias
        shape = attention_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
        mlp, routing = sparse_mlp(config, place)
        super().__init__(config, dense_attention(config, shape, place), mlp, place=place, routing=routing)
