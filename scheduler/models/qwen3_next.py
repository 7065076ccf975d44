"""Qwen3-Next and Qwen3.5, text only (Qwen Team, 2025): linear attention in most layers, gated full attention in the others."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .config_delta import parse_delta
from .config_moe import parse_qwen3_next
from .decoder import attention_shape, dense_mlp
from .family import Family
from .hybrid import HybridForCausalLM, hybrid_attention
from .sparse import SparseNames, sparse_mlp

FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        num_kv_heads=2, head_dim=256, partial_rotary=0.25, delta=parse_delta, moe=parse_qwen3_next
    ),
    "Qwen3_5ForCausalLM": Family(num_kv_heads=4, head_dim=256, partial_rotary=0.25, delta=parse_delta),
}


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen2-MoE's experts; projections of linear attention lie together per key head."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        bias = config.attention_bias
        shape = attention_shape(
            config, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_from_one=True, gated=True
        )
        mlp, routing = sparse_mlp(config, place, names=SparseNames(shared="shared_expert"))
        attention = hybrid_attention(config, shape, place, by_key_head=True)
        super().__init__(config, attention, mlp, place=place, routing=routing)


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801  the architecture's name
    """Dense; projections of linear attention are modules of their own."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        bias = config.attention_bias
        shape = attention_shape(
            config, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_from_one=True, gated=True
        )
        attention = hybrid_attention(config, shape, place, by_key_head=False)
        super().__init__(config, attention, dense_mlp(config, place), place=place)
