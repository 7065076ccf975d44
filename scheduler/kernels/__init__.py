"""Which implementation serves an operation on a device.

Invariant: torch is always an answer. Who uses an operation asks once, when it is constructed, and keeps its torch code
for the answer :data:`TORCH`; nothing else in the engine knows what a machine can do.
"""

import torch

from . import native

TORCH = native.ISAS[0]

OPERATIONS = ("linear", "attention", "elementwise", "experts", "decoder", "sampler")
"""Compiled for the CPU, all in :data:`native.FLOATS`."""


def best(operation: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """What serves ``operation``: an instruction set of :data:`native.ISAS`, or :data:`TORCH`.

    Raises:
        ValueError: ``CAESURA_KERNELS`` has an unknown value.
    """
    compiled = operation in OPERATIONS and torch.device(device).type == "cpu" and dtype in native.FLOATS
    return native.isa() if compiled else TORCH


def serving(device: torch.device | str, dtype: torch.dtype) -> dict[str, str]:
    """Every operation and what serves it, for logs and status."""
    return {operation: best(operation, device, dtype) for operation in OPERATIONS}
