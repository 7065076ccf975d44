"""Mixtral (Jiang et al., 2024, arXiv:2401.04088)."""

from ..layers.experts import ExpertNames
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeFields
from .decoder import DecoderForCausalLM, SparseNames, attention_shape, dense_attention, sparse_mlp
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

_NAMES = SparseNames(block="block_sparse_moe", experts=ExpertNames(gate="w1", up="w3", down="w2"))


class MixtralForCausalLM(DecoderForCausalLM):
    """Mistral's attention; every layer has experts."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        mlp, routing = sparse_mlp(config, place, names=_NAMES)
        attention = dense_attention(config, attention_shape(config), place)
        super().__init__(config, attention, mlp, place=place, routing=routing)

    def own_name(self, name: str) -> str:
        """Take transformers 5's name of the block, which differs from the checkpoint's."""
        return super().own_name(name).replace(".mlp.", ".block_sparse_moe.", 1)
