"""GLM-4 with experts: GLM-4.5 and its kin (GLM-4.5 Team, 2025, arXiv:2508.06471)."""

from .config_moe import DEEPSEEK_V3
from .decoder import DecoderForCausalLM
from .family import Family

FAMILIES = {
    "Glm4MoeForCausalLM": Family(
        absent={
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        num_kv_heads=8,
        partial_rotary=0.5,
        qk_norm="use_qk_norm",
        mtp_layers=True,
        moe=DEEPSEEK_V3,  # whose defaults null means
    )
}


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """Half of a head is rotated; DeepSeek V3's routing."""
