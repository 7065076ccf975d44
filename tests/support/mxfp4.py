"""Checkpoints of gpt-oss with experts in MXFP4, and what they stand for by the specification's formula."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .checkpoints import write_like

GROUP = 32
SHAPE = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 3}
"""Sizes of the smallest model whose experts are made of whole groups, of two in one direction."""
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""Quantization config, as in the published checkpoints."""


def element(code: int) -> float:
    """Decode E2M1: one bit of sign, two of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def scale(exponent: int) -> float:
    return float("nan") if exponent == 255 else 2.0 ** (exponent - 127)


ELEMENTS = torch.tensor([element(code) for code in range(16)], dtype=torch.float64)
SCALES = torch.tensor([scale(exponent) for exponent in range(256)], dtype=torch.float64)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Turn [..., groups, 16] and [..., groups] into float64 [..., 32 * groups]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return (ELEMENTS[codes.long()] * SCALES[scales.long()].unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(value: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., n] to blocks [..., n / 32, 16] and scales [..., n / 32], each value to one that is near."""
    groups = value.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    exponents = (largest / 6).log2().ceil()
    distances = (groups / 2.0**exponents).unsqueeze(-1) - ELEMENTS
    codes = distances.abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, (exponents.squeeze(-1) + 127).to(torch.uint8)


def make_mxfp4_checkpoint(source: str | Path, path: str | Path) -> None:
    """Write the gpt-oss checkpoint ``source`` to ``path`` with its experts in MXFP4."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(Path(source) / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = quantize_mxfp4(value.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = value
    write_like(source, path, tensors, quantization_config=CONFIG, dtype=None)


def make_widened_checkpoint(source: str | Path, path: str | Path, dtype: torch.dtype) -> None:
    """Write what the MXFP4 checkpoint ``source`` stands for to ``path``, with experts of ``dtype``."""
    tensors = load_file(Path(source) / "model.safetensors")
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        wide = dequantize_mxfp4(tensors.pop(blocks), tensors.pop(f"{name}_scales"))
        tensors[name] = wide.transpose(1, 2).to(dtype).contiguous()
    changes = {"quantization_config": None, "dtype": str(dtype).removeprefix("torch.")}
    write_like(source, path, tensors, **changes)
