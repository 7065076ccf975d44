"""Norms of transformers that a compiled kernel stands in for, each shown to compute the same before it does.

Invariants:
- A module and its kernel are compared on random inputs of several sizes, with random weights in the place of
  the module's, in the model's dtype. They agree to a few units in the last place, or the module stays.
- What a module is called decides nothing: a norm that subtracts the mean, or does anything else, differs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels import Elementwise
from .probe import FOREIGN_FAILURES

_ROWS = 5
_SCALES = (1e-3, 1.0, 30.0)
_ROUNDINGS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 8}
"""Units in the last place; in float32 sums of another order differ in several."""
_NAMES = ("variance_epsilon", "eps", "epsilon", "rms_norm_eps")


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    compute: Callable[..., Tensor]
    weight: Tensor
    """[size]"""
    eps: float
    from_one: bool
    """The factor is ``1 + weight``, and the product is rounded once."""


def close(found: Tensor, expected: Tensor, *, cancels: bool = False) -> bool:
    """Return True if two tensors have the same form, and values that agree within rounding.

    Beside a value's own rounding, float32 loses what values of a row of any size cancel; with ``cancels`` the
    tensors' dtype does.
    """
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    wanted = expected.float()
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    within = _precision(expected.dtype) * wanted.abs()
    within += _precision(expected.dtype if cancels else torch.float32) * largest
    return bool(((found.float() - wanted).abs() <= within).all())


def _precision(dtype: torch.dtype) -> float:
    return _ROUNDINGS[dtype] * torch.finfo(dtype).eps


def proven_norms(
    decoder: nn.Module, dtype: torch.dtype, device: torch.device, kernels: Elementwise
) -> dict[nn.Module, Norm]:
    found: dict[nn.Module, Norm] = {}
    known: dict[Any, bool | None] = {}
    for module in decoder.modules():
        sizes = _candidate(module, dtype)
        if sizes is None:
            continue
        size, eps = sizes
        kind = type(module), size, eps, hasattr(module, "weight")
        if kind not in known:
            known[kind] = _from_one(module, size, eps, dtype, device, kernels)
        from_one = known[kind]
        if from_one is not None:
            weight = getattr(module, "weight", None)
            weight = torch.ones(size, dtype=dtype, device=device) if weight is None else weight
            found[module] = Norm(kernels.rms_norm, weight, eps, from_one)
    return found


def _candidate(module: nn.Module, dtype: torch.dtype) -> tuple[int, float] | None:
    own = dict(module.named_parameters(recurse=False))
    if any(True for _ in module.children()) or own.keys() != {"weight"} or module._buffers:
        return None
    weight = own["weight"]
    eps = next((value for name in _NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if weight.dim() != 1 or weight.dtype != dtype or not weight.is_contiguous() or eps is None:
        return None
    return weight.shape[0], eps


def _from_one(
    module: nn.Module, size: int, eps: float, dtype: torch.dtype, device: torch.device, kernels: Elementwise
) -> bool | None:
    """Return the kernel's ``from_one`` that has the module's results, or None for neither."""
    generator = torch.Generator().manual_seed(size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    fits = {False: True, True: True}
    for scale in _SCALES:
        weight, x = random(size) + 0.5, scale * random(_ROWS, size)
        try:
            expected: Any = functional_call(module, {"weight": weight}, (x.unsqueeze(0),))
        except FOREIGN_FAILURES:
            return None
        if not isinstance(expected, Tensor) or expected.shape != (1, *x.shape) or expected.dtype != dtype:
            return None
        for form in fits:
            fits[form] &= close(kernels.rms_norm(x, weight, eps, from_one=form), expected[0])
    return next((form for form, fit in fits.items() if fit), None)
