"""Qwen2 and Qwen2.5 (Yang et al., 2024, arXiv:2407.10671)."""

from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {"Qwen2ForCausalLM": Family(num_kv_heads=32, attention_bias=True, window="upper_layers")}


class Qwen2ForCausalLM(DecoderForCausalLM):
    """A bias on queries, keys and values that the config does not mention, and none on the output."""
