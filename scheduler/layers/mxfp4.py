"""Weights in MXFP4, read into wider floats (OCP Microscaling Formats 1.0, 2023, sections 5 and 6).

A checkpoint holds ``X_blocks`` uint8 [experts, out, in / 32, 16] and ``X_scales`` uint8 [experts, out, in /
32]. A byte is two values of E2M1, the first in its lower half; 32 of them share a scale of E8M0, which is
``2^(scale - 127)``, and 255 is NaN.

Invariants:
- Storage holds the product, rounded once to the dtype of the parameter: exact in bfloat16 and float32.
- The two may come in either order, in any pieces, far apart: the result depends on the tensors alone. The
  first waits, but blocks only until another tensor's come. Then their values are stored without scales, which
  is exact, and multiplied later. So at most one tensor's blocks and the scales of all wait.
- Values are made of one expert at a time.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .parameters import HalfSlot

GROUP = 32
"""Values that share a scale."""
_BYTES = GROUP // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255
_PAIR = {2: torch.int32, 4: torch.int64}


class ExpertRows(Protocol):
    """Weights [out, in] that a pair of tensors is written to."""

    def put(self, expert: int, values: Tensor, *, compare: bool) -> bool:
        """Write one weight as :meth:`~.parameters.TensorSlot.update` does."""
        ...

    def multiply(self, expert: int, factors: Tensor) -> None:
        """Multiply the stored values by ``factors`` float32 [out, in / 32], one for each group of columns."""
        ...


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
        dtype: torch.dtype,
        device: torch.device,
        target: ExpertRows,
    ) -> None:
        """``shape``: [experts, out, in] of all that is written to ``target`` as ``dtype``."""
        self._dtype, self._device, self._target = dtype, device, target
        experts, outputs, inputs = shape
        groups = experts, outputs, inputs // GROUP
        names = f"{name}_blocks", f"{name}_scales"
        self.blocks = _Blocks(self, parameter, (*groups, _BYTES), names, whole=name)
        self.scales = _Scales(self, parameter, groups, (names[1], names[0]), whole=name)
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
            self._blocks = _Waiting(self.blocks.shape, self._device)
        self._blocks.add(rows, start)
        return not compare

    def take_scales(self, rows: Tensor, start: int, *, compare: bool) -> bool:
        if start == 0 or self._scales is None:
            self._scales = _Waiting(self.scales.shape, self._device)
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


class _Half(HalfSlot):
    __slots__ = ("_pair",)

    def __init__(
        self, pair: Mxfp4Pair, parameter: str, shape: tuple[int, ...], names: tuple[str, str], *, whole: str
    ) -> None:
        super().__init__(names[0], parameter, shape, torch.uint8, whole=whole, other=names[1])
        self._pair = pair

    def forget(self) -> None:
        self._pair.forget()

    def make_room(self) -> None:
        self._pair.make_room()


class _Blocks(_Half):
    __slots__ = ()

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        return self._pair.take_blocks(rows, start, compare=compare)


class _Scales(_Half):
    __slots__ = ()

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        return self._pair.take_scales(rows, start, compare=compare)
