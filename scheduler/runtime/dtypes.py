"""torch's dtypes by the names that others have for them.

Invariant: names come from one table, that of ``transfer/safetensors.py``; this module only adds torch to it.
"""

import torch

from ...transfer.safetensors import DTYPES as KNOWN
from ...transfer.safetensors import NAMES_BY_TORCH

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in KNOWN.items()}
"""Dtypes by their names in safetensors and on the wire, such as ``BF16``."""
SHORT_NAMES = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32", "half": "float16",
}  # fmt: skip
"""Further names of dtypes, of people and of other engines."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Names in safetensors and on the wire by dtype."""


def torch_name(dtype: torch.dtype) -> str:
    """Return the name in a config.json, such as ``bfloat16``; numpy uses the same."""
    return KNOWN[NAMES[dtype]].torch


def by_torch_name(name: str) -> torch.dtype:
    """Return the dtype of a :func:`torch_name` or a short name."""
    return DTYPES[NAMES_BY_TORCH[SHORT_NAMES.get(name, name)]]
