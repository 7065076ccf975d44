"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024, arXiv:2405.04434 and arXiv:2412.19437).

They differ in the choice of experts and in the order of rotated pairs, which their configs say.
"""

from dataclasses import replace

from ..layers.mla import LatentAttention
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import DEEPSEEK_V3, MoeFields
from .decoder import DecoderForCausalLM
from .family import Family

_V2 = Family(
    latent=True,
    mtp_layers=True,
    moe=MoeFields(count=64, top_k=None, width=1407, normalize=False, shared=2, scoring="softmax"),
    only={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),  # implementations differ in whether the scale applies, too
    },
)
_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
FAMILIES = {"DeepseekV2ForCausalLM": _V2, "DeepseekV3ForCausalLM": replace(_V2, moe=DEEPSEEK_V3, only=_V3)}


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """Latent attention; dense layers first, then layers of routed and shared experts."""

    def attention_blocks(self, config: ModelConfig, place: Placement) -> list[LatentAttention]:
        mla, hidden, heads, bias = config.mla, config.hidden_size, config.num_heads, config.attention_bias
        assert mla is not None, "DeepSeek has latent attention"
        names = [
            (f"layers.{i}.attention", f"model.layers.{i}.self_attn", i) for i in range(config.num_layers)
        ]
        return [
            LatentAttention(*each, mla, hidden_size=hidden, num_heads=heads, bias=bias, place=place)
            for each in names
        ]


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and R1."""
