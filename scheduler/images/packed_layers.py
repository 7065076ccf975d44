"""Linear layers of diffusers' and transformers' modules with packed weights on a CPU.

Their products are those of language models: torch would bring a weight into oneDNN's layout for each product
of bfloat16, and waits twice as long for the weights of a few rows of float32.

Invariants:
- The weight of such a layer is the packed storage. Only slots know it as [out, in].
- Sums are float32 and rounded once. A row's bits do not depend on the rows beside it.
- Layers are packed whether their component stays or comes and goes, so images do not depend on that.
"""

from collections import Counter
from functools import partial

import torch
from torch import nn

from ..kernels import native
from ..kernels.modulation import packed_product
from ..layers.matrix import Matrix, packs
from ..layers.parameters import Placement

_FLOATS_BY = ("avx512", "avx512bf16", "amx")
"""Instruction sets with which packed weights of float32 are faster than torch's products."""


def packable_layers(module: nn.Module, place: Placement) -> dict[str, nn.Linear]:
    """Return the layers within ``module`` to be packed, by the names of their weights."""
    if place.dtype != torch.bfloat16 and (place.dtype != torch.float32 or native.isa() not in _FLOATS_BY):
        return {}
    layers = {f"{name}.weight": each for name, each in module.named_modules() if type(each) is nn.Linear}
    holders = Counter(id(each) for owner in module.modules() for each in owner._parameters.values())
    return {
        name: layer
        for name, layer in layers.items()
        if holders[id(layer.weight)] == 1 and packs(layer.in_features, place)
    }


def use_packed(matrices: dict[nn.Linear, Matrix]) -> None:
    """Have the layers, which hold their weights already, computed with the matrices."""
    for layer, matrix in matrices.items():
        given = {"weight": layer.weight, "bias": layer.bias, "product": matrix.product}
        layer.forward = partial(packed_product, **given)  # type: ignore[method-assign]
