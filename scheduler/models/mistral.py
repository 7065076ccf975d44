"""Mistral (Jiang et al., 2023, arXiv:2310.06825), without its sliding window."""

import torch

from .config import ModelConfig
from .decoder import DecoderForCausalLM, attention_shape


class MistralForCausalLM(DecoderForCausalLM):
    """The plain skeleton: no biases, no head norms."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = attention_shape(config)
        super().__init__(config, shape, dtype=dtype, device=device)
