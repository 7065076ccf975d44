"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024, arXiv:2405.04434 and arXiv:2412.19437).

They differ in the choice of experts and in the order of rotated pairs, which their configs say.
"""

from ..layers.mla import LatentAttention
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_mla import parse_deepseek_v2_moe, parse_deepseek_v3_moe, refused_by_v2, refused_by_v3
from .decoder import DecoderForCausalLM
from .family import Family
from .sparse import sparse_mlp

FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        latent=True, mtp_layers=True, moe=parse_deepseek_v2_moe, refused=refused_by_v2
    ),
    "DeepseekV3ForCausalLM": Family(
        latent=True, mtp_layers=True, moe=parse_deepseek_v3_moe, refused=refused_by_v3
    ),
}


class DeepseekForCausalLM(DecoderForCausalLM):
    """Latent attention; dense layers first, then layers of routed and shared experts."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mla = config.mla
        assert mla is not None, "DeepSeek has latent attention"
        attention = [
            LatentAttention(
                f"layers.{layer}.attention",
                f"model.layers.{layer}.self_attn",
                layer,
                mla,
                hidden_size=config.hidden_size,
                num_heads=config.num_heads,
                bias=config.attention_bias,
                place=place,
            )
            for layer in range(config.num_layers)
        ]
        mlp, routing = sparse_mlp(config, place)
        super().__init__(config, attention, mlp, place=place, routing=routing)


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V2 and V2-Lite."""


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V3 and R1."""
