"""Digests of the checkpoint tensors that this rank holds, kept as they are written.

- The values that came are digested, cast as they are stored, so a digest depends on neither transport
  nor layout. A tensor that is quantised on writing is digested as it came, or as its values are kept.
- Each rank digests the rows that it holds. Rows that several hold count once; those that a group of ranks
  holds alike are left to its first rank (``TensorSlot.digested_by``).
- A complete tensor's digest is never changed, but replaced: a copy of the whole costs a dictionary.
"""

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
import torch
from torch import Tensor

from ...transfer import words
from ...transfer.weight_digest import Copy, TensorDigest, weights_digest
from ..layers.parameters import HalfSlot, TensorSlot, WeightSlot
from ..runtime.dtypes import NAMES
from .coverage import num_rows


class DigestedRows(msgspec.Struct, array_like=True, frozen=True):
    """Lanes of rows ``[start, stop)`` of a tensor, as a worker tells rank 0."""

    name: str
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]
    lanes: tuple[int, ...]


class WeightDigests:
    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._held: dict[str, dict[range, TensorDigest]] = {}
        """Digests of the complete tensors, by rows."""
        self._open: dict[range, TensorDigest] = {}
        """Digests of the tensor that lacks rows."""

    @property
    def can_copy(self) -> bool:
        """True if :meth:`add` can copy rows of tensors that this rank holds completely."""
        return self._rank == 0 and words.library() is not None

    def add(
        self, slot: TensorSlot, rows: Tensor, start: int, *, begins: bool, copy: Copy | None = None
    ) -> None:
        """Add rows that are written from ``start`` on; ``begins``: they are the first ones.

        With ``copy`` they are written here: a row is read once for both.
        """
        stored = slot.kept_dtype(rows.dtype)
        if begins:
            self._open = {
                held: TensorDigest(NAMES[stored], slot.shape)
                for held in slot.owned
                if self._counts(slot, held)
            }
        width, count = prod(slot.shape[1:]), num_rows(rows.shape)
        for held, digest in self._open.items():
            first, last = max(held.start, start), min(held.stop, start + count)
            if copy is not None:
                digest.add_copied(start * width, rows, copy)
            elif first < last:
                part = rows if last - first == count else rows[first - start : last - start]
                digest.add(first * width, part.to(stored))

    def _counts(self, slot: TensorSlot, held: range) -> bool:
        return bool(held) and slot.digested_by in (None, self._rank)

    def finish(self, slot: TensorSlot, dtype: torch.dtype) -> None:
        """Record that ``slot`` is complete, written from ``dtype``; what it replaces has no digest now."""
        fills = slot.fills(dtype)
        replaced = [slot.whole] if isinstance(slot, HalfSlot) else [half.name for half in slot.halves]
        for name in replaced if fills is None else [*replaced, fills]:
            self._held.pop(name, None)
        self._held[slot.name], self._open = self._open, {}

    def replace(self, digests: Mapping[str, dict[range, TensorDigest]]) -> None:
        """Record digests of whole tensors, as they are stored, that this rank alone holds or digests."""
        self._held.update(digests)

    def have(self, name: str, dtype: str) -> bool:
        """Return True if ``name`` is digested by itself, as ``dtype`` where this rank has rows of it."""
        digests = self._held.get(name)
        return digests is not None and all(digest.dtype == dtype for digest in digests.values())

    def change(self, slot: WeightSlot, positions: Tensor, old: Tensor, new: Tensor) -> None:
        """Replace elements at flat ``positions``, ascending, that this rank holds; values are as digested.

        Rank 0 has digested all of a tensor that is divided within rows, and other ranks add their changes.
        """
        width, digests = prod(slot.shape[1:]), dict(self._held[slot.name])
        if not (digests or slot.is_whole):
            digests[range(-1 - self._rank, -self._rank)] = TensorDigest(NAMES[new.dtype], slot.shape)
        for held, digest in digests.items():
            first, last = 0, len(positions)
            if held.start >= 0:
                edges = torch.tensor([held.start * width, held.stop * width], device=positions.device)
                first, last = torch.searchsorted(positions, edges.to(positions.dtype)).tolist()
            digests[held] = changed = digest.copy()
            changed.change(positions[first:last], old[first:last], new[first:last])
        self._held[slot.name] = digests

    def copy(self) -> "WeightDigests":
        """Return a copy, which tells what a change would lead to."""
        copied = WeightDigests(self._rank)
        copied._held = dict(self._held)
        return copied

    def rows(self) -> list[DigestedRows]:
        return [
            DigestedRows(name, held.start, held.stop, digest.dtype, digest.shape, digest.settle())
            for name, digests in self._held.items()
            for held, digest in digests.items()
        ]

    def total(self, elsewhere: Sequence[list[DigestedRows]] = ()) -> str:
        """Return the digest of all weights, with the rows that the workers hold."""
        found = self._held
        if elsewhere:
            found = {name: {**each} for name, each in found.items()}
        for each in (each for rows in elsewhere for each in rows):
            digest = TensorDigest(each.dtype, each.shape, each.lanes)
            found.setdefault(each.name, {}).setdefault(range(each.start, each.stop), digest)
        return weights_digest({name: _whole([*each.values()]) for name, each in found.items() if each})


def _whole(parts: Sequence[TensorDigest]) -> TensorDigest:
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].copy()
    for part in parts[1:]:
        whole.merge(part.settle())
    return whole
