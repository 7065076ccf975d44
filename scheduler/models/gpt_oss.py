"""gpt-oss (OpenAI, 2025, arXiv:2508.10925), its experts in MXFP4 or a wider float, stored as the latter."""

from ..layers.experts import ExpertNames
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames
from .family import Family

FAMILIES = {
    "GptOssForCausalLM": Family(
        num_kv_heads=8,
        head_dim=64,
        bias_field=("attention_bias", True),
        window="always",
        full_every=2,
        theta=150_000.0,
        moe=MoeFields(count=128, top_k=4),  # softmax of the chosen is that over all, divided by their sum
        mxfp4=True,
        only={"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)},
    )
}


class GptOssForCausalLM(DecoderForCausalLM):
    """Sinks in every layer, a window in every second; experts of clamped gates, with biases."""

    o_bias = True
    sinks = True
    bend = "clamped"
    names = SparseNames(router="router", experts=ExpertNames(stacked=True))
    expert_bias = True
