"""Named tensors into a model's parameters, in place; where they come from is a transport's business.

Invariants:
- :meth:`WeightLoader.check` sees names, shapes and dtypes before a byte is written, and lists every problem at once.
- A name counts as written only when all its rows are; a tensor that is being rewritten counts as not written until it
  is whole again.
- Of several ranks each takes whole tensors and keeps its part. Rows that it does not hold may be left out; a source that leaves
  out the last ones ends with a piece of no rows at the end, so a tensor is whole in one way only.
- The result depends on the tensors alone: not on how they were cut into pieces, nor on how often they were written.
- A tensor may bring another one with it (a wide float its FP8 scales), which then counts as written and must not be among
  the same specs. Of two that belong together the later form counts: what came in another form is due again, and nothing is
  committed before it has come (:meth:`WeightLoader.require_whole`).
- Two tensors may come in the place of one that the model holds (its blocks and scales), then that one counts as written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from ...io_struct import TensorSpec
from ..layers.parameters import HalfSlot, TensorSlot
from ..models.base import Weights
from ..runtime.dtypes import DTYPES, NAMES
from .account import Account
from .misfits import Misfits
from .pieces import NamedSpec, WeightPiece
from .spellings import Spellings, Stack


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """What was written; names as in the wire's WeightUpdateReqOutput."""

    written_tensors: int = 0
    """Tensors completed."""
    written_bytes: int = 0
    """Bytes in the source, before any cast; of a tensor that several ranks hold all of it."""
    changed_tensors: int = 0
    """Completed tensors that differed from what was there."""
    cast_tensors: int = 0
    """Completed tensors that were cast from another float dtype."""
    skipped_tensors: int = 0
    """Tensors that the model ignores by its own list."""

    def add(self, other: "LoadCounts") -> None:
        """Add ``other`` to these, field by field."""
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(other, counter.name))


