"""Qwen3-Next and Qwen3.5, text only (Qwen Team, 2025): mostly linear attention, some layers of gated full."""

from ..layers.parameters import Placement
from .config import ModelConfig
from .config_delta import parse_delta
from .config_moe import parse_qwen3_5_moe, parse_qwen3_next
from .decoder import AttentionBlock, attention_shape, dense_mlp
from .family import Family
from .hybrid import HybridForCausalLM, hybrid_attention
from .sparse import SparseNames, sparse_mlp

FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        num_kv_heads=2, head_dim=256, partial_rotary=0.25, delta=parse_delta, moe=parse_qwen3_next
    ),
    "Qwen3_5ForCausalLM": Family(num_kv_heads=4, head_dim=256, partial_rotary=0.25, delta=parse_delta),
    "Qwen3_5MoeForCausalLM": Family(
        num_kv_heads=2, head_dim=256, partial_rotary=0.25, delta=parse_delta, moe=parse_qwen3_5_moe
    ),
}

_EXPERTS = SparseNames(shared="shared_expert")


def _attention(config: ModelConfig, place: Placement, *, by_key_head: bool) -> list[AttentionBlock]:
    bias = config.attention_bias
    shape = attention_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_from_one=True, gated=True)
    return hybrid_attention(config, shape, place, by_key_head=by_key_head)


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen2-MoE's experts; projections of linear attention lie together per key head."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=_EXPERTS)
        attention = _attention(config, place, by_key_head=True)
        super().__init__(config, attention, mlp, place=place, routing=routing)


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801  the architecture's name
    """Dense; projections of linear attention are modules of their own."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        attention = _attention(config, place, by_key_head=False)
        super().__init__(config, attention, dense_mlp(config, place), place=place)


class Qwen3_5MoeForCausalLM(HybridForCausalLM):  # noqa: N801  the architecture's name
    """Qwen3.5's attention, Qwen3-Next's experts in every layer."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=_EXPERTS)
        attention = _attention(config, place, by_key_head=False)
        super().__init__(config, attention, mlp, place=place, routing=routing)
