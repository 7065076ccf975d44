"""Checksums of all that a model's weights are stored as, and their opposite: overwriting all of it.

Invariant: both yield between slices, so that the caller can let others in between.
"""

import hashlib
from collections.abc import Generator, Iterator
from math import prod

import torch
from torch import Tensor

from ..layers.parameters import WeightSlot
from ..memory.storage import bytes_of
from ..models.base import Weights

_HASH_SLICE = 8 << 20
_RESET_ELEMENTS = 1 << 20


def checksums(model: Weights) -> Generator[None, None, dict[str, str]]:
    """128-bit BLAKE2b of each parameter and derived tensor by name."""
    found: dict[str, str] = {}
    for name, tensor in model.named_storage():
        digest = hashlib.blake2b(digest_size=16)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _HASH_SLICE):
            part = flat[start : start + _HASH_SLICE].cpu()
            digest.update(bytes_of(part))
            yield
        found[name] = digest.hexdigest()
    return found


def garbage(model: Weights) -> Iterator[tuple[WeightSlot, int, Tensor]]:
    """``(slot, first row, rows)`` that overwrite all of a model's weights, so that no output can look right by chance."""
    for slot in model.weight_slots().values():
        for start, rows in _garbage(slot):
            yield slot, start, rows


def _garbage(slot: WeightSlot) -> Iterator[tuple[int, Tensor]]:
    """NaN for all of ``slot``."""
    value = float("nan") if slot.dtype.is_floating_point else 0
    row_elements = max(prod(slot.shape[1:]), 1)
    total, step = (slot.shape[0] if slot.shape else 1), max(1, _RESET_ELEMENTS // row_elements)
    for start in range(0, total, step):
        shape = (min(step, total - start), *slot.shape[1:]) if slot.shape else ()
        yield start, torch.full(shape, value, dtype=slot.dtype)
