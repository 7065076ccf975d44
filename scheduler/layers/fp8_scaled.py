"""Products of FP8 activations with FP8 weights on Hopper, by torch's scaled matmul (cuBLASLt's block scaling).

Invariants:
- Activations are quantised per token and 128 columns, as transformers and the training of such checkpoints do, so results
  differ from those of dequantised weights by that rounding.
- It serves a device only after a product there agreed with the dequantised one (:func:`serves`): strides and padding of
  the scales are cuBLASLt's conventions, and another version may have others.

Not run on a GPU yet.
"""

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

BLOCK = 128
_MAX = torch.finfo(torch.float8_e4m3fn).max
_TINY = 1e-12  # tokens of zeros
_AGREEMENT = 0.05
"""Norm of the difference over that of the product; what rounding activations to 4 bits gives is about 0.03."""


@cache
def serves(device: torch.device) -> bool:
    """Whether products on ``device`` can be computed so."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randn(size, 3 * BLOCK, device=device, generator=generator).bfloat16() for size in (5, 2 * BLOCK)
    )
    scales = torch.rand((2, 3), device=device, generator=generator) + 0.5
    dequantized = weight.to(torch.float8_e4m3fn).float()
    dequantized = dequantized * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    expected = x.float() @ dequantized.t()
    try:
        got = product(x, weight.to(torch.float8_e4m3fn), scales)
    except (RuntimeError, ValueError, AttributeError) as error:  # another driver, or a torch without it
        logger.warning("FP8 weights are dequantised: torch's scaled product fails: %s", error)
        return False
    difference = float((got - expected).norm() / expected.norm())
    if difference > _AGREEMENT:
        logger.warning("FP8 weights are dequantised: torch's scaled product is off by %.3f", difference)
    return difference <= _AGREEMENT


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """``x @ (weight * scales).T`` in ``x``'s dtype, bfloat16.

    Args:
        x: [T, in], in a multiple of 128.
        weight: FP8 [out, in], out likewise.
        scales: float32 [out / 128, in / 128].
    """
    tokens = x.shape[0]
    tiles = functional.pad(x, (0, 0, 0, -tokens % 4)).float().unflatten(1, (-1, BLOCK))
    factors = tiles.abs().amax(dim=2, keepdim=True).clamp_min_(_TINY).div_(_MAX)
    quantized = tiles.div_(factors).to(torch.float8_e4m3fn).flatten(1)
    recipes = functional.ScalingType
    out: Tensor = functional.scaled_mm(
        quantized,
        weight.t(),
        factors.squeeze(2).t().contiguous().t(),  # columns contiguous
        recipes.BlockWise1x128,
        functional.pad(scales, (0, -scales.shape[1] % 4)).t(),
        recipes.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return out[:tokens]
