"""Scratch memory by purpose, which only grows.

What lies in it is dead when whoever took it takes it again. On the CPU it begins at a multiple of
:data:`ALIGNMENT`.
"""

from math import prod

import torch
from torch import Tensor

from . import moves

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register. torch's allocator promises as much for the CPU."""


class Workspace:
    """The scratch memory of one owner, or of parts that are computed one after the other."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}

    def take(
        self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Uninitialised; the same memory for every call with this purpose, which has one dtype and device."""
        memory, view = self._taken.get(purpose, (None, None))
        if view is not None and view.shape == shape:
            return view
        count = prod(shape)
        if memory is None or memory.shape[0] < count:
            # Freed first, so that the peak is the larger of the two and not their sum.
            self._taken.pop(purpose, None)
            del memory, view
            moves.count += 1
            with torch.inference_mode(False):  # steps and updates use it, and only steps are in that mode
                memory = torch.empty(count, dtype=dtype, device=device)
            assert memory.device.type != "cpu" or memory.data_ptr() % ALIGNMENT == 0, purpose
        view = memory[:count].view(shape)
        self._taken[purpose] = memory, view
        return view
