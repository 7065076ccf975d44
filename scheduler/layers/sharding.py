"""A rank's part of a checkpoint tensor, and the slots that take the whole tensor and keep that part.

Invariants:
- A part is some ranges of rows, a range of columns, or both. Parts cover the tensor; overlaps are equal.
- Outside of the layers a tensor has the checkpoint's shape on every rank; rows not held are dropped.
- A size that does not divide is refused by its field, but for the vocabulary, of which the last rank may have
  less, and widths of FP8 blocks, of which ranks have one more or less, or none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..parallel.group import TensorParallel
from .parameters import DelegatingSlot, HalfSlot, Place, WeightSlot


@dataclass(frozen=True, slots=True)
class Window:
    """``[start, stop)`` of ``total`` rows, columns or experts."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Window":
        return cls(0, total, total)

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.length == self.total

    def times(self, factor: int) -> "Window":
        """Return the window in rows, for units of ``factor`` rows each."""
        return Window(self.start * factor, self.stop * factor, self.total * factor)

    def in_blocks(self, size: int) -> "Window":
        """Return the blocks of ``size`` that make up the window."""
        return Window(self.start // size, -(-self.stop // size), -(-self.total // size))

    def fits_blocks(self, size: int) -> bool:
        return self.start % size == 0 and (self.stop % size == 0 or self.stop == self.total)


def as_window(size: int | Window) -> Window:
    return size if isinstance(size, Window) else Window.whole(size)


def stacked(windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return the windows of several parts as those of the tensor in which these lie one after another."""
    total = sum(window.total for window in windows)
    if all(window.is_whole for window in windows):
        return (Window.whole(total),)
    found, before = [], 0
    for window in windows:
        found.append(Window(before + window.start, before + window.stop, total))
        before += window.total
    return tuple(found)


def even(total: int, parallel: TensorParallel, field: str) -> Window:
    """Return this rank's equal part of ``total``; refuse ranks that do not divide it by ``field``."""
    size = parallel.size
    if total % size:
        raise _indivisible(field, total, size, f"is not a multiple of {size}")
    return Window(parallel.rank * (total // size), (parallel.rank + 1) * (total // size), total)


def in_pieces(total: int, parallel: TensorParallel, field: str, piece: int) -> Window:
    """Return this rank's part of ``total`` in whole pieces: as :func:`even` if that cuts none.

    Otherwise ranks differ by one piece, and with fewer pieces than ranks some have nothing
    (:func:`first_with_pieces`).
    """
    ranks = parallel.size
    if piece == 1 or total % (ranks * piece) == 0:
        return even(total, parallel, field)
    pieces = -(-total // piece)
    start, stop = (min(pieces * rank // ranks * piece, total) for rank in (parallel.rank, parallel.rank + 1))
    return Window(start, stop, total)


def first_with_pieces(total: int, parallel: TensorParallel, piece: int) -> int:
    """Return the first rank that has some of ``total`` by :func:`in_pieces`."""
    return -(-parallel.size // -(-total // piece)) - 1 if piece > 1 else 0


def rounded_up(total: int, parallel: TensorParallel, field: str) -> Window:
    """Return this rank's part of ``total``: :func:`per_rank` each, the last one the rest, never empty."""
    each = per_rank(total, parallel)
    if each * (parallel.size - 1) >= total:
        raise _indivisible(field, total, parallel.size, f"leaves nothing to the last of {parallel.size}")
    return Window(parallel.rank * each, min((parallel.rank + 1) * each, total), total)


def per_rank(total: int, parallel: TensorParallel) -> int:
    return -(-total // parallel.size)


def head_windows(num_heads: int, num_kv_heads: int, parallel: TensorParallel) -> tuple[Window, Window]:
    """Return this rank's query heads, and the key and value heads that they attend with.

    With fewer of these than ranks, several ranks hold each. Heads that do not divide are refused.
    """
    size = parallel.size
    queries = even(num_heads, parallel, "num_attention_heads")
    if num_kv_heads % size == 0:
        return queries, even(num_kv_heads, parallel, "num_key_value_heads")
    if size % num_kv_heads:
        reason = f"neither divides {size} nor is a multiple of it"
        raise _indivisible("num_key_value_heads", num_kv_heads, size, reason)
    shared = parallel.rank * num_kv_heads // size
    return queries, Window(shared, shared + 1, num_kv_heads)


def require_borders(module: str, field: str, window: Window, block: int) -> None:
    """Refuse windows whose borders cut a block of a quantised weight (UNSUPPORTED_MODEL)."""
    if not window.fits_blocks(block):
        raise CaesuraError(
            ErrorCode.UNSUPPORTED_MODEL,
            f"{module} cannot be divided: {field} [{window.start}, {window.stop}) of {window.total} cut its "
            f"blocks of {block}",
            fields=["quantization_config.weight_block_size"],
        )


def _indivisible(field: str, value: int, size: int, reason: str) -> CaesuraError:
    message = f"{size} ranks cannot divide this model: {field} = {value} {reason}"
    return CaesuraError(ErrorCode.UNSUPPORTED_MODEL, message, fields=[field], value=value, ranks=size)


class ShardedSlot(DelegatingSlot):
    """A checkpoint tensor of which this rank holds ``rows`` and, of these, ``columns``."""

    __slots__ = ("_columns", "_first_rank", "_inner", "_rows")

    def __init__(
        self, inner: WeightSlot, rows: Sequence[Window], columns: Window | None, first_rank: int | None
    ) -> None:
        """``inner``: slot of the part, the ascending ``rows``. ``columns`` None: all of a row is held.

        ``first_rank``: the first of some ranks that hold the tensor alone, or None if all ranks hold it.
        """
        total = rows[0].total
        shape = (total, *inner.shape[1:]) if columns is None else (total, columns.total)
        assert inner.shape == (sum(window.length for window in rows), *inner.shape[1:]), inner.name
        assert columns is None or inner.shape[1] == columns.length, inner.name
        super().__init__(inner.name, inner.parameter, shape, inner.dtype)
        self._inner, self._rows, self._columns = inner, rows, columns
        self._first_rank = first_rank

    @property
    def owned(self) -> tuple[range, ...]:
        return tuple(range(window.start, window.stop) for window in self._rows)

    @property
    def owned_columns(self) -> range | None:
        return None if self._columns is None else range(self._columns.start, self._columns.stop)

    @property
    def digested_by(self) -> int | None:
        divides_rows = self._columns is not None or not self._inner.is_whole
        if self._first_rank is None or not (divides_rows or self.is_whole):
            return super().digested_by
        return self._first_rank

    @property
    def halves(self) -> tuple[HalfSlot, ...]:
        return self._inner.halves

    def accepts(self, dtype: torch.dtype) -> bool:
        return self._inner.accepts(dtype)

    def fills(self, dtype: torch.dtype) -> str | None:
        return self._inner.fills(dtype)

    @property
    def original_dtype(self) -> torch.dtype | None:
        return self._inner.original_dtype

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        first, last = (self._held_before(row) for row in slice(start, stop).indices(self.shape[0])[:2])
        return self._inner.read(first, max(first, last))

    def places(self, positions: Tensor) -> Iterator[Place]:
        width = prod(self.shape[1:])
        for window in self._rows:
            held = (positions >= window.start * width) & (positions < window.stop * width)
            before = self._held_before(window.start) - window.start
            if self._columns is None:
                own = positions + before * width
            else:
                rows = positions // width
                columns = positions - rows * width - self._columns.start
                held &= (columns >= 0) & (columns < self._columns.length)
                own = (rows + before) * self._columns.length + columns
            chosen = held.nonzero().squeeze(1)
            yield from among(chosen, self._inner.places(own[chosen]))

    def _held_before(self, row: int) -> int:
        return sum(min(max(row - window.start, 0), window.length) for window in self._rows)

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        for window in self._rows:
            first, last = max(start, window.start), min(start + rows.shape[0], window.stop)
            if first >= last:
                continue
            part = rows[first - start : last - start]
            if self._columns is not None:
                part = part[:, self._columns.start : self._columns.stop]
            yield self._inner, part, self._held_before(first)


def among(chosen: Tensor, places: Iterator[Place]) -> Iterator[Place]:
    """Yield ``places`` of ``chosen`` elements as those of all."""
    for place in places:
        yield place._replace(which=chosen if place.which is None else chosen[place.which])


def parts_with(positions: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each part of consecutive ``sizes`` that has ``positions``, which ascend: its number, which these
    are, and where they are in it.
    """
    ends = torch.tensor(sizes).cumsum(0)
    borders = torch.searchsorted(positions.to(torch.int64), ends).tolist()
    for number, (first, last) in enumerate(pairwise([0, *borders])):
        if first < last:
            begin = int(ends[number]) - sizes[number]
            yield number, torch.arange(first, last), positions[first:last] - begin


def sharded(
    slot: WeightSlot,
    rows: Window | Sequence[Window],
    columns: Window | None = None,
    first_rank: int | None = None,
) -> WeightSlot:
    """Return ``slot``, of the part that this rank holds, as one of the whole tensor.

    ``first_rank``: the first of some ranks that hold the tensor alone.
    """
    rows = (rows,) if isinstance(rows, Window) else rows
    if columns is not None and columns.is_whole:
        columns = None
    if rows[0].is_whole and columns is None and not first_rank:
        return slot
    return ShardedSlot(slot, rows, columns, first_rank)


class ScatteredSlot(DelegatingSlot):
    """A checkpoint tensor whose rows lie in several places."""

    __slots__ = ("_parts",)

    def __init__(self, name: str, parts: Sequence[WeightSlot]) -> None:
        rows = sum(part.shape[0] for part in parts)
        super().__init__(name, parts[0].parameter, (rows, *parts[0].shape[1:]), parts[0].dtype)
        self._parts = parts

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        for part, own, of_rows in self._places(start, start + len(rows)):
            yield part, rows[of_rows], own.start

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        places = self._places(start, self.shape[0] if stop is None else stop)
        return torch.cat([part.read(own.start, own.stop) for part, own, _ in places])

    def places(self, positions: Tensor) -> Iterator[Place]:
        sizes = [prod(part.shape) for part in self._parts]
        for number, chosen, own in parts_with(positions, sizes):
            yield from among(chosen, self._parts[number].places(own))

    def _places(self, start: int, stop: int) -> Iterator[tuple[WeightSlot, slice, slice]]:
        """Yield each part of rows ``[start, stop)``, where these are in it, and where it is among them."""
        begin = 0
        for part in self._parts:
            first, last = max(start - begin, 0), min(stop - begin, part.shape[0])
            if first < last:
                yield part, slice(first, last), slice(begin + first - start, begin + last - start)
            begin += part.shape[0]


class BesideSlot(DelegatingSlot):
    """A checkpoint tensor [n, in] whose columns lie in several places, equally many in each."""

    __slots__ = ("_parts",)

    def __init__(self, name: str, parts: Sequence[WeightSlot]) -> None:
        rows, columns = parts[0].shape
        super().__init__(name, parts[0].parameter, (rows, columns * len(parts)), parts[0].dtype)
        self._parts = parts

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        for slot, part in zip(self._parts, rows.chunk(len(self._parts), dim=1), strict=True):
            yield slot, part.contiguous(), start

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return torch.cat([part.read(start, stop) for part in self._parts], dim=1)

    def places(self, positions: Tensor) -> Iterator[Place]:
        width = self._parts[0].shape[1]
        columns = positions % self.shape[1]
        own = positions // self.shape[1] * width + columns % width
        for number, part in enumerate(self._parts):
            chosen = (columns // width == number).nonzero().squeeze(1)
            yield from among(chosen, part.places(own[chosen]))
