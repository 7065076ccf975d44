"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv:2407.10671)."""

import torch

from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape


class Qwen2ForCausalLM(DecoderForCausalLM):
    """A bias on queries, keys and values that the config does not mention, and none on the output."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = attention_shape(config, qkv_bias=True)
        super().__init__(config, shape, dtype=dtype, device=device)
