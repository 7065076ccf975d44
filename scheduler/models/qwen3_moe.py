"""Qwen3 with experts (Yang et al., 2025, arXiv:2505.09388)."""

from .config_moe import MoeFields
from .decoder import DecoderForCausalLM
from .family import Family

_MOE = MoeFields(count=128, top_k=8, width=768, normalize=False, stepped=True)
FAMILIES = {"Qwen3MoeForCausalLM": Family(num_kv_heads=4, window="switched", moe=_MOE)}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3's attention; layers of experts, and dense ones if the config says so."""

    o_bias = True
    qk_norm = True
