"""Llama 2 and 3 (Touvron et al., 2023, arXiv:2307.09288; Grattafiori et al., 2024, arXiv:2407.21783)."""

from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {"LlamaForCausalLM": Family()}


class LlamaForCausalLM(DecoderForCausalLM):
    """``attention_bias`` puts a bias on all four projections."""

    o_bias = True
