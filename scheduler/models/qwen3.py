"""Qwen3 (Yang et al., 2025, arXiv:2505.09388)."""

from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {"Qwen3ForCausalLM": Family(num_kv_heads=32, head_dim=128, window="upper_layers")}


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Queries and keys are RMS-normalised per head before they are rotated."""

    o_bias = True
    qk_norm = True
