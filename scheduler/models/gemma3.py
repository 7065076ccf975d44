"""Gemma 3, text only (Gemma Team, 2025, arXiv:2503.19786)."""

from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {
    "Gemma3ForCausalLM": Family(
        absent={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        num_kv_heads=4,
        head_dim=256,
        window="always",
        full_every=6,
        theta=1e6,
        local_theta=1e4,
        query_scalar=256,
        activation=("hidden_activation", ("gelu_pytorch_tanh",)),
        tied=True,
        only={"use_bidirectional_attention": (False, None, "", [], {})},
    )
}


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Windows, with a base of their own, in most layers; norms on both sides of a block."""

    o_bias = True
    qk_norm = True
    norm_from_one = True
    norms_behind = True
    scales_embeddings = True
    bend = "gelu_tanh"
