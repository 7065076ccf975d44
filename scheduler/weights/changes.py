"""Changes by an update: how many elements, and by how much, by group of tensors.

- Values are compared before they are written, as they are stored. ``sampled`` takes some rows of a large
  tensor, a 256th of it as it comes, for the whole.
- A tensor that is quantised on writing is not compared, and of a divided one this rank's part is.
"""

from dataclasses import dataclass, field
from math import prod, sqrt

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
class _Sums:
    elements: float = 0.0
    changed: float = 0.0
    moved: float = 0.0
    """Sum of the squares of the changes."""
    there: float = 0.0
    """Sum of the squares of the values before."""

    def add(self, other: "_Sums", factor: float = 1.0) -> None:
        self.elements += factor * other.elements
        self.changed += factor * other.changed
        self.moved += factor * other.moved
        self.there += factor * other.there

    def wire(self) -> TensorChange:
        share = self.changed / self.elements if self.elements else 0.0
        norm, before = sqrt(self.moved), sqrt(self.there)
        relative = norm / before if before else float("inf") if norm else 0.0
        return TensorChange(elements=round(self.elements), changed=share, norm=norm, rel_norm=relative)


@dataclass(slots=True)
class UpdateChanges:
    full: bool
    """True: every element is compared; else a selection."""
    is_foreseen: bool = False
    """True: all has been compared before the first write."""
    unchanged: list[str] = field(default_factory=list)
    """Names of the tensors whose bytes are the same."""
    _groups: dict[str, _Sums] = field(default_factory=dict)

    def add(self, slot: TensorSlot, rows: Tensor, start: int) -> None:
        """Compare rows that come next with what the slot holds from ``start`` on."""
        if not isinstance(slot, WeightSlot) or slot.fills(rows.dtype) is not None:
            return
        seen, columns, total = _Sums(), slot.owned_columns, 0
        width = prod(slot.shape[1:]) if columns is None else len(columns)
        for held in slot.owned:
            first, last = max(held.start, start), min(held.stop, start + num_rows(rows.shape))
            total += max(last - first, 0) * width
            if first < last:
                begin, end = self._chosen(first, last, width)
                part = rows[begin - start : end - start] if slot.shape else rows
                part = part if columns is None else part[:, columns.start : columns.stop]
                old = slot.read(begin, end)
                count, moved, there = words.difference(old, part.to(old))
                seen.add(_Sums(old.numel(), count, moved, there))
        if seen.elements:
            self._groups.setdefault(group_of(slot.name), _Sums()).add(seen, total / seen.elements)

    def add_elements(self, slot: WeightSlot, old: Tensor, new: Tensor) -> None:
        """Add those elements of a tensor that may change, before they do."""
        seen, width = _Sums(), prod(slot.shape[1:])
        for held in slot.owned:
            if held:
                values = slot.read(*self._chosen(held.start, held.stop, width))
                seen.add(_Sums(values.numel(), 0, 0, words.difference(values, values)[2]))
        changed, moved, _ = words.difference(old, new)
        sums = self._groups.setdefault(group_of(slot.name), _Sums())
        sums.add(seen, prod(slot.shape) / max(seen.elements, 1))
        sums.add(_Sums(0, changed, moved, 0))

    def _chosen(self, first: int, last: int, width: int) -> tuple[int, int]:
        """Return the rows to compare of ``[first, last)``, in its middle."""
        rows = last - first
        if self.full or rows * width <= _SMALL:
            return first, last
        length = max(1, rows // _SHARE)
        begin = first + (rows - length) // 2
        return begin, begin + length

    def report(self) -> UpdateReport:
        total = _Sums()
        for each in self._groups.values():
            total.add(each)
        return UpdateReport(
            total=total.wire(),
            groups={name: each.wire() for name, each in sorted(self._groups.items())},
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
