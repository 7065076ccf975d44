"""Qwen3 (Yang et al., 2025, arXiv:2505.09388)."""

import torch

from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are RMS-normalised per head before they are rotated."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = attention_shape(
            config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, qk_norm=True
        )
        super().__init__(config, shape, dtype=dtype, device=device)
