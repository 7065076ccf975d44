"""Linear layers of diffusers' and transformers' modules with packed weights, in bfloat16 on a CPU.

Their products are those of language models: torch would bring a weight into oneDNN's layout for each product.

Invariants:
- The weight of such a layer is the packed storage. Only slots know it as [out, in].
- Sums are float32 and rounded once. A row's bits do not depend on the rows beside it.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ..kernels.modulation import packed_product
from ..layers.matrix import Matrix, packs
from ..layers.parameters import Placement


def packable_layers(module: nn.Module, place: Placement) -> dict[str, nn.Linear]:
    """Return the layers within ``module`` to be packed, by the names of their weights."""
    if place.dtype != torch.bfloat16:
        return {}
    layers = {f"{name}.weight": each for name, each in module.named_modules() if type(each) is nn.Linear}
    holders = Counter(id(each) for owner in module.modules() for each in owner._parameters.values())
    return {
        name: layer
        for name, layer in layers.items()
        if holders[id(layer.weight)] == 1 and packs(layer.in_features, place)
    }


def use_packed(module: nn.Module, matrices: dict[nn.Linear, Matrix]) -> None:
    """Have the layers within ``module``, with the GELU behind them, computed with packed weights."""
    if not matrices:
        return
    from diffusers.models.activations import GELU  # an extra

    for layer, matrix in matrices.items():
        layer.forward = partial(_product, layer, matrix)  # type: ignore[method-assign]
    for each in module.modules():
        if type(each) is GELU and each.proj in matrices:
            block: Any = each
            block.forward = partial(_gelu_of_product, block.proj, matrices[block.proj], block.approximate)


def _product(layer: nn.Linear, matrix: Matrix, x: Tensor) -> Tensor:
    made: Tensor = packed_product(x, layer.weight, layer.bias, matrix.product)
    return made


def _gelu_of_product(layer: nn.Linear, matrix: Matrix, form: str, x: Tensor) -> Tensor:
    if form != "tanh":
        return gelu(_product(layer, matrix, x), approximate=form)
    made: Tensor = packed_product(x, layer.weight, layer.bias, matrix.product, bends=True)
    return made
