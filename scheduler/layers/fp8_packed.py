"""FP8 weights in blocks for compiled kernels: packed, and dequantised in registers (``kernels/linear.py``).

Invariants:
- Storage holds the checkpoint's bytes in the kernels' layout, and of every block its scale, once for each
  output of the block. Slots take and give both as the checkpoint has them.
- A product is that of the dequantised weight packed, to the last bit, so a row's does not depend on the
  others.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels import TORCH, best
from ..kernels import linear as kernel
from ..kernels.experts import GroupedProduct, Groups
from ..kernels.linear import FP8, Scales
from .fp8_block import Fp8Slot, chunks, dequantize
from .matrix import PackedSlot
from .parameters import Parameter, Placement, WeightSlot, differ


def packs(in_features: int, place: Placement) -> bool:
    return (
        place.fp8 is not None
        and place.device.type == "cpu"
        and best("linear", place.device, place.dtype) != TORCH
        and kernel.scalable(in_features, place.fp8.columns)
        and kernel.packable(in_features, place.dtype)
    )


class ScalesSlot(WeightSlot):
    """``X.weight_scale_inv`` of a weight whose scales are stored for each output."""

    __slots__ = ("_height", "_lines")

    def __init__(self, name: str, parameter: str, lines: Tensor, height: int) -> None:
        """Map blocks of ``height`` outputs to ``lines`` [blocks, outputs], their part of the storage."""
        super().__init__(name, parameter, (-(-lines.shape[1] // height), lines.shape[0]), lines.dtype)
        self._lines, self._height = lines, height

    def write(self, rows: Tensor, start: int) -> None:
        outputs = self._lines[:, start * self._height :][:, : len(rows) * self._height]
        values = rows.to(self.dtype).t().repeat_interleave(self._height, dim=1)
        outputs.copy_(values[:, : outputs.shape[1]])  # the last block may be smaller

    def differs(self, rows: Tensor, start: int) -> bool:
        return differ(rows, self.read(start, start + len(rows)))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = self._lines[:, :: self._height][:, start:stop].t()
        return rows.clone(
            memory_format=torch.contiguous_format
        )  # also where there is one: its bytes may be viewed


class _Storage:
    def __init__(self, name: str, count: int, outputs: int, inputs: int, place: Placement) -> None:
        assert place.fp8 is not None
        self.place, self.blocks, self.inputs = place, place.fp8, inputs
        self.rows, columns = kernel.storage_shape(outputs, inputs, FP8)
        self.grid_columns, padded = kernel.scales_shape(outputs, inputs, place.fp8.columns)
        self.weight = Parameter(name, (count * self.rows, columns), FP8, place.device)
        self.lines = Parameter(
            f"{name}_scale_inv", (count * self.grid_columns, padded), torch.float32, place.device
        )

    @property
    def scales(self) -> Scales:
        return Scales(self.lines.data, self.blocks.columns)

    def slots(self, module: str, number: int, start: int, length: int) -> Iterator[WeightSlot]:
        """Yield weight and scales of a checkpoint module, rows ``[start, start + length)``."""
        lines = self.lines.data.narrow(0, number * self.grid_columns, self.grid_columns)
        name = f"{module}.weight_scale_inv"
        scales = ScalesSlot(name, self.lines.name, lines.narrow(1, start, length), self.blocks.rows)
        first, shape = number * self.rows + start, (length, self.inputs)
        stored = PackedSlot(f"{module}.weight", self.weight.name, self.weight.data, first, shape)
        yield Fp8Slot(stored, scales, self.place)
        yield scales

    def parameters(self) -> Iterator[Parameter]:
        yield self.weight
        yield self.lines


class PackedFp8Matrix:
    def __init__(self, name: str, out_features: int, in_features: int, place: Placement) -> None:
        self._storage = _Storage(name, 1, out_features, in_features, place)
        self._shape = out_features, in_features
        self._product = kernel.Product(
            self._storage.weight.data, *self._shape, self._storage.scales, place.dtype
        )

    @property
    def packed(self) -> Tensor:
        return self._storage.weight.data

    @property
    def scales(self) -> Tensor:
        return self._storage.lines.data

    def product(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self._product(x, bias, out)

    def read(self) -> Tensor:
        place, columns = self._storage.place, self._storage.blocks.columns
        out = torch.empty(self._shape, dtype=place.dtype, device=place.device)
        for start, end in chunks(*self._shape):
            weight = torch.empty((end - start, self._shape[1]), dtype=FP8)
            kernel.unpack_rows(self.packed, start, weight)
            scales = self.scales[:, start:end].t().contiguous()
            dequantize(weight, scales, columns, out[start:end], place.workspace)
        return out

    def slots(self, module: str, start: int, length: int) -> Iterator[WeightSlot]:
        return self._storage.slots(module, 0, start, length)

    def parameters(self) -> Iterator[Parameter]:
        return self._storage.parameters()


class PackedFp8ExpertMatrix:
    def __init__(
        self, name: str, num_experts: int, part_rows: Sequence[int], in_features: int, place: Placement
    ) -> None:
        outputs = sum(part_rows)
        self._storage = _Storage(name, num_experts, outputs, in_features, place)
        self._product = GroupedProduct(
            self._storage.weight.data, num_experts, outputs, in_features, self._storage.scales, place.dtype
        )

    @property
    def packed(self) -> Tensor:
        return self._storage.weight.data

    @property
    def scales(self) -> Tensor:
        return self._storage.lines.data

    def packed_product(self, x: Tensor, groups: Groups, out: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._product(x, groups, out, bias)

    def slots(self, module: str, expert: int, start: int, length: int) -> Iterator[WeightSlot]:
        return self._storage.slots(module, expert, start, length)

    def parameters(self) -> Iterator[Parameter]:
        return self._storage.parameters()
