"""torch's dtypes by the names that others have for them.

Invariant: names come from one table, that of ``transfer/safetensors.py``; this module only adds torch to it.
"""

import torch

from ...transfer.safetensors import DTYPES as KNOWN
from ...transfer.safetensors import NAMES_BY_TORCH

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in KNOWN.items()}
"""By safetensors' name, which is the wire's: ``BF16``."""
SHORT_NAMES = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float": "float32", "half": "float16",
}  # fmt: skip
"""What people and other engines call a dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The other way."""


def torch_name(dtype: torch.dtype) -> str:
    """As in a config.json, and numpy's where that has the dtype: ``bfloat16``."""
    return KNOWN[NAMES[dtype]].torch


def by_torch_name(name: str) -> torch.dtype:
    """The dtype of this :func:`torch_name`, or of a short name."""
    return DTYPES[NAMES_BY_TORCH[SHORT_NAMES.get(name, name)]]
