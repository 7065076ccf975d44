"""Qwen3-Next and Qwen3.5, text only (Qwen Team, 2025): mostly linear attention, some layers of gated full."""

from dataclasses import replace

from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import HybridForCausalLM, SparseNames, dense_mlp, hybrid_attention, sparse_mlp
from .family import Family

_HYBRID = Family(num_kv_heads=2, head_dim=256, partial_rotary=0.25, delta=True)
_MOE = MoeFields(count=512, top_k=10, width=512, normalize=True, stepped=True, shared=512)
FAMILIES = {
    "Qwen3NextForCausalLM": replace(_HYBRID, moe=_MOE),
    "Qwen3_5ForCausalLM": replace(_HYBRID, num_kv_heads=4),
    "Qwen3_5MoeForCausalLM": replace(_HYBRID, moe=MoeFields(count=256, top_k=8, width=512, shared=512)),
}

_EXPERTS = SparseNames(shared="shared_expert")


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen2-MoE's experts; projections of linear attention lie together per key head."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=_EXPERTS)
        attention = hybrid_attention(config, place, by_key_head=True)
        super().__init__(config, attention, mlp, place=place, routing=routing)


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801  the architecture's name
    """Dense; projections of linear attention are modules of their own."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        attention = hybrid_attention(config, place, by_key_head=False)
        super().__init__(config, attention, dense_mlp(config, place), place=place)


class Qwen3_5MoeForCausalLM(HybridForCausalLM):  # noqa: N801  the architecture's name
    """Qwen3.5's attention, Qwen3-Next's experts in every layer."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=_EXPERTS)
        attention = hybrid_attention(config, place, by_key_head=False)
        super().__init__(config, attention, mlp, place=place, routing=routing)
