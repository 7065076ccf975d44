"""Matrix products of diffusers' and transformers' modules in float32 on a CPU.

torch takes MKL for these, which is slower with AVX-512 on processors that are not Intel's, and as fast with
AVX2 (docs/explanation/images.md). There oneDNN computes those that are worth its 30 us of preparation.

Invariant: the results are those of the modules, but for the order of sums and a GELU's last bits.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from ..kernels import native
from ..kernels.modulation import gelu_of_product

_WORTH_ONEDNN = 1 << 22
"""Multiplications of a product."""


def least_for_onednn() -> int | None:
    """Return the multiplications from which on oneDNN is faster, or None if it never is."""
    available = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX2"
    return _WORTH_ONEDNN if available else None


def use_onednn(module: nn.Module, least: int | None) -> None:
    """Have the linear layers within ``module``, with the GELU behind them, computed by what is fastest.

    ``least``: as of :func:`least_for_onednn`.
    """
    from diffusers.models.activations import GELU  # an extra

    for each in module.modules():
        if type(each) is nn.Linear:
            each.forward = partial(_product, each, least)  # type: ignore[method-assign]
        elif type(each) is GELU:
            block: Any = each
            block.forward = partial(_gelu_of_product, block.proj, least, block.approximate)


def _by_onednn(layer: nn.Linear, x: Tensor, least: int | None) -> bool:
    return least is not None and x.numel() * layer.out_features >= least


def _product(layer: nn.Linear, least: int | None, x: Tensor) -> Tensor:
    if not _by_onednn(layer, x, least):
        return linear(x, layer.weight, layer.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return out


def _gelu_of_product(layer: nn.Linear, least: int | None, form: str, x: Tensor) -> Tensor:
    if _by_onednn(layer, x, least):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], form)
        return out
    if form == "tanh" and native.why_not() is None:
        fused: Tensor = gelu_of_product(x, layer.weight, layer.bias)
        return fused
    return gelu(linear(x, layer.weight, layer.bias), approximate=form)
