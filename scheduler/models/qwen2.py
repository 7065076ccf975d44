"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv:2407.10671)."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape, dense_attention, dense_mlp
from .family import Family

FAMILIES = {"Qwen2ForCausalLM": Family(num_kv_heads=32, attention_bias=True, window="upper_layers")}


class Qwen2ForCausalLM(DecoderForCausalLM):
    """A bias on queries, keys and values that the config does not mention, and none on the output."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        shape = attention_shape(config, qkv_bias=True)
        attention = dense_attention(config, shape, place)
        super().__init__(config, attention, dense_mlp(config, place), place=place)
