"""Qwen2 with experts (Yang et al., 2024, arXiv:2407.10671)."""

from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames
from .family import Family

_MOE = MoeFields(count=60, top_k=4, width=1408, normalize=False, stepped=True, shared=5632)
FAMILIES = {
    "Qwen2MoeForCausalLM": Family(
        num_kv_heads=16, bias_field=("qkv_bias", True), window="upper_layers", moe=_MOE
    )
}


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2's attention; routed experts, and shared ones weighted by a gate."""

    names = SparseNames(shared="shared_expert")
