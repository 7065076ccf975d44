"""Qwen3 (Yang et al., 2025, arXiv:2505.09388)."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape, dense_attention, dense_mlp
from .family import Family

FAMILIES = {"Qwen3ForCausalLM": Family(num_kv_heads=32, head_dim=128, window="upper_layers")}


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are RMS-normalised per head before they are rotated."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        bias = config.attention_bias
        shape = attention_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
        attention = dense_attention(config, shape, place)
        super().__init__(config, attention, dense_mlp(config, place), place=place)
