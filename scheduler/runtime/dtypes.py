"""torch's dtypes by the names of the one table that has them, that of ``transfer/safetensors.py``."""

import torch

from ...transfer.safetensors import DTYPES as KNOWN
from ...transfer.safetensors import NAMES_BY_TORCH

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in KNOWN.items()}
"""Dtypes by their names in safetensors and on the wire, such as ``BF16``."""
SHORT_NAMES = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32", "half": "float16",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_name(dtype: torch.dtype) -> str:
    return KNOWN[NAMES[dtype]].torch


def by_torch_name(name: str) -> torch.dtype:
    return DTYPES[NAMES_BY_TORCH[SHORT_NAMES.get(name, name)]]
