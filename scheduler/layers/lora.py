"""Low-rank adapters beside the products with weights (LoRA: Hu et al., 2021, arXiv:2106.09685).

Invariants:
- ``y += (x @ A.T) * scale @ B.T`` for the rows of each adapter; rows without one have the base's bits. Where
  products are packed, a row's bits do not depend on the rows beside it.
- Memory of every slot is allocated once, for the largest rank; a product has the rank of its adapter.
- A slot is written while no step reads it; whoever publishes it decides from when on one does.
- With several ranks, each has the rows of B or the columns of A that belong to its part of the weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, best
from ..kernels import linear as kernel
from ..memory.residency import nobody
from .parameters import Parameter, Placement
from .sharding import Window

if TYPE_CHECKING:
    from ..execution.forward import AdapterRows


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's factors of an adapter, on the host in the checkpoint's layout."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float
    """Factor of the product: alpha / rank, or alpha / sqrt(rank)."""


class _Factor:
    """Memory for one matrix of at most ``outputs`` x ``inputs`` in each of ``slots``."""

    def __init__(self, name: str, outputs: int, inputs: int, slots: int, place: Placement) -> None:
        self._packs = best("linear", place.device, place.dtype) != TORCH
        shape = kernel.storage_shape(outputs, inputs, place.dtype) if self._packs else (outputs, inputs)
        size = -(-shape[0] * shape[1] * place.dtype.itemsize // 64) * 64 // place.dtype.itemsize
        self._data = Parameter(name, (slots, size), place.dtype, place.device).data
        self._products: list[kernel.Product | Tensor | None] = [None] * slots

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def write(self, slot: int, rows: Tensor) -> None:
        outputs, inputs = rows.shape
        data = self._data[slot]
        rows = rows.to(device=data.device, dtype=data.dtype).contiguous()
        if not self._packs:
            self._products[slot] = plain = data[: rows.numel()].view(outputs, inputs)
            plain.copy_(rows)
            return
        height, width = kernel.storage_shape(outputs, inputs, data.dtype)
        storage = data[: height * width].view(height, width)
        storage.zero_()
        kernel.pack_rows(storage, rows, 0)
        self._products[slot] = kernel.Product(storage, outputs, inputs)

    def product(self, slot: int, x: Tensor) -> Tensor:
        found = self._products[slot]
        if isinstance(found, kernel.Product):
            return found(x)
        assert found is not None, "a slot that was never written"
        return functional.linear(x, found)


class LinearAdapters:
    """The adapters of one fused product: of each slot, factors for those of its modules that it changes."""

    def __init__(
        self,
        slots: "AdapterSlots",
        name: str,
        parts: Mapping[str, Sequence[Window]],
        columns: Window,
        place: Placement,
    ) -> None:
        self._slots, self._columns, self._parts = slots, columns, parts
        rank = slots.max_rank
        self._shrink = _Factor(f"{name}.lora_A", rank * len(parts), columns.length, slots.count, place)
        self._expand = {
            part: _Factor(f"{name}.lora_B.{part}", _length(rows), rank, slots.count, place)
            for part, rows in parts.items()
        }
        self._in_slot: list[list[tuple[str, int, float]]] = [[] for _ in range(slots.count)]
        """Of each slot the modules that it changes, with rank and scale, in the order of their rows in A."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield each module with the (outputs, inputs) of its whole weight."""
        for part, rows in self._parts.items():
            yield part, (rows[0].total, self._columns.total)

    @property
    def nbytes(self) -> int:
        return self._shrink.nbytes + sum(factor.nbytes for factor in self._expand.values())

    def write(self, slot: int, factors: Mapping[str, Factors]) -> None:
        given = {part: factors[part] for part in self._parts if part in factors}
        self._in_slot[slot] = [(part, len(each.a), each.scale) for part, each in given.items()]
        if not given:
            return
        own = slice(self._columns.start, self._columns.stop)
        self._shrink.write(slot, torch.cat([each.a[:, own] for each in given.values()]))
        for part, each in given.items():
            windows = self._parts[part]
            self._expand[part].write(slot, torch.cat([each.b[rows.start : rows.stop] for rows in windows]))

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the adapters' part of the product of ``x`` [T, inputs] to ``out`` [T, outputs]."""
        for slot, tokens in self._slots.rows:
            if not self._in_slot[slot]:
                continue
            of_slot = x if tokens is None else x.index_select(0, tokens)
            shrunk, at = self._shrink.product(slot, of_slot), 0
            for part, rank, scale in self._in_slot[slot]:
                factor = shrunk[:, at : at + rank].mul_(scale)
                at += rank
                change = self._expand[part].product(slot, factor)
                start, length = self._start(part), change.shape[1]
                columns = out[:, start : start + length]
                if tokens is None:
                    columns.add_(change)
                else:
                    columns.index_add_(0, tokens, change)

    def _start(self, part: str) -> int:
        start = 0
        for name, rows in self._parts.items():
            if name == part:
                return start
            start += _length(rows)
        raise AssertionError(part)


def _length(rows: Sequence[Window]) -> int:
    return sum(window.length for window in rows)


class AdapterSlots:
    """The adapter slots of one model, which its products find through their placement."""

    def __init__(self, count: int, max_rank: int) -> None:
        self.count, self.max_rank = count, max_rank
        self.rows: AdapterRows = ()
        """Adapters of the step that is computed; set by the runner."""
        self.products: list[LinearAdapters] = []

    def of(
        self, name: str, parts: Mapping[str, Sequence[Window]], columns: Window, place: Placement
    ) -> LinearAdapters:
        with nobody():  # kept when the memory of the weights is released
            self.products.append(LinearAdapters(self, name, parts, columns, place))
        return self.products[-1]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each module that an adapter can change, by its checkpoint name."""
        return {part: shape for product in self.products for part, shape in product.shapes()}

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products)

    def write(self, slot: int, factors: Mapping[str, Factors]) -> Iterator[None]:
        """Write an adapter into a slot that no step reads, in pieces, yielding between them."""
        for product in self.products:
            product.write(slot, factors)
            yield
