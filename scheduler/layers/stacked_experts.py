"""Slots of checkpoints that hold the experts of a layer as one tensor (gpt-oss).

Invariants:
- Storage is that of per-expert checkpoints: gate above up, rows along the product's output. Only slots know
  the other layout: [experts, in, out], with alternating columns of gate and up.
- With several ranks each holds a part of the width, and a slot reads that part alone: neither rows nor a
  range of columns.
- A piece is some whole experts; each is transposed and written by itself.
- Weights in MXFP4 (:mod:`.mxfp4`) go through the same slots of experts, untransposed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .mxfp4 import GROUP, Mxfp4Pair
from .parameters import HalfSlot, WeightSlot
from .sharding import Window


def by_turns(parts: int, x: Tensor) -> list[Tensor]:
    """Return views of ``x`` [..., parts * n]: the elements that belong to each part."""
    return [x[..., part::parts] for part in range(parts)]


class StackedSlot(WeightSlot):
    """``weight`` [experts, in, out] of a layer's experts, or the same in MXFP4 if groups divide ``in``."""

    __slots__ = ("_pair", "_parts")

    def __init__(self, name: str, parameter: str, experts: Sequence[Sequence[WeightSlot]]) -> None:
        """Take for each expert the slots [n, in] that its columns belong to in turn."""
        outputs = sum(slot.shape[0] for slot in experts[0])
        shape = len(experts), experts[0][0].shape[1], outputs
        super().__init__(name, parameter, shape, experts[0][0].dtype)
        self._parts = experts
        self._pair: Mxfp4Pair | None = None
        if shape[1] % GROUP == 0:
            device = experts[0][0].read(0, 0).device
            turned = shape[0], shape[2], shape[1]
            self._pair = Mxfp4Pair(name, parameter, turned, self.dtype, device, _Rows(experts))

    @property
    def halves(self) -> tuple[HalfSlot, ...]:
        return () if self._pair is None else (self._pair.blocks, self._pair.scales)

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        self._forget_halves()
        changed = not compare
        for slot, values in self._turned(rows, start):
            changed |= slot.update(values, 0, compare=compare)
        return changed

    def write(self, rows: Tensor, start: int) -> None:
        self._forget_halves()
        for slot, values in self._turned(rows, start):
            slot.write(values, 0)

    def differs(self, rows: Tensor, start: int) -> bool:
        return any(slot.differs(values, 0) for slot, values in self._turned(rows, start))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        chosen = self._parts[start:stop]
        first = self._parts[0][0].read()
        shape = len(chosen), first.shape[1], first.shape[0] * len(self._parts[0])
        out = torch.empty(shape, dtype=self.dtype, device=first.device)
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

    def _forget_halves(self) -> None:
        if self._pair is not None:
            self._pair.forget()


class _Rows:
    def __init__(self, experts: Sequence[Sequence[WeightSlot]]) -> None:
        self._parts = experts

    def put(self, expert: int, values: Tensor, *, compare: bool) -> bool:
        slots, changed = self._parts[expert], not compare
        for part, slot in enumerate(slots):
            changed |= slot.update(values[part :: len(slots)], 0, compare=not changed)
        return changed

    def multiply(self, expert: int, factors: Tensor) -> None:
        slots = self._parts[expert]
        for part, slot in enumerate(slots):
            columns = slot.owned_columns or range(slot.shape[1])
            (held_rows,) = slot.owned
            held = slice(held_rows.start, held_rows.stop), slice(columns.start, columns.stop)
            values = torch.zeros(slot.shape, dtype=torch.float32, device=factors.device)
            values[held] = slot.read().float()
            values.unflatten(1, (-1, GROUP)).mul_(factors[part :: len(slots)].unsqueeze(-1))
            slot.write(values, 0)


class StackedBiasSlot(WeightSlot):
    """``bias`` [experts, out] of all experts of a layer."""

    __slots__ = ("_count", "_held", "_storage")

    def __init__(self, name: str, parameter: str, storage: Tensor, parts: int, held: Window) -> None:
        """Args:
        storage: [experts, parts * n], one part after the other; the checkpoint has them alternating.
        held: the n elements of a part that this rank has.
        """
        super().__init__(name, parameter, (storage.shape[0], parts * held.total), storage.dtype)
        self._storage, self._count, self._held = storage, parts, held

    def write(self, rows: Tensor, start: int) -> None:
        self._storage[start : start + len(rows)].copy_(self._in_parts(rows))

    def differs(self, rows: Tensor, start: int) -> bool:
        new = self._in_parts(rows).to(self._storage)
        bits = torch.int16 if new.itemsize == 2 else torch.int32
        return not torch.equal(new.view(bits), self._storage[start : start + len(rows)].view(bits))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        stored = self._storage[start:stop]
        return torch.stack(stored.chunk(self._count, dim=1), dim=-1).flatten(1)

    def _in_parts(self, rows: Tensor) -> Tensor:
        held = slice(self._held.start, self._held.stop)
        return torch.cat([part[:, held] for part in by_turns(self._count, rows)], dim=1)
