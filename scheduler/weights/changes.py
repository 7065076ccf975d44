"""Changes by an update: how many elements, and by how much, by group of tensors.

- Values are compared before they are written, as they are stored. ``sampled`` takes some rows of a large
  tensor, a 256th of it as it comes, for the whole.
- A tensor that is quantised on writing is not compared.
- Each rank compares the parts that it holds. A part that several hold counts once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorChange, UpdateReport
from ...transfer import words
from ..layers.parameters import TensorSlot, WeightSlot
from .coverage import num_rows

NAMED = 20
_SMALL = 1 << 13
"""Elements that are compared without a selection."""
_SHARE = 256
_GROUPS = (
    ("norms", ("norm",)),
    ("experts", ("experts",)),
    ("embeddings", ("embed",)),
    ("head", ("lm_head",)),
    ("attention", ("attn", "attention")),
    ("mlp", ("mlp", "feed_forward", ".ff.")),
)
"""Group of a tensor: the first of which its name has a part."""


@dataclass(slots=True)
class Sums:
    elements: float = 0.0
    changed: float = 0.0
    moved: float = 0.0
    """Sum of the squares of the changes."""
    there: float = 0.0
    """Sum of the squares of the values before."""

    def add(self, other: "Sums", factor: float = 1.0) -> None:
        self.elements += factor * other.elements
        self.changed += factor * other.changed
        self.moved += factor * other.moved
        self.there += factor * other.there

    def wire(self) -> TensorChange:
        share = self.changed / self.elements if self.elements else 0.0
        norm, before = sqrt(self.moved), sqrt(self.there)
        relative = norm / before if before else float("inf") if norm else 0.0
        return TensorChange(elements=round(self.elements), changed=share, norm=norm, rel_norm=relative)


class Part(NamedTuple):
    """Rows and columns ``[start, stop)`` of a tensor."""

    name: str
    start: int
    stop: int
    first_column: int
    stop_column: int

    @property
    def elements(self) -> int:
        return (self.stop - self.start) * (self.stop_column - self.first_column)

    @staticmethod
    def of(slot: WeightSlot, held: range) -> "Part":
        columns = slot.owned_columns or range(prod(slot.shape[1:]))
        return Part(slot.name, held.start, held.stop, columns.start, columns.stop)


Compared = list[tuple[Part, Sums]]


@dataclass(slots=True)
class UpdateChanges:
    full: bool
    """True: every element is compared; else a selection."""
    is_foreseen: bool = False
    """True: all has been compared before the first write."""
    unchanged: list[str] = field(default_factory=list)
    """Names of the tensors whose bytes are the same."""
    _parts: dict[Part, Sums] = field(default_factory=dict)
    _elsewhere: dict[Part, Sums] = field(default_factory=dict)
    """Parts that other ranks hold."""

    def add(self, slot: TensorSlot, rows: Tensor, start: int) -> None:
        """Compare rows that come next with what the slot holds from ``start`` on."""
        if not isinstance(slot, WeightSlot) or slot.fills(rows.dtype) is not None:
            return
        columns = slot.owned_columns
        width = prod(slot.shape[1:]) if columns is None else len(columns)
        for held in slot.owned:
            first, last = max(held.start, start), min(held.stop, start + num_rows(rows.shape))
            if first < last:
                begin, end = self._chosen(first, last, width)
                part = rows[begin - start : end - start] if slot.shape else rows
                part = part if columns is None else part[:, columns.start : columns.stop]
                old = slot.read(begin, end)
                seen = Sums(old.numel(), *words.difference(old, part.to(old)))
                if seen.elements:
                    sums = self._parts.setdefault(Part.of(slot, held), Sums())
                    sums.add(seen, (last - first) * width / seen.elements)

    def add_elements(self, slot: WeightSlot, positions: Tensor, old: Tensor, new: Tensor) -> None:
        """Add elements that may change at flat ``positions``, ascending, with all others that are held."""
        for held in filter(None, slot.owned):
            part = Part.of(slot, held)
            values = slot.read(*self._chosen(held.start, held.stop, part.stop_column - part.first_column))
            seen = Sums(values.numel(), 0, 0, words.difference(values, values)[2])
            edges = torch.tensor([held.start, held.stop], device=positions.device) * prod(slot.shape[1:])
            first, last = torch.searchsorted(positions, edges.to(positions.dtype)).tolist()
            changed, moved, _ = words.difference(old[first:last], new[first:last])
            sums = self._parts.setdefault(part, Sums())
            sums.add(seen, part.elements / max(seen.elements, 1))
            sums.add(Sums(0, changed, moved, 0))

    def take(self) -> Compared:
        """Return the parts that were compared, and forget them."""
        parts, self._parts = [*self._parts.items()], {}
        return parts

    def add_elsewhere(self, ranks: Iterable[Compared]) -> None:
        """Add what each other rank has compared of the same tensors as this one."""
        once = {part: sums for parts in ranks for part, sums in parts if part not in self._parts}
        for part, sums in once.items():
            self._elsewhere.setdefault(part, Sums()).add(sums)

    def _chosen(self, first: int, last: int, width: int) -> tuple[int, int]:
        """Return the rows to compare of ``[first, last)``, in its middle."""
        rows = last - first
        if self.full or rows * width <= _SMALL:
            return first, last
        length = max(1, rows // _SHARE)
        begin = first + (rows - length) // 2
        return begin, begin + length

    def report(self) -> UpdateReport:
        total, groups = Sums(), dict[str, Sums]()
        for part, sums in (*self._parts.items(), *self._elsewhere.items()):
            groups.setdefault(group_of(part.name), Sums()).add(sums)
            total.add(sums)
        return UpdateReport(
            total=total.wire(),
            groups={name: each.wire() for name, each in sorted(groups.items())},
            unchanged=self.unchanged[:NAMED],
            unchanged_tensors=len(self.unchanged),
            sampled=not self.full,
        )


def group_of(name: str) -> str:
    return next((group for group, parts in _GROUPS if any(part in name for part in parts)), "others")


def unusual(report: UpdateReport, min_changed: float | None, max_rel_norm: float | None) -> list[str]:
    """Return what of a report is beyond the bounds, as text."""
    found = []
    if min_changed is not None and not report.total.changed >= min_changed:
        found.append(f"{report.total.changed:.3%} of the elements changed, less than {min_changed:.3%}")
    if max_rel_norm is not None:
        found += [
            f"the change of {name} has {each.rel_norm:.3g} of their norm, more than {max_rel_norm:.3g}"
            for name, each in report.groups.items()
            if not each.rel_norm <= max_rel_norm
        ]
    return found


def refused(report: UpdateReport, reasons: list[str]) -> CaesuraError:
    return CaesuraError(
        ErrorCode.UPDATE_REFUSED,
        f"the update is beyond the bounds: {'; '.join(reasons)}",
        changed=report.total.changed,
        rel_norm={name: each.rel_norm for name, each in report.groups.items()},
    )