class WeightLoader:
    """Writes pieces of checkpoint tensors into one model."""

    def __init__(self, model: Weights) -> None:
        held = model.weight_slots()
        self._required = held.keys() - model.optional_names
        self._halves = {half.name: half for slot in held.values() for half in slot.halves}
        self._slots: dict[str, TensorSlot] = {**held, **self._halves}
        self._spellings = Spellings(self._slots, model.own_name)
        self._last_half: HalfSlot | None = None
        self._is_skipped = model.is_skipped
        self._components = model.components
        self._kept = model.kept_components
        self._lost: set[str] = set()
        """Components that are not what was committed, until a complete update of them."""
        self._account = Account()
        self._changed = False  # of the tensor that is open
        self.counts = LoadCounts()
        """Since the last :meth:`take_counts`."""
        self.changed: list[str] = []
        """Names of completed tensors that differed from what was there, since then."""

    def check(self, specs: Iterable[NamedSpec], complete: bool) -> set[str]:
        """Compare what will come with what the model takes; nothing is written.

        Args:
            complete: every required tensor must be among ``specs``.

        Returns:
            The model's own names of what will come, without what it ignores.

        Raises:
            CaesuraError: WEIGHT_MISMATCH with ``missing`` and ``unexpected`` names and ``mismatched`` entries
                ``{name, expected_shape, got_shape}``, ``{name, expected_dtype, got_dtype}`` or ``{name, reason}``.
        """
        problems = Misfits(self._slots)
        seen: set[str] = set()
        filled: dict[str, str] = {}
        for spec, name, shape in self._own_tensors(specs, problems):
            slot = self._slots.get(name)
            if slot is None:
                problems.add_unexpected(spec.name, shape)
            else:
                dtype = DTYPES.get(spec.dtype)
                problems.mismatched += _mismatches(slot, shape, dtype, spec.dtype)
                if dtype is not None and (fills := slot.fills(dtype)) is not None:
                    filled[fills] = f"{name} as {spec.dtype}"
            if name in seen:
                problems.mismatched.append({"name": name, "reason": "named twice"})
            seen.add(name)
        problems.mismatched += [
            {"name": name, "reason": f"{filled[name]} brings it"} for name in sorted(seen & filled.keys())
        ]
        problems.mismatched += self._in_both_forms(seen)
        if complete:
            problems.missing = self._missing(seen | filled.keys(), self._components_of(seen))
        problems.raise_if_any(given=seen)
        return seen

    def _own_tensors(
        self, specs: Iterable[NamedSpec], problems: Misfits
    ) -> Iterator[tuple[NamedSpec, str, tuple[int, ...]]]:
        """Each with the name and shape of every tensor of the model that it stands for; what the model ignores is left out."""
        for spec in specs:
            name, shape = spec.name, tuple(spec.shape)
            if name in self._slots:
                yield spec, name, shape
                continue
            name = self._spellings.own(name)
            stack = self._spellings.stack(name)
            if stack is not None:
                if shape != stack.shape:
                    problems.mismatched.append(_misshapen(spec.name, stack.shape, shape))
                for slot in stack.slots:
                    yield spec, slot.name, slot.shape
            elif name in self._slots or not self._is_skipped(name):
                yield spec, name, shape

    def check_rows(self, specs: Iterable[TensorSpec], whole: bool) -> None:
        """Compare the rows that will come with those that are due; nothing is written. :meth:`check` has seen ``specs``.

        Args:
            whole: nothing comes after them, so no tensor may lack rows, or what belongs to it.

        Raises:
            CaesuraError: WEIGHT_MISMATCH, as :meth:`write` and :meth:`require_whole` would later.
        """
        problems, account = Misfits(self._slots), self._account.copy()
        for spec in specs:
            name = self._spellings.own(spec.name)
            total, dtype = _rows(spec.shape), DTYPES[spec.dtype]
            row_bytes = prod(spec.shape[1:]) * dtype.itemsize
            count = spec.nbytes // row_bytes if row_bytes else total
            tensor = self._spellings.stack(name) or self._slots.get(name)
            if tensor is None:
                continue
            due = account.due_row(tensor, spec.start_row)
            if spec.start_row != due:
                problems.mismatched.append(_out_of_order(spec.name, spec.start_row, due))
            elif isinstance(tensor, Stack):
                account.begin(tensor, spec.start_row)
                for part in tensor.of(range(spec.start_row, spec.start_row + count)):
                    account.take(part, _rows(part.shape), _rows(part.shape))
                    account.finish(part, dtype)
                account.go_on(name, spec.start_row + count, total)
            elif account.take(tensor, spec.start_row + count, total):
                account.finish(tensor, dtype)
        if whole and not problems.mismatched:
            problems.missing = sorted(account.due)
        problems.raise_if_any()

    @property
    def written(self) -> set[str]:
        """Names that are whole since the last :meth:`forget_written`."""
        return self._account.written

    def skip(self, name: str) -> bool:
        """Whether the model ignores this tensor; counts it if so. For transports that can pass over its bytes."""
        name = self._spellings.own(name)
        known = name in self._slots or self._spellings.stack(name) is not None
        skipped = not known and self._is_skipped(name)
        self.counts.skipped_tensors += skipped
        return skipped

    def owned(self, name: str) -> tuple[range, ...] | None:
        """The rows of a tensor that this rank holds, which is all that a source need read. None: all, or none of the model's."""
        slot = self._slots.get(self._spellings.own(name))
        return None if slot is None else slot.owned

    def write(self, piece: WeightPiece) -> None:
        """Write one piece in place, unless the same bytes are there already.

        A tensor's pieces come in row order, not interleaved with another's.

        Raises:
            CaesuraError: WEIGHT_MISMATCH, before a byte of this piece is written.
        """
        if piece.name in self._slots:  # as nearly all are
            self._write(piece)
            return
        name = self._spellings.own(piece.name)
        if (stack := self._spellings.stack(name)) is not None:
            self._require_fitting(piece, stack.shape)
            self._require_due(piece, stack)
            self._account.begin(stack, piece.start_row)
            for part in stack.pieces(piece):
                self._write(part)
            self._account.go_on(name, piece.start_row + len(piece.rows), len(stack.experts))
        elif name in self._slots or not self._is_skipped(name):
            self._write(replace(piece, name=name))
        else:
            self.counts.skipped_tensors += piece.start_row == 0

    def _write(self, piece: WeightPiece) -> None:
        """:meth:`write` under the model's own name."""
        slot = self._slot_for(piece)
        self._require_due(piece, slot)
        goes_on = self._account.is_open(piece.name, piece.start_row)
        changed = self._changed if goes_on else False
        rows_before = self._account.open[1] if goes_on and self._account.open is not None else 0
        rows_done = piece.start_row + (piece.rows.shape[0] if piece.shape else 1)
        is_whole = self._account.take(slot, rows_done, _rows(piece.shape))
        if isinstance(slot, HalfSlot):
            self._expect_other(slot)
        changed |= slot.update(piece.rows, piece.start_row, compare=not changed)
        row_bytes = prod(piece.shape[1:]) * piece.dtype.itemsize
        self.counts.written_bytes += (rows_done - rows_before) * row_bytes
        self._changed = changed
        if not is_whole:
            return
        self._account.finish(slot, piece.dtype)
        self.counts.written_tensors += 1
        if changed:
            self.counts.changed_tensors += 1
            self.changed.append(piece.name)
        self.counts.cast_tensors += piece.dtype != slot.dtype

    def missing(self, written: set[str]) -> list[str]:
        """Required names that are not in ``written``, in the model's order: what a complete update still lacks.

        Of a model of several components, those count that were written, or that are not what was committed.
        """
        return self._missing(written, self._components_of(written | self._account.due) | self._lost)

    def _missing(self, written: set[str], components: set[str]) -> list[str]:
        halves = {half.whole: half for name, half in self._halves.items() if name in written}
        found = []
        for name in self._slots:
            half = halves.get(name)
            if name not in self._required or name in written or (half and half.other in written):
                continue
            found.append(name if half is None else half.other)
        if not self._components:
            return found
        asked = components or {self._components[0]}
        return [name for name in found if _component(name) in asked]

    def _in_both_forms(self, names: set[str]) -> list[dict[str, Any]]:
        """What is wrong where a tensor is among ``names`` together with those that come in its place."""
        found = {half.whole for name, half in self._halves.items() if {name, half.whole} <= names}
        return [{"name": name, "reason": "comes in two forms"} for name in sorted(found)]

    def _expect_other(self, half: HalfSlot) -> None:
        """Of one tensor at a time what waits may be large."""
        if self._last_half is not None and self._last_half.whole != half.whole:
            self._last_half.make_room()
        self._last_half = half

    def _start_account(self) -> None:
        self._account, self._last_half = Account(), None
        for half in self._halves.values():
            half.forget()

    def _components_of(self, names: Iterable[str]) -> set[str]:
        return {_component(name) for name in names} & set(self._components)

    def require_whole(self) -> None:
        """Raise unless every tensor begun since :meth:`forget_written` is whole, and goes with what belongs to it.

        Raises:
            CaesuraError: WEIGHT_MISMATCH with the names that must still come.
        """
        Misfits(self._slots, missing=sorted(self._account.due)).raise_if_any()

    @property
    def is_whole(self) -> bool:
        """No tensor lacks rows or what belongs to it."""
        return not self._account.due

    def take_counts(self) -> LoadCounts:
        """The counts so far; counting starts again from zero."""
        counts, self.counts = self.counts, LoadCounts()
        self.changed = []
        return counts

    def forget_written(self) -> None:
        """Start a new account of which names are whole: all weights are what was committed."""
        self._start_account()
        self._lost = set()

    def lose_written(self) -> None:
        """Start a new account after a failure: what was written must be written again, all of its component."""
        self._lost |= self._components_of(self._account.written | self._account.due) or set(self._components)
        self._start_account()

    def release_written(self, *, lost: bool) -> None:
        """Start a new account when the memory of the weights goes: what was written and not committed must be written again, and
        if values on the device are ``lost``, all that has no others on the host."""
        self._lost |= self._components_of(self._account.written | self._account.due)
        if lost:
            self._lost |= set(self._components) - self._kept
        self._start_account()

    def _slot_for(self, piece: WeightPiece) -> TensorSlot:
        if piece.name not in self._slots:
            Misfits(self._slots, unexpected=[piece.name]).raise_if_any()
        slot, rows = self._slots[piece.name], piece.rows
        if rows.shape == piece.shape == slot.shape and not piece.start_row and slot.accepts(rows.dtype):
            return slot  # whole, as nearly all are
        problems = _mismatches(slot, piece.shape, rows.dtype, NAMES.get(rows.dtype, str(rows.dtype)))
        self._require_fitting(piece, piece.shape, problems)
        return slot

    def _require_due(self, piece: WeightPiece, tensor: TensorSlot | Stack) -> None:
        """Raise unless its first row is the next one of ``tensor``."""
        due = self._account.due_row(tensor, piece.start_row)
        if piece.start_row != due:
            Misfits(self._slots, mismatched=[_out_of_order(piece.name, piece.start_row, due)]).raise_if_any()

    def _require_fitting(
        self, piece: WeightPiece, shape: tuple[int, ...], problems: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Raise for these ``problems``, and unless the piece is some rows of a tensor of this shape."""
        found, rows = list(problems), piece.rows
        if piece.shape != shape:
            found.append(_misshapen(piece.name, shape, piece.shape))
        end = piece.start_row + (rows.shape[0] if rows.dim() else 1)
        same_dims = rows.dim() == len(piece.shape) and rows.shape[1:] == piece.shape[1:]
        if not same_dims or end > prod(piece.shape[:1]):
            reason = f"rows {list(rows.shape)} at row {piece.start_row} do not fit"
            found.append({"name": piece.name, "reason": reason})
        Misfits(self._slots, mismatched=found).raise_if_any()


def _component(name: str) -> str:
    return name.partition(".")[0]


def _rows(shape: Sequence[int]) -> int:
    """Of dimension 0; a scalar has one."""
    return shape[0] if shape else 1


def _out_of_order(name: str, start_row: int, due: int) -> dict[str, Any]:
    return {"name": name, "reason": f"row {start_row} came when row {due} was due"}


def _misshapen(name: str, expected: Sequence[int], got: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "expected_shape": list(expected), "got_shape": list(got)}


def _mismatches(
    slot: TensorSlot, shape: tuple[int, ...], dtype: torch.dtype | None, dtype_name: str
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if shape != slot.shape:
        found.append(_misshapen(slot.name, slot.shape, shape))
    if dtype is None or not slot.accepts(dtype):
        found.append({"name": slot.name, "expected_dtype": NAMES[slot.dtype], "got_dtype": dtype_name})
    return found
