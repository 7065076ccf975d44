"""Mistral (Jiang et al., 2023, arXiv:2310.06825)."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape, dense_attention, dense_mlp
from .family import Family

FAMILIES = {"MistralForCausalLM": Family(num_kv_heads=8, attention_bias=False, window="always")}


class MistralForCausalLM(DecoderForCausalLM):
    """The plain skeleton: no biases, no head norms."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        shape = attention_shape(config)
        attention = dense_attention(config, shape, place)
        super().__init__(config, attention, dense_mlp(config, place), place=place)
