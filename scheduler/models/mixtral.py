"""Mixtral (Jiang et al., 2024, arXiv:2401.04088)."""

from ..layers.experts import ExpertNames
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames
from .family import Family

FAMILIES = {
    "MixtralForCausalLM": Family(
        num_kv_heads=8,
        attention_bias=False,
        window="always",
        theta=1e6,
        moe=MoeFields(count=8, top_k=2),
    )
}


class MixtralForCausalLM(DecoderForCausalLM):
    """Mistral's attention; every layer has experts."""

    names = SparseNames(block="block_sparse_moe", experts=ExpertNames(gate="w1", up="w3", down="w2"))

    def own_name(self, name: str) -> str:
        """Take transformers 5's name of the block, which differs from the checkpoint's."""
        return super().own_name(name).replace(".mlp.", ".block_sparse_moe.", 1)
