"""Which tensors of an update are whole, and which are due before anything is committed.

Invariants:
- A name counts as written only when all its rows are, and whatever belongs to it came in a form that goes with it.
- Of several forms of one tensor the one that came last counts: what it supersedes is neither due nor written.
"""

from dataclasses import dataclass, field

import torch

from ..layers.parameters import HalfSlot, TensorSlot
from .spellings import Stack


@dataclass(slots=True)
class Account:
    """Which tensors are whole, and which are due before anything is committed."""

    written: set[str] = field(default_factory=set)
    """A tensor together with the halves that come in its place, in whichever form it came."""
    due: set[str] = field(default_factory=set)
    """Begun, or one of two that no longer goes with the other."""
    made_together: dict[str, str] = field(default_factory=dict)
    """Each way: two tensors of the model, written by one that came."""
    halves: set[str] = field(default_factory=set)
    """Of two that come in the place of one: those that are whole and wait for the other."""
    open: tuple[str, int] | None = None
    """Name of the tensor that lacks rows, and how many are there."""

    def copy(self) -> "Account":
        """To see what would become of it; without the names that are whole."""
        return Account(set(), set(self.due), dict(self.made_together), set(self.halves), self.open)

    def due_row(self, tensor: TensorSlot | Stack, start_row: int) -> int:
        """At which row the next piece of a tensor must start; ``start_row`` 0 begins it anew. That row may be beyond those due
        where none in between is held."""
        due = self.open[1] if self.open is not None and self.is_open(tensor.name, start_row) else 0
        held = any(range(max(due, rows.start), min(start_row, rows.stop)) for rows in tensor.owned)
        return start_row if due < start_row and not held else due

    def is_open(self, name: str, start_row: int) -> bool:
        """Whether a piece goes on with the tensor that lacks rows."""
        return self.open is not None and self.open[0] == name and start_row > 0

    def begin(self, stack: Stack, start_row: int) -> None:
        """Its slots come together: from its first rows on all of them are due, whatever was there before."""
        if start_row == 0:
            names = {slot.name for slot in stack.slots}
            self.written -= names
            self.due |= names

    def go_on(self, name: str, rows_done: int, rows: int) -> None:
        """The first ``rows_done`` of ``rows`` of a tensor are there; the next piece goes on with it, if it lacks some."""
        self.open = (name, rows_done) if rows_done < rows else None

    def take(self, slot: TensorSlot, rows_done: int, rows: int) -> bool:
        """The first ``rows_done`` of ``rows`` are there, or will be in a moment; whether that is all of them."""
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
        self.go_on(name, rows_done, rows)
        return self.open is None

    def finish(self, slot: TensorSlot, dtype: torch.dtype) -> None:
        """A tensor is whole, in ``dtype``; what it makes or leaves half new is due."""
        if isinstance(slot, HalfSlot):
            self._finish_half(slot)
            return
        name, fills = slot.name, slot.fills(dtype)
        if fills is None and name not in self.made_together:
            self.written |= {name, *(half.name for half in slot.halves)}
            self.due.discard(name)
            return
        whole = {name} if fills is None else {name, fills}
        partner = self.made_together.pop(name, None)
        if partner is not None and partner != fills:
            del self.made_together[partner]
            self.written.discard(partner)
            self.due.add(partner)
        self.written |= whole
        self.due -= whole
        if fills is not None:
            self.made_together |= {name: fills, fills: name}

    def _finish_half(self, half: HalfSlot) -> None:
        self.due.discard(half.name)
        if half.other not in self.halves:
            self.halves.add(half.name)
            return
        self.halves.discard(half.other)
        self.due.discard(half.whole)
        self.written |= {half.whole, half.name, half.other}
