"""Slots of checkpoints that hold the experts of a layer as one tensor (gpt-oss).

Invariants:
- Storage is that of per-expert checkpoints: gate above up, rows along the product's output. Only slots know the other layout:
  [experts, in, out], with columns of gate and up by turns.
- A piece is some whole experts; each is turned and written by itself, so one expert's weight is the largest transient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .parameters import WeightSlot


def by_turns(parts: int, x: Tensor) -> list[Tensor]:
    """Views of ``x`` [..., parts * n]: the elements that belong to each part."""
    return [x[..., part::parts] for part in range(parts)]


class StackedSlot(WeightSlot):
    """``weight`` [experts, in, out] of all experts of a layer."""

    __slots__ = ("_parts",)

    def __init__(self, name: str, parameter: str, experts: Sequence[Sequence[WeightSlot]]) -> None:
        """``experts``: of each expert, the slots [n, in] that its columns belong to by turns."""
        outputs = sum(slot.shape[0] for slot in experts[0])
        shape = len(experts), experts[0][0].shape[1], outputs
        super().__init__(name, parameter, shape, experts[0][0].dtype)
        self._parts = experts

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        """See :meth:`WeightSlot.update`."""
        changed = not compare
        for slot, values in self._turned(rows, start):
            changed |= slot.update(values, 0, compare=compare)
        return changed

    def write(self, rows: Tensor, start: int) -> None:
        """See :meth:`WeightSlot.write`."""
        for slot, values in self._turned(rows, start):
            slot.write(values, 0)

    def differs(self, rows: Tensor, start: int) -> bool:
        """See :meth:`WeightSlot.differs`."""
        return any(slot.differs(values, 0) for slot, values in self._turned(rows, start))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy."""
        chosen = self._parts[start:stop]
        first = self._parts[0][0].read(0, 0)
        out = torch.empty((len(chosen), *self.shape[1:]), dtype=self.dtype, device=first.device)
        for target, slots in zip(out, chosen, strict=True):
            for part, slot in zip(by_turns(len(slots), target), slots, strict=True):
                part.copy_(slot.read().t())
        return out

    def _turned(self, rows: Tensor, start: int) -> list[tuple[WeightSlot, Tensor]]:
        return [
            (slot, part.t().contiguous())
            for expert, slots in zip(rows, self._parts[start : start + len(rows)], strict=True)
            for slot, part in zip(slots, by_turns(len(slots), expert), strict=True)
        ]


class StackedBiasSlot(WeightSlot):
    """``bias`` [experts, out] of all experts of a layer."""

    __slots__ = ("_count", "_storage")

    def __init__(self, name: str, parameter: str, storage: Tensor, parts: int) -> None:
        """``storage``: [experts, out], one part after the other; the checkpoint has them by turns."""
        super().__init__(name, parameter, tuple(storage.shape), storage.dtype)
        self._storage, self._count = storage, parts

    def write(self, rows: Tensor, start: int) -> None:
        """See :meth:`WeightSlot.write`."""
        self._storage[start : start + len(rows)].copy_(torch.cat(by_turns(self._count, rows), dim=1))

    def differs(self, rows: Tensor, start: int) -> bool:
        """See :meth:`WeightSlot.differs`."""
        new = torch.cat(by_turns(self._count, rows), dim=1).to(self._storage)
        bits = torch.int16 if new.itemsize == 2 else torch.int32
        return not torch.equal(new.view(bits), self._storage[start : start + len(rows)].view(bits))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy."""
        stored = self._storage[start:stop]
        return torch.stack(stored.chunk(self._count, dim=1), dim=-1).flatten(1)
