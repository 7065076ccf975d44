"""gpt-oss (OpenAI, 2025, arXiv:2508.10925), its experts in MXFP4 or a wider float, stored as the latter."""

from ..layers.experts import ExpertNames
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames, attention_shape, dense_attention, sparse_mlp
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

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        bias = config.attention_bias
        shape = attention_shape(config, qkv_bias=bias, o_bias=bias, sinks=True)
        names = SparseNames(router="router", experts=ExpertNames(stacked=True))
        mlp, routing = sparse_mlp(config, place, names=names, bias=True, bend="clamped")
        super().__init__(config, dense_attention(config, shape, place), mlp, place=place, routing=routing)
