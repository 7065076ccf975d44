"""Slots of checkpoints that hold the experts of a layer as one tensor (gpt-oss), also in MXFP4.

Invariants:
- Storage is that of per-expert checkpoints: gate above up, rows along the product's output. Only slots know
  the other layout: [experts, in, out], with alternating columns of gate and up.
- Each rank holds some experts, of each a part of the width, and a slot reads that part alone: neither rows
  nor a range of columns.
- A piece is some whole experts; each is transposed and written by itself.

MXFP4 (OCP Microscaling Formats 1.0, 2023, sections 5 and 6) is read into wider floats: ``X_blocks`` uint8
[experts, out, in / 32, 16] and ``X_scales`` uint8 [experts, out, in / 32]. A byte is two values of E2M1, the
first in its lower half; 32 share a scale of E8M0, ``2^(scale - 127)``, 255 being NaN. Invariants:
- Storage holds the product, rounded once to the dtype of the parameter: exact in bfloat16 and float32.
- The two come in any order and pieces: the result depends on the tensors alone. The first waits, but blocks
  only until another tensor's come; then their values are stored without scales, exactly, and multiplied
  later. So at most one tensor's blocks and the scales of all wait.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from .parameters import DelegatingSlot, HalfSlot, Place, PlainSlot, WeightSlot, differ
from .sharding import Window, among, parts_with

GROUP = 32
"""Values that share a scale."""
_BYTES = GROUP // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255
_PAIR = {2: torch.int32, 4: torch.int64}


def by_turns(parts: int, x: Tensor) -> list[Tensor]:
    """Return views of ``x`` [..., parts * n]: the elements that belong to each part."""
    return [x[..., part::parts] for part in range(parts)]


class StackedSlot(DelegatingSlot):
    """``weight`` [experts, in, out] of a layer's experts, or the same in MXFP4 if groups divide ``in``."""

    __slots__ = ("_pair", "_parts")

    def __init__(
        self, name: str, parameter: str, experts: Sequence[Sequence[WeightSlot]], held: Window
    ) -> None:
        """Take for each expert ``held`` the slots [n, in] that its columns belong to in turn.

        The slot is that of these experts; :attr:`halves` are of all.
        """
        outputs = sum(slot.shape[0] for slot in experts[0])
        shape = len(experts), experts[0][0].shape[1], outputs
        super().__init__(name, parameter, shape, experts[0][0].dtype)
        self._parts = experts
        self._pair: Mxfp4Pair | None = None
        if shape[1] % GROUP == 0:
            device = experts[0][0].read(0, 0).device
            turned = shape[0], shape[2], shape[1]
            self._pair = Mxfp4Pair(name, parameter, turned, held, self.dtype, device, _Rows(experts))

    @property
    def halves(self) -> tuple[HalfSlot, ...]:
        return () if self._pair is None else (self._pair.blocks, self._pair.scales)

    @property
    def is_whole(self) -> bool:
        return all(slot.is_whole for slot in self._parts[0])

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        if self._pair is not None:
            self._pair.forget()
        return super().update(rows, start, compare=compare)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        chosen = self._parts[start:stop]
        first = self._parts[0][0].read()
        shape = len(chosen), first.shape[1], first.shape[0] * len(self._parts[0])
        out = torch.empty(shape, dtype=self.dtype, device=first.device)
        for target, slots in zip(out, chosen, strict=True):
            for part, slot in zip(by_turns(len(slots), target), slots, strict=True):
                part.copy_(slot.read().t())
        return out

    def places(self, positions: Tensor) -> Iterator[Place]:
        _, inputs, outputs = self.shape
        for expert, chosen, own in parts_with(positions, [inputs * outputs] * self.shape[0]):
            rows = own // outputs
            columns = own - rows * outputs
            slots = self._parts[expert]
            for part, slot in enumerate(slots):
                of_part = (columns % len(slots) == part).nonzero().squeeze(1)
                places = slot.places(columns[of_part] // len(slots) * inputs + rows[of_part])
                yield from among(chosen[of_part], places)

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        for expert, slots in zip(rows, self._parts[start : start + len(rows)], strict=True):
            for slot, part in zip(slots, by_turns(len(slots), expert), strict=True):
                yield slot, part.t().contiguous(), 0


class _Rows:
    """The same experts, each as [out, in]; ``factors``: float32 [out, in / 32]."""

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
        """``storage``: [experts, parts * n], not alternating; ``held``: the n elements of this rank."""
        super().__init__(name, parameter, (storage.shape[0], parts * held.total), storage.dtype)
        self._storage, self._count, self._held = storage, parts, held

    @property
    def is_whole(self) -> bool:
        return self._held.is_whole

    def write(self, rows: Tensor, start: int) -> None:
        self._storage[start : start + len(rows)].copy_(self._in_parts(rows))

    def differs(self, rows: Tensor, start: int) -> bool:
        return differ(self._in_parts(rows), self._storage[start : start + len(rows)])

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        stored = self._storage[start:stop]
        return torch.stack(stored.chunk(self._count, dim=1), dim=-1).flatten(1)

    def parts(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        yield PlainSlot(self.name, self.parameter, self._storage), self._in_parts(rows), start

    def places(self, positions: Tensor) -> Iterator[Place]:
        rows = positions // self.shape[1]
        columns = positions - rows * self.shape[1]
        own = columns // self._count - self._held.start
        chosen = ((own >= 0) & (own < self._held.length)).nonzero().squeeze(1)
        places = rows * self._storage.shape[1] + columns % self._count * self._held.length + own
        yield Place(self._storage.view(-1), places[chosen], chosen)

    def _in_parts(self, rows: Tensor) -> Tensor:
        held = slice(self._held.start, self._held.stop)
        return torch.cat([part[:, held] for part in by_turns(self._count, rows)], dim=1)


# MXFP4


@cache
def _value_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=dtype)
    byte = torch.arange(256)
    both = torch.stack([values[byte % 16], values[byte // 16]], dim=1)
    return both.view(_PAIR[dtype.itemsize]).flatten().to(device)


@cache
def _all_factors(device: torch.device) -> Tensor:
    factors = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - _BIAS)
    factors[_NAN] = torch.nan
    return factors.float().to(device)


def values_of(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``blocks`` uint8 [out, groups, 16] as ``dtype`` [out, 32 * groups], without scales."""
    pairs = _value_pairs(dtype, blocks.device).index_select(0, blocks.flatten().int())
    return pairs.view(dtype).view(blocks.shape[0], -1)


def factors_of(scales: Tensor) -> Tensor:
    """Return ``scales`` uint8 [out, groups] as float32."""
    return _all_factors(scales.device).index_select(0, scales.flatten().int()).view_as(scales)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``blocks`` uint8 [out, groups, 16] times ``scales`` uint8 [out, groups]: [out, 32 * groups]."""
    working = torch.float32 if dtype == torch.float16 else dtype  # whose exponents do not hold every scale
    values, factors = values_of(blocks, working), factors_of(scales).to(working)
    values.view(*scales.shape, GROUP).mul_(factors.unsqueeze(-1))
    return values.to(dtype)


class _Waiting:
    """A tensor that is gathered row by row."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._values = torch.empty(shape, dtype=torch.uint8, device=device)
        self._rows = 0

    def add(self, rows: Tensor, start: int) -> None:
        self._rows = start + rows.shape[0]
        self._values[start : self._rows].copy_(rows)

    @property
    def whole(self) -> Tensor | None:
        return self._values if self._rows == self._values.shape[0] else None


class Mxfp4Pair:
    """Blocks and scales of one tensor ``name``, on their way to the weights of some experts."""

    def __init__(
        self,
        name: str,
        parameter: str,
        shape: tuple[int, int, int],
        held: Window,
        dtype: torch.dtype,
        device: torch.device,
        target: "_Rows",
    ) -> None:
        """``shape``: [experts, out, in] of the experts ``held``, written to ``target`` as ``dtype``."""
        self._dtype, self._device, self._target = dtype, device, target
        experts, outputs, inputs = shape
        self._groups = experts, outputs, inputs // GROUP
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        groups = held.total, *self._groups[1:]
        packed = (*groups, _BYTES)
        waiting = self.forget, self.make_room, range(held.start, held.stop)
        self.blocks = HalfSlot((blocks, scales, name), parameter, packed, self.take_blocks, *waiting)
        self.scales = HalfSlot((scales, blocks, name), parameter, groups, self.take_scales, *waiting)
        self._blocks: _Waiting | None = None
        self._scales: _Waiting | None = None
        self._unscaled = False  # the weights are the values of blocks that came, without their scales

    def forget(self) -> None:
        self._blocks = self._scales = None
        self._unscaled = False

    def make_room(self) -> None:
        """Store the values of waiting blocks; those that lack rows come again."""
        blocks = None if self._blocks is None else self._blocks.whole
        self._blocks = None
        if blocks is None:
            return
        for expert, packed in enumerate(blocks):
            self._target.put(expert, values_of(packed, self._dtype), compare=False)
        self._unscaled = True

    def take_blocks(self, rows: Tensor, start: int, *, compare: bool) -> bool:
        """Write as :meth:`~.parameters.TensorSlot.update`; waiting rows change nothing yet."""
        if start == 0:
            self._blocks, self._unscaled = None, False
        scales = None if self._scales is None else self._scales.whole
        if scales is not None:
            changed = self._write(rows, scales[start : start + rows.shape[0]], start, compare=compare)
            if start + rows.shape[0] == scales.shape[0]:
                self._scales = None
            return changed
        if self._blocks is None:
            self._blocks = _Waiting((*self._groups, _BYTES), self._device)
        self._blocks.add(rows, start)
        return not compare

    def take_scales(self, rows: Tensor, start: int, *, compare: bool) -> bool:
        if start == 0 or self._scales is None:
            self._scales = _Waiting(self._groups, self._device)
        self._scales.add(rows, start)
        scales = self._scales.whole
        blocks = None if self._blocks is None else self._blocks.whole
        if scales is None or (blocks is None and not self._unscaled):
            return not compare
        changed = True
        if blocks is not None:
            changed = self._write(blocks, scales, 0, compare=compare)
        else:
            for expert, exponents in enumerate(scales):
                self._target.multiply(expert, factors_of(exponents))
        self.forget()
        return changed

    def _write(self, blocks: Tensor, scales: Tensor, start: int, *, compare: bool) -> bool:
        changed = not compare
        for expert, (packed, exponents) in enumerate(zip(blocks, scales, strict=True), start):
            values = dequantize(packed.to(self._device), exponents, self._dtype)
            changed |= self._target.put(expert, values, compare=not changed)
        return changed
