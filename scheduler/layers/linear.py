"""Matrix products with weights, fused where several share an input.

Invariants:
- The rest of the engine sees ``forward``, ``slots`` (writing) and ``read`` (the canonical [out, in] weight);
  only ``matrix.py`` knows how the weight is stored.
- Fused weights are stacked along the output dimension in the order of their parts.
- With several ranks each has some outputs of a product (windows of a part's rows), or some inputs (of the
  columns); in the latter case results are partial, and the caller sums them. Only rank 0 adds a bias then.
- A weight is FP8 if the checkpoint's config says so of all its parts; of some only is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from .fp8_block import Fp8Matrix
from .fp8_packed import PackedFp8Matrix, packs
from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot
from .sharding import Window, as_window, require_borders, sharded, stacked


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
    ) -> None:
        """Args:
            in_features: inputs of the checkpoint's modules; a window if the inputs are divided among ranks.
            parts: checkpoint module name (without ``.weight``) to its number of output features, in order; a
                window if they are divided, several windows for several parts, each divided by itself.

        Raises:
            CaesuraError: UNSUPPORTED_MODEL, a window cuts a block of an FP8 weight.
        """
        self._columns = as_window(in_features)
        self._parts = {part: _as_windows(size) for part, size in parts.items()}
        lengths = [_length(rows) for rows in self._parts.values()]
        self.in_features, self.out_features = self._columns.length, sum(lengths)
        self._weight: Matrix | Fp8Matrix | PackedFp8Matrix
        self._blocks: tuple[int, int] | None = None
        if all_fp8(parts, place):
            assert place.fp8 is not None
            self._blocks = place.fp8.rows, place.fp8.columns
            for part, windows in self._parts.items():
                for rows in windows:
                    require_borders(part, "rows", rows, self._blocks[0])
                require_borders(part, "columns", self._columns, self._blocks[1])
            if packs(self.in_features, place):
                self._weight = PackedFp8Matrix(f"{name}.weight", self.out_features, self.in_features, place)
            else:
                self._weight = Fp8Matrix(f"{name}.weight", lengths, self.in_features, place)
        else:
            self._weight = Matrix(f"{name}.weight", self.out_features, self.in_features, place)
        self._bias = (
            Parameter(f"{name}.bias", (self.out_features,), place.dtype, place.device) if bias else None
        )
        self._adds_bias = self._columns.is_whole or place.parallel.rank == 0

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] of this rank's features; in ``out`` if given (contiguous, same dtype).

        If the inputs are divided, the sum over all ranks is the product.
        """
        return self._weight.product(x, self.bias, out)

    @property
    def packed(self) -> Tensor | None:
        return self._weight.packed

    @property
    def scales(self) -> Tensor | None:
        return self._weight.scales

    @property
    def bias(self) -> Tensor | None:
        """[out], or None if this rank adds none."""
        return self._bias.data if self._bias is not None and self._adds_bias else None

    def read(self) -> Tensor:
        """Return this rank's [out, in]: a view if storage has that layout, else a copy."""
        return self._weight.read()

    def slots(self) -> Iterator[WeightSlot]:
        """Yield per part its weight, its scales if it is FP8, and its bias if there is one."""
        start = 0
        for part, rows in self._parts.items():
            length = _length(rows)
            slots = self._weight.slots(part, start, length)
            yield from divided(slots, rows, self._columns, self._blocks)
            if self._bias is not None:
                yield sharded(self._bias.slot(f"{part}.bias", start, length), rows)
            start += length

    def parameters(self) -> Iterator[Parameter]:
        yield from self._weight.parameters()
        if self._bias is not None:
            yield self._bias


def _as_windows(size: int | Window | Sequence[Window]) -> tuple[Window, ...]:
    return stacked((as_window(size),) if isinstance(size, int | Window) else size)


def _length(windows: Iterable[Window]) -> int:
    return sum(window.length for window in windows)


def divided(
    slots: Iterable[WeightSlot],
    rows: Window | Sequence[Window],
    columns: Window,
    blocks: tuple[int, int] | None,
) -> Iterator[WeightSlot]:
    """Yield the slots of a part of a weight as those of the whole; with ``blocks``, those of scales, too."""
    rows = (rows,) if isinstance(rows, Window) else rows
    for number, slot in enumerate(slots):
        if blocks is not None and number:
            grid = [window.in_blocks(blocks[0]) for window in rows]
            yield sharded(slot, grid, columns.in_blocks(blocks[1]))
        else:
            yield sharded(slot, rows, columns)


def all_fp8(modules: Iterable[str], place: Placement) -> bool:
    """Return True if the checkpoint holds these modules, which are stored as one, as FP8.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, some of them only.
    """
    if place.fp8 is None:
        return False
    converted = {module: place.fp8.converts(module) for module in modules}
    if len(set(converted.values())) > 1:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED_MODEL,
            f"modules that are one product must be FP8 or not together: {converted}",
            fields=["quantization_config.modules_to_not_convert"],
        )
    return all(converted.values())


class QKVLinear(Linear):
    """Query, key and value projections of one attention layer in one product."""

    def __init__(
        self,
        name: str,
        prefix: str,
        in_features: int,
        *,
        heads: Window,
        kv_heads: Window,
        head_dim: int,
        bias: bool,
        gated: bool = False,
        place: Placement,
    ) -> None:
        """Args:
        prefix: the checkpoint's attention module, which holds ``q_proj``, ``k_proj`` and ``v_proj``.
        gated: ``q_proj`` computes a gate behind each query.
        """
        kv_rows = kv_heads.times(head_dim)
        parts = {
            f"{prefix}.q_proj": heads.times(2 * head_dim if gated else head_dim),
            f"{prefix}.k_proj": kv_rows,
            f"{prefix}.v_proj": kv_rows,
        }
        super().__init__(name, in_features, parts, bias=bias, place=place)


class MergedLinear(Linear):
    """Several projections of equal width in one product, gate and up for instance."""

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        in_features: int,
        part_features: int | Window,
        *,
        place: Placement,
    ) -> None:
        super().__init__(name, in_features, dict.fromkeys(parts, part_features), place=place)
        self.part_features = as_window(part_features).length

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            y.narrow(-1, start, self.part_features)
            for start in range(0, self.out_features, self.part_features)
        )
