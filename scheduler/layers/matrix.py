"""Weights of matrix products, in the layout of the library that computes the product.

Invariants:
- A matrix is packed if compiled kernels serve its device and dtype, and plain otherwise; nobody outside asks.
- Packed storage is written through its slots only, row by row and in place: no second copy of a weight ever
  exists.
- The product of a packed matrix is the same for a row whatever the other rows are, bit for bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, best
from ..kernels import linear as kernel
from .parameters import Parameter, Placement, WeightSlot


class PackedSlot(WeightSlot):
    """Rows of a packed matrix as a checkpoint tensor [rows, in]."""

    __slots__ = ("_start", "_storage")

    def __init__(
        self, name: str, parameter: str, storage: Tensor, start: int, shape: tuple[int, int]
    ) -> None:
        super().__init__(name, parameter, shape, storage.dtype)
        self._storage = storage
        self._start = start

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        if compare:
            return kernel.update_rows(self._storage, self._cast(rows), self._start + start)
        self.write(rows, start)
        return True

    def write(self, rows: Tensor, start: int) -> None:
        kernel.pack_rows(self._storage, self._cast(rows), self._start + start)

    def differs(self, rows: Tensor, start: int) -> bool:
        return not kernel.equal_rows(self._storage, self._cast(rows), self._start + start)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        rows = len(range(*slice(start, stop).indices(self.shape[0])))
        out = torch.empty((rows, self.shape[1]), dtype=self.dtype)
        return kernel.unpack_rows(self._storage, self._start + start, out)

    def _cast(self, rows: Tensor) -> Tensor:
        return rows.to(device=self._storage.device, dtype=self.dtype).contiguous()


class Matrix:
    """One weight [out, in] and its product."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        place: Placement,
        *,
        packed: bool = True,
    ) -> None:
        """``packed=False``: rows are gathered only, which a plain layout does faster."""
        self._shape = (out_features, in_features)
        self._product: kernel.Product | None = None
        dtype, device = place.dtype, place.device
        if packed and best("linear", device, dtype) != TORCH and kernel.packable(in_features, dtype):
            self.parameter = Parameter(name, kernel.storage_shape(*self._shape, dtype), dtype, device)
            self._product = kernel.Product(self.parameter.data, out_features, in_features)
        else:
            self.parameter = Parameter(name, self._shape, dtype, device)

    def product(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` [T, in], in ``out`` [T, out] if given (contiguous)."""
        if self._product is not None:
            return self._product(x, bias, out)
        data = self.parameter.data
        if out is None:
            return functional.linear(x, data, bias)
        if bias is None:
            return torch.mm(x, data.t(), out=out)
        return torch.addmm(bias, x, data.t(), out=out)

    def wide_product(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` of a packed matrix in float32, not rounded, in fresh memory."""
        assert self._product is not None, "a plain weight"
        return self._product(x, wide=True)

    @property
    def packed(self) -> Tensor | None:
        return None if self._product is None else self.parameter.data

    @property
    def scales(self) -> None:
        pass

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` (int64 [T]) as [T, in], in fresh memory."""
        if self._product is not None:
            return kernel.gather_rows(
                self.parameter.data,
                ids,
                torch.empty((len(ids), self._shape[1]), dtype=self.parameter.data.dtype),
            )
        return functional.embedding(ids, self.parameter.data)

    def read(self) -> Tensor:
        """Return the weight as [out, in]: a view if storage has that layout, else a copy."""
        return self.slot("").read()

    def slots(self, module: str, start: int, length: int) -> Iterator[WeightSlot]:
        yield self.slot(f"{module}.weight", start, length)

    def parameters(self) -> Iterator[Parameter]:
        yield self.parameter

    def slot(self, checkpoint_name: str, start: int = 0, length: int | None = None) -> WeightSlot:
        """Return the slot of a checkpoint tensor, rows ``[start, start + length)`` or to the end."""
        length = self._shape[0] - start if length is None else length
        if self._product is not None:
            return PackedSlot(
                checkpoint_name, self.parameter.name, self.parameter.data, start, (length, self._shape[1])
            )
        return self.parameter.slot(checkpoint_name, start, length)
