"""Qwen3-Next and Qwen3.5, text only (Qwen Team, 2025): mostly linear attention, some layers of gated full."""

from dataclasses import replace
from typing import ClassVar

from ..layers.attention import Attention
from ..layers.gated_delta import DeltaShape, GatedDelta
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import AttentionBlock, DecoderForCausalLM, SparseNames
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

    o_bias = True
    qk_norm = True
    norm_from_one = True
    names = SparseNames(shared="shared_expert")
    by_key_head: ClassVar = True

    def attention_blocks(self, config: ModelConfig, place: Placement) -> list[AttentionBlock]:
        """Return the block of every layer; those with KV and those with a state are counted apart."""
        shape = self.attention_shape(config, gated=True)
        assert config.delta is not None
        delta = DeltaShape(
            hidden_size=config.hidden_size,
            state=config.delta.state,
            eps=config.rms_norm_eps,
            by_key_head=self.by_key_head,
        )
        blocks: list[AttentionBlock] = []
        counts = {True: 0, False: 0}
        for layer, linear in enumerate(config.delta.layers):
            name, module, number = f"layers.{layer}.attention", f"model.layers.{layer}", counts[linear]
            counts[linear] += 1
            if linear:
                blocks.append(GatedDelta(name, f"{module}.linear_attn", number, delta, place=place))
            else:
                blocks.append(Attention(name, f"{module}.self_attn", number, shape, place=place))
        return blocks

    def is_skipped(self, name: str) -> bool:
        return name.startswith("mtp.") or super().is_skipped(name)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801  the architecture's name
    """Dense; projections of linear attention are modules of their own."""

    by_key_head: ClassVar = False


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801  the architecture's name
    """Qwen3.5's attention, Qwen3-Next's experts in every layer."""
