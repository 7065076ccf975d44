"""Matrix products with weights, fused where several share an input.

Invariants:
- The engine sees ``forward`` and ``slots``; only ``matrix.py`` knows how the weight is stored.
- Fused weights are stacked along the output dimension in the order of their parts.
- Each rank has some outputs (windows of a part's rows), or some inputs (of the columns); in the latter case
  results are partial, the caller sums them, and only rank 0 adds a bias.
- A weight is FP8 (or int8) if the checkpoint's config says so of all its parts; of some only is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from .matrix import Matrix, scaled_matrix
from .parameters import Parameter, Placement, ScaleBlocks, WeightSlot
from .sharding import Window, as_window, require_borders, sharded, stacked

if TYPE_CHECKING:
    from .fp8_products import Quantizer, Rows
    from .lora import LinearAdapters
    from .scaled_blocks import ScaledMatrix

PackedTensors = dict[str, Any]
"""Tensors, or None, by the names of :class:`~..kernels.decoder_layers.LayerTensors`."""


class Linear:
    """``x @ weight.T + bias``, its weight stacked from one or more checkpoint modules."""

    def __init__(
        self,
        name: str,
        in_features: int | Window,
        parts: Mapping[str, int | Window | Sequence[Window]],
        *,
        bias: bool = False,
        place: Placement,
        first_rank: int | None = None,
    ) -> None:
        """Refuse a window that cuts a block of an FP8 weight (UNSUPPORTED_MODEL); windows are of this rank.

        ``parts``: checkpoint module name (without ``.weight``) to its output features, in order; several
        windows are each divided by itself. ``first_rank``: the first of some ranks that hold the weight
        alone.
        """
        self._columns, self._first_rank = as_window(in_features), first_rank
        self._parts = {
            part: stacked((as_window(size),) if isinstance(size, int | Window) else size)
            for part, size in parts.items()
        }
        lengths = [_length(rows) for rows in self._parts.values()]
        self.in_features, self.out_features = self._columns.length, sum(lengths)
        self._weight: Matrix | ScaledMatrix
        self._blocks = blocks = scale_blocks(parts, place)
        if blocks is not None:
            for part, windows in self._parts.items():
                for rows in windows:
                    require_borders(part, "rows", rows, blocks.rows)
                require_borders(part, "columns", self._columns, blocks.columns)
            self._weight = scaled_matrix(f"{name}.weight", lengths, self.in_features, blocks, place)
        else:
            self._weight = Matrix(f"{name}.weight", self.out_features, self.in_features, place)
        self._bias = (
            Parameter(f"{name}.bias", (self.out_features,), place.dtype, place.device) if bias else None
        )
        self._adds_bias = self._columns.is_whole or place.parallel.rank == 0
        self.adapters: LinearAdapters | None = None
        if place.adapters is not None:
            self.adapters = place.adapters.of(name, self._parts, self._columns, place)

    @property
    def quantizer(self) -> "Quantizer | None":
        """Return what quantises rows where they come from; None: :meth:`forward` takes them as they are."""
        matrix = self._weight
        return None if isinstance(matrix, Matrix) or self.adapters is not None else matrix.quantizer

    def forward(self, x: "Rows", out: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] of this rank's features; divided inputs give partial sums."""
        if not isinstance(x, Tensor):
            assert not isinstance(self._weight, Matrix), "quantised by its quantizer"
            return self._weight.product(x, self.bias, out)
        out = self._weight.product(x, self.bias, out)
        if self.adapters is not None:
            self.adapters.add(x, out)
        return out

    @property
    def packed(self) -> Tensor | None:
        """Packed storage of the weight, or None if it is stored otherwise."""
        return self._weight.packed

    def packed_as(self, name: str, *, bias: bool = False) -> PackedTensors | None:
        """Return storage, scales and ``bias`` by ``name``, or None if the weight is not packed."""
        if self._weight.packed is None:
            return None
        found: PackedTensors = {name: self._weight.packed, f"{name}_scales": self._weight.scales}
        return found | {f"{name}_bias": self.bias} if bias else found

    @property
    def bias(self) -> Tensor | None:
        """[out], or None if this rank adds none."""
        return self._bias.data if self._bias is not None and self._adds_bias else None

    def slots(self) -> Iterator[WeightSlot]:
        """Yield per part its weight, its scales if it is FP8, and its bias if there is one."""
        start = 0
        for part, rows in self._parts.items():
            length = _length(rows)
            slots = self._weight.slots(part, start, length)
            yield from divided(slots, rows, self._columns, self._blocks, self._first_rank)
            if self._bias is not None:
                yield sharded(self._bias.slot(f"{part}.bias", start, length), rows)
            start += length

    def parameters(self) -> Iterator[Parameter]:
        yield from self._weight.parameters()
        if self._bias is not None:
            yield self._bias


def _length(windows: Iterable[Window]) -> int:
    return sum(window.length for window in windows)


def divided(
    slots: Iterable[WeightSlot],
    rows: Window | Sequence[Window],
    columns: Window,
    blocks: ScaleBlocks | None,
    first_rank: int | None = None,
) -> Iterator[WeightSlot]:
    """Yield the slots of a part of a weight as those of the whole; with ``blocks``, those of scales, too.

    ``first_rank``: the first of some ranks that hold the weight alone.
    """
    rows = (rows,) if isinstance(rows, Window) else rows
    for number, slot in enumerate(slots):
        if blocks is not None and number:
            grid = [window.in_blocks(blocks.rows) for window in rows]
            yield sharded(slot, grid, columns.in_blocks(blocks.columns), first_rank)
        else:
            yield sharded(slot, rows, columns, first_rank)


def scale_blocks(modules: Iterable[str], place: Placement) -> ScaleBlocks | None:
    """Return the blocks of modules stored as one, or None; UNSUPPORTED_MODEL if only some have them."""
    if place.blocks is None:
        return None
    converted = {module: place.blocks.converts(module) for module in modules}
    if len(set(converted.values())) > 1:
        reason = f"modules that are one product must be quantised together or not at all: {converted}"
        raise CaesuraError(
            ErrorCode.UNSUPPORTED_MODEL, reason, fields=["quantization_config.modules_to_not_convert"]
        )
    return place.blocks if all(converted.values()) else None
