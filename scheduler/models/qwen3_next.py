"""Qwen3-Next and Qwen3.5, text only (Qwen Team, 2025): mostly linear attention, some layers of gated full."""

from dataclasses import replace
from typing import ClassVar

from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames, Variants, hybrid_attention, sparse_mlp
from .family import Family

_HYBRID = Family(num_kv_heads=2, head_dim=256, partial_rotary=0.25, delta=True)
_MOE = MoeFields(count=512, top_k=10, width=512, normalize=True, stepped=True, shared=512)
FAMILIES = {
    "Qwen3NextForCausalLM": replace(_HYBRID, moe=_MOE),
    "Qwen3_5ForCausalLM": replace(_HYBRID, num_kv_heads=4),
    "Qwen3_5MoeForCausalLM": replace(_HYBRID, moe=MoeFields(count=256, top_k=8, width=512, shared=512)),
}


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen2-MoE's experts; projections of linear attention lie together per key head.

    Factors of all norms are ``1 + weight``; the head of multi-token prediction is ignored.
    """

    by_key_head: ClassVar = True

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=SparseNames(shared="shared_expert"))
        attention = hybrid_attention(config, place, by_key_head=self.by_key_head)
        variants = Variants(norm_from_one=True)
        super().__init__(config, attention, mlp, place=place, routing=routing, variants=variants)

    def is_skipped(self, name: str) -> bool:
        return name.startswith("mtp.") or super().is_skipped(name)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801  the architecture's name
    """Dense; projections of linear attention are modules of their own."""

    by_key_head: ClassVar = False


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801  the architecture's name
    """Qwen3.5's attention, Qwen3-Next's experts in every layer."""
