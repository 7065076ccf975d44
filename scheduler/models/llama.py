"""Llama 2 and 3 (Touvron et al., 2023, arXiv:2307.09288; Grattafiori et al., 2024, arXiv:2407.21783)."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape, dense_attention, dense_mlp
from .family import Family

FAMILIES = {"LlamaForCausalLM": Family()}


class LlamaForCausalLM(DecoderForCausalLM):
    """``attention_bias`` puts a bias on all four projections."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        shape = attention_shape(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        attention = dense_attention(config, shape, place)
        super().__init__(config, attention, dense_mlp(config, place), place=place)
