"""Which implementation serves an operation on a device.

Invariant: torch is always an answer. Who uses an operation asks once, when it is constructed, and keeps its torch code
for the answer :data:`TORCH`; nothing else in the engine knows what a machine can do.
"""

import torch

from . import native

TORCH = native.ISAS[0]

_FLOATS = frozenset({torch.bfloat16, torch.float32})
_TABLE: dict[tuple[str, str], frozenset[torch.dtype]] = {
    ("linear", "cpu"): _FLOATS,
    ("attention", "cpu"): _FLOATS,
    ("elementwise", "cpu"): _FLOATS,
    ("experts", "cpu"): _FLOATS,
    ("decoder", "cpu"): _FLOATS,
    ("sampler", "cpu"): _FLOATS,
}
"""Operation and device type to the dtypes that compiled kernels take."""

OPERATIONS = tuple(dict.fromkeys(operation for operation, _ in _TABLE))


def best(operation: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """What serves ``operation``: an instruction set of :data:`native.ISAS`, or :data:`TORCH`.

    Raises:
        ValueError: ``CAESURA_KERNELS`` has an unknown value.
    """
    dtypes = _TABLE.get((operation, torch.device(device).type), frozenset())
    return native.isa() if dtype in dtypes else TORCH


def serving(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    """Every operation of the table and what serves it, for logs and status."""
    return {operation: best(operation, device, dtype) for operation in OPERATIONS}
