"""Llama 2 and 3 (Touvron et al., 2023, arXiv:2307.09288; Grattafiori et al., 2024, arXiv:2407.21783)."""

import torch

from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape


class LlamaForCausalLM(DecoderForCausalLM):
    """``attention_bias`` puts a bias on all four projections."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = attention_shape(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        super().__init__(config, shape, dtype=dtype, device=device)
