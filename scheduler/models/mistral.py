"""Mistral (Jiang et al., 2023, arXiv:2310.06825)."""

from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {"MistralForCausalLM": Family(num_kv_heads=8, attention_bias=False, window="always")}


class MistralForCausalLM(DecoderForCausalLM):
    """The plain skeleton: no biases, no head norms."""
