"""Coverage of an update: which tensors are completely written, and which must still come before a commit.

- A name counts as written when all its rows are, and everything that belongs to it has come in a matching
  form. If a tensor comes in several forms, the last one counts.
- A stacked tensor is written expert by expert. All its slots are due from its first rows on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..layers.parameters import HalfSlot, TensorSlot
from .mapper import Stack


@dataclass(slots=True)
class Coverage:
    written: set[str] = field(default_factory=set)
    """Complete tensors, together with the halves that may replace them."""
    due: set[str] = field(default_factory=set)
    """Tensors that have begun, or that no longer match their partner."""
    made_together: dict[str, str] = field(default_factory=dict)
    """Pairs of tensors that one incoming tensor has written; each name maps to the other."""
    halves: set[str] = field(default_factory=set)
    """Complete halves that wait for the other half."""
    open: tuple[str, int] | None = None
    """Name of the tensor that lacks rows, and the number of rows that are there."""

    def copy_for_check(self) -> "Coverage":
        return Coverage(set(), set(self.due), dict(self.made_together), set(self.halves), self.open)

    @property
    def is_fresh(self) -> bool:
        """True if what was written says nothing about what may come."""
        return not (self.due or self.made_together or self.halves or self.open)

    def add_whole(self, slots: Sequence[TensorSlot], names: set[str]) -> None:
        """Record whole tensors that came as they are stored, without halves; ``names`` are theirs."""
        if self.made_together:
            for slot in slots:
                for _ in self.walk(slot, 0, num_rows(slot.shape), slot.dtype):
                    pass
        self.written |= names
        self.due -= names
        self.open = None

    def next_row(self, tensor: TensorSlot | Stack, start_row: int) -> int:
        """Return the row at which the next piece of ``tensor`` must start; ``start_row`` if it may.

        Row 0 begins the tensor anew. A piece may pass over rows that this rank does not hold.
        """
        due = self._rows_before(tensor.name, start_row)
        held = any(range(max(due, rows.start), min(start_row, rows.stop)) for rows in tensor.owned)
        return start_row if due < start_row and not held else due

    def walk(
        self, tensor: TensorSlot | Stack, start_row: int, count: int, dtype: torch.dtype
    ) -> Iterator[tuple[TensorSlot, int]]:
        """Record rows of ``tensor``; yield each slot, to be written then, and its number of rows so far."""
        end = start_row + count
        if not isinstance(tensor, Stack):
            before = self._rows_before(tensor.name, start_row)
            self._begin(tensor)
            self.open = (tensor.name, end) if end < num_rows(tensor.shape) else None
            yield tensor, before
            if self.open is None:
                self._finish(tensor, dtype)
            return
        if start_row == 0:
            names = {slot.name for slot in tensor.slots}
            self.written -= names
            self.due |= names
        for expert in tensor.experts[start_row:end]:
            for slot in expert:
                self._begin(slot)
                self.open = None
                yield slot, 0
                self._finish(slot, dtype)
        self.open = (tensor.name, end) if end < len(tensor.experts) else None

    def _rows_before(self, name: str, start_row: int) -> int:
        return self.open[1] if self.open is not None and self.open[0] == name and start_row > 0 else 0

    def _begin(self, slot: TensorSlot) -> None:
        name = slot.name
        if isinstance(slot, HalfSlot):
            self.written -= {slot.whole, name, slot.other}
            self.halves.discard(name)
            self.due |= {name, slot.other} - self.halves
        else:
            halves = {half.name for half in slot.halves}
            self.written -= {name, *halves}
            self.due -= halves
            self.halves -= halves
            self.due.add(name)

    def _finish(self, slot: TensorSlot, dtype: torch.dtype) -> None:
        """Record that ``slot`` is complete; a partner that it no longer matches is due."""
        if isinstance(slot, HalfSlot):
            self.due.discard(slot.name)
            if slot.other not in self.halves:
                self.halves.add(slot.name)
                return
            self.halves.discard(slot.other)
            self.due.discard(slot.whole)
            self.written |= {slot.whole, slot.name, slot.other}
            return
        name, fills = slot.name, slot.fills(dtype)
        if fills is None and name not in self.made_together:
            self.written |= {name, *(half.name for half in slot.halves)}
            self.due.discard(name)
            return
        complete = {name} if fills is None else {name, fills}
        partner = self.made_together.pop(name, None)
        if partner is not None and partner != fills:
            del self.made_together[partner]
            self.written.discard(partner)
            self.due.add(partner)
        self.written |= complete
        self.due -= complete
        if fills is not None:
            self.made_together |= {name: fills, fills: name}


def num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1
