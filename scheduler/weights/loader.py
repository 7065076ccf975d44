"""Writes named tensors into a model's parameters, in place.

- :meth:`WeightLoader.check` is a dry run of :meth:`WeightLoader.write`: it walks the same tensors and slots
  before a byte is written, and lists every problem at once.
- Each of several ranks takes whole tensors and keeps its part. Rows that it does not hold may be left out;
  a source that leaves out the last ones ends with a piece of no rows at the end.
- The result depends on the tensors alone, not on how they were cut or how often they were written.
- A tensor may bring another one with it (a wide float its FP8 scales), which must not be among the same
  specs. Two tensors may replace one that the model holds (blocks and scales); together they count as that
  one.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ..layers.parameters import HalfSlot, TensorSlot, WeightSlot
from ..models.causal_lm import Weights
from ..observability.stage_profiler import StageProfiler
from ..runtime.dtypes import DTYPES, NAMES
from .changes import UpdateChanges
from .coverage import Coverage, num_rows
from .digests import WeightDigests
from .mapper import Stack, WeightsMapper
from .mismatches import Mismatches
from .source import (
    BufferSource,
    BySpecs,
    Filled,
    Fitting,
    NamedSpec,
    Pieces,
    WeightPiece,
    WeightSource,
)
from .write_plan import PlannedWrite, Step, steps

WRITE_S = 0.002
"""Seconds for which :func:`write_some` writes: a turn of the loop costs as much as a small piece."""

END: Any = object()


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """Counters of what was written, named as in the wire's WeightUpdateReqOutput."""

    written_tensors: int = 0
    written_bytes: int = 0
    """Bytes in the source, before any cast; of the whole tensor if ranks share it."""
    changed_tensors: int = 0
    cast_tensors: int = 0
    skipped_tensors: int = 0

    def add(self, other: "LoadCounts") -> None:
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(other, counter.name))


class WeightLoader:
    is_staging = False
    """True if pieces are staged instead of written."""

    def __init__(self, model: Weights, digests: WeightDigests | None = None) -> None:
        """``digests`` follow what is written; None: nothing is digested."""
        held = model.weight_slots()
        self._required = held.keys() - model.optional_names
        self._halves = {half.name: half for slot in held.values() for half in slot.halves}
        self._slots: dict[str, TensorSlot] = {**held, **self._halves}
        self._mapper = WeightsMapper(self._slots, model.own_name)
        self._last_half: HalfSlot | None = None
        self._is_skipped = model.is_skipped
        self._components = model.components
        self._kept = model.kept_components
        self._lost: set[str] = set()
        """Components that differ from what was committed, until a complete update of them."""
        self._coverage = Coverage()
        self._changed = False  # of the tensor that lacks rows
        self._plans: BySpecs[list[Step]] = BySpecs()
        self._fitting: Fitting = BySpecs()
        self._checked: defaultdict[tuple[bool, bool], BySpecs[frozenset[str]]] = defaultdict(BySpecs)
        """Results of :meth:`check` while nothing was due, by its other arguments."""
        self.digests = digests
        self.changes: UpdateChanges | None = None
        """Compares what is written with what was there, during an update with a report."""
        self.counts = LoadCounts()
        self.changed: list[str] = []
        """Names of the tensors that ``changed_tensors`` counts."""

    def check(self, specs: Iterable[NamedSpec], complete: bool, *, last: bool = False) -> set[str]:
        """Return the model's names of the tensors that ``specs`` write, without those that it ignores.

        ``complete``: every parameter must come whole; else ``specs`` are :class:`TensorSpec`. ``last``: no
        tensor may lack rows or a partner. Raises WEIGHT_MISMATCH with ``missing``, ``unexpected``,
        ``mismatched`` (``{name, expected_shape, got_shape}``, ``{name, expected_dtype, got_dtype}`` or
        ``{name, reason}``).
        """
        depends_on_specs_alone = self._coverage.is_fresh and not self.is_staging
        listed = specs if depends_on_specs_alone and isinstance(specs, list) else []
        if (known := self._checked[complete, last].get(listed)) is not None:
            return set(known[1])
        found, disorder = Mismatches(self._slots), Mismatches(self._slots)
        coverage = self._coverage.copy_for_check()
        seen: set[str] = set()
        brought: dict[str, str] = {}
        for spec in specs:
            name, tensor = self._mapper.find(spec.name)
            if tensor is None and self._is_skipped(name):
                continue
            names = [name] if tensor is None else [slot.name for slot in slots_of(tensor)]
            twice = seen.intersection(names)
            seen.update(names)
            if tensor is None:
                found.add_unexpected(spec.name, spec.shape)
            else:
                dtype = DTYPES.get(spec.dtype)
                _compare(tensor, spec.name, tuple(spec.shape), dtype, spec.dtype, found)
                if dtype is not None:
                    brought |= {
                        fills: f"{slot.name} as {spec.dtype}"
                        for slot in slots_of(tensor)
                        if (fills := slot.fills(dtype))
                    }
                if not (complete or found.any):
                    assert isinstance(spec, TensorSpec)
                    self._walk(spec, tensor, coverage, disorder)
            found.mismatched += [{"name": each, "reason": "named twice"} for each in names if each in twice]
        for name in sorted(seen & brought.keys()):
            found.add(name, reason=f"{brought[name]} brings it")
        for name in sorted({half.whole for name, half in self._halves.items() if {name, half.whole} <= seen}):
            found.add(name, reason="comes in two forms")
        if complete:
            found.missing = self._missing(seen | brought.keys(), self._components_of(seen))
        found.raise_if_any(given=seen)
        if last and not disorder.any:
            disorder.missing = sorted(coverage.due)
        disorder.raise_if_any()
        self._checked[complete, last].put(listed, frozenset(seen))
        return seen

    def _walk(
        self, spec: TensorSpec, tensor: TensorSlot | Stack, coverage: Coverage, disorder: Mismatches
    ) -> None:
        if spec.count is not None:
            disorder.add(spec.name, reason="is sparse, and the update says no base (delta)")
            return
        dtype = DTYPES[spec.dtype]
        row_bytes = prod(spec.shape[1:]) * dtype.itemsize
        count = spec.nbytes // row_bytes if row_bytes else num_rows(spec.shape)
        due = coverage.next_row(tensor, spec.start_row)
        if spec.start_row != due:
            disorder.add(spec.name, reason=_out_of_order(spec.start_row, due))
            return
        for _ in coverage.walk(tensor, spec.start_row, count, dtype):
            pass

    def pieces(self, source: WeightSource, bucket_bytes: int) -> Pieces:
        """Return the pieces of ``source`` on the host; those of a buffer may be :class:`PlannedWrite`."""
        can_plan = self.digests is not None and self.digests.can_copy and not self.is_staging
        if can_plan and isinstance(source, BufferSource) and source.is_one_buffer:
            return self._planned(source, bucket_bytes)
        filled: Callable[..., Filled] | None = getattr(source, "filled", None)
        if can_plan and filled is not None:
            return self._planned_by_bucket(source.name, filled(bucket_bytes, self.skip), bucket_bytes)
        return source.pieces(bucket_bytes, self.skip)

    def _planned_by_bucket(self, name: str, filled: Filled, bucket_bytes: int) -> Generator[Any, None, None]:
        for places, bucket in filled:
            if len(places) == 1:
                yield places[0].piece(bucket)
                continue
            specs = [place.spec() for place in places]
            source = BufferSource(name, specs, [bucket.numpy().data], fitting=self._fitting)
            yield from self._planned(source, bucket_bytes)

    def _planned(self, source: BufferSource, bucket_bytes: int) -> Generator[Any, None, None]:
        if self.changes is not None:  # known when the first piece is asked for
            yield from source.pieces(bucket_bytes, self.skip)
            return
        [buffer] = source.buffers
        assert isinstance(buffer, memoryview), "as it is one"
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        known = self._plans.get(source.specs)
        planned = [] if known is None else known[1]
        if known is None or not all(step.holds for step in planned if isinstance(step, PlannedWrite)):
            planned = list(steps(source.specs, self._mapper.find, buffer))
            self._plans.put(source.specs, planned)
        for step in planned:
            if isinstance(step, PlannedWrite):
                step.buffer = data
                try:
                    yield step
                finally:
                    step.buffer = None  # its owner's to unmap
            elif not self.skip(step.name):
                yield from source.pieces_of(step, bucket_bytes)

    def _write_planned(self, planned: PlannedWrite) -> None:
        assert self.digests is not None, "nothing is planned without them"
        digests, changed = planned.write()
        self.digests.replace(digests)
        self._coverage.add_whole(planned.slots, planned.names)
        self.counts.written_bytes += planned.nbytes
        self.counts.written_tensors += len(planned.slots)
        self.counts.changed_tensors += len(changed)
        self.changed += changed

    def write(self, piece: WeightPiece | PlannedWrite) -> None:
        """Write one piece in place. A tensor's pieces come in row order; a refused one writes nothing."""
        if isinstance(piece, PlannedWrite):
            self._write_planned(piece)
            return
        name, tensor = self._mapper.find(piece.name)
        if tensor is None:
            if self._is_skipped(name):
                self.counts.skipped_tensors += piece.start_row == 0
                return
            Mismatches(self._slots, unexpected=[piece.name]).raise_if_any()
        assert tensor is not None
        start_row = piece.start_row
        whole = piece.rows.shape == piece.shape == tensor.shape and not start_row
        if not (whole and isinstance(tensor, TensorSlot) and tensor.accepts(piece.rows.dtype)):
            self._require_fitting(piece, tensor)
        due = self._coverage.next_row(tensor, start_row)
        if start_row != due:
            disorder = Mismatches(self._slots)
            disorder.add(piece.name, reason=_out_of_order(start_row, due))
            disorder.raise_if_any()
        count = piece.rows.shape[0] if piece.shape else 1
        walk = self._coverage.walk(tensor, start_row, count, piece.dtype)
        for (slot, before), (rows, start) in zip(walk, _parts(tensor, piece), strict=False):
            self._write(slot, rows, start, before, piece.dtype)

    def _write(self, slot: TensorSlot, rows: Tensor, start: int, before: int, dtype: torch.dtype) -> None:
        if isinstance(slot, HalfSlot):
            if self._last_half is not None and self._last_half.whole != slot.whole:
                self._last_half.make_room()  # the halves of one tensor at a time may be large
            self._last_half = slot
        if self.changes is not None and not self.changes.is_foreseen:
            self.changes.add(slot, rows, start)
        changed = bool(before) and self._changed
        changed |= self._put(slot, rows, start, compare=not changed, begins=not before)
        self._changed = changed
        end = start + (rows.shape[0] if slot.shape else 1)
        self.counts.written_bytes += (end - before) * prod(slot.shape[1:]) * dtype.itemsize
        if end < num_rows(slot.shape):
            return
        if self.digests is not None:
            self.digests.finish(slot, dtype)
        self.counts.written_tensors += 1
        self.counts.cast_tensors += dtype != slot.dtype
        if changed:
            self.counts.changed_tensors += 1
            self.changed.append(slot.name)
        elif self.changes is not None and not self.is_staging:
            self.changes.unchanged.append(slot.name)

    def foresee(self, piece: WeightPiece, changes: UpdateChanges) -> None:
        """Compare a checked piece with what it would overwrite."""
        _, tensor = self._mapper.find(piece.name)
        if tensor is None:
            return
        parts = [(tensor,)] if isinstance(tensor, TensorSlot) else tensor.experts[piece.start_row :]
        slots = (slot for part in parts for slot in part)
        for slot, (rows, start) in zip(slots, _parts(tensor, piece), strict=False):
            changes.add(slot, rows, start)

    def _put(self, slot: TensorSlot, rows: Tensor, start: int, *, compare: bool, begins: bool) -> bool:
        """Write and digest rows, the tensor's first if it ``begins``; return as :meth:`TensorSlot.update`."""
        if self.digests is None:
            return slot.update(rows, start, compare=compare)
        copy = slot.copy_of(rows, start) if self.digests.can_copy else None
        if copy is not None and isinstance(slot, WeightSlot) and compare and not slot.differs(rows, start):
            copy, changed = None, False
        elif copy is None:
            changed = slot.update(rows, start, compare=compare)
        else:
            changed = True
        self.digests.add(slot, rows, start, begins=begins, copy=copy)
        return changed

    def _require_fitting(self, piece: WeightPiece, tensor: TensorSlot | Stack) -> None:
        found, rows = Mismatches(self._slots), piece.rows
        _compare(tensor, piece.name, piece.shape, rows.dtype, NAMES.get(rows.dtype, str(rows.dtype)), found)
        end = piece.start_row + (rows.shape[0] if rows.dim() else 1)
        same_dims = rows.dim() == len(piece.shape) and rows.shape[1:] == piece.shape[1:]
        if not same_dims or end > prod(piece.shape[:1]):
            found.add(piece.name, reason=f"rows {list(rows.shape)} at row {piece.start_row} do not fit")
        found.raise_if_any()

    @property
    def written(self) -> set[str]:
        return self._coverage.written

    @property
    def is_whole(self) -> bool:
        return not self._coverage.due

    def skip(self, name: str) -> bool:
        name, tensor = self._mapper.find(name)
        skipped = tensor is None and self._is_skipped(name)
        self.counts.skipped_tensors += skipped
        return skipped

    def owned(self, name: str) -> tuple[range, ...] | None:
        """Return the rows of a tensor that a source need read for this rank; None means all."""
        _, tensor = self._mapper.find(name)
        return tensor.owned if isinstance(tensor, TensorSlot) else None

    def missing(self, written: set[str]) -> list[str]:
        """Return required names that are not ``written``, of components written or unlike the commit."""
        return self._missing(written, self._components_of(written | self._coverage.due) | self._lost)

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

    def _components_of(self, names: Iterable[str]) -> set[str]:
        return {_component(name) for name in names} & set(self._components)

    def require_whole(self) -> None:
        Mismatches(self._slots, missing=sorted(self._coverage.due)).raise_if_any()

    def take_counts(self) -> LoadCounts:
        counts, self.counts = self.counts, LoadCounts()
        self.changed = []
        return counts

    def forget_written(self) -> None:
        """Forget which names are written, because all weights are what was committed."""
        self._lost = set()
        self._restart()

    def lose_written(self) -> None:
        """Forget which names are written, after a failure; their components must come again completely."""
        self._lost |= self._touched() or set(self._components)
        self._restart()

    def release_written(self, *, lost: bool) -> None:
        """Forget what is written, as memory is released; what is ``lost`` without a copy must come again."""
        self._lost |= self._touched()
        if lost:
            self._lost |= set(self._components) - self._kept
        self._restart()

    def _touched(self) -> set[str]:
        return self._components_of(self._coverage.written | self._coverage.due)

    def _restart(self) -> None:
        self._coverage, self._last_half = Coverage(), None
        for half in self._halves.values():
            half.forget()


def write_some(
    write: Callable[[WeightPiece], None],
    piece: WeightPiece,
    pieces: Iterator[WeightPiece | None],
    stages: StageProfiler,
) -> Any:
    """Write ``piece`` and those that follow at once, for :data:`WRITE_S`; return what comes then, or END."""
    coming: Any = piece
    copy = receive = 0.0
    started = now = perf_counter()
    try:
        while True:
            write(coming)
            written = perf_counter()
            copy += written - now
            coming = next(pieces, END)
            now = perf_counter()
            receive += now - written
            if coming is None or coming is END or now - started > WRITE_S:
                return coming
    finally:
        stages.record("copy", copy)
        stages.record("receive", receive)


def _compare(
    tensor: TensorSlot | Stack,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    dtype_name: str,
    found: Mismatches,
) -> None:
    if shape != tensor.shape:
        name_of_all = name if isinstance(tensor, Stack) else tensor.name
        found.add(name_of_all, expected_shape=list(tensor.shape), got_shape=list(shape))
    for slot in slots_of(tensor):
        if dtype is None or not slot.accepts(dtype):
            found.add(slot.name, expected_dtype=NAMES[slot.dtype], got_dtype=dtype_name)


def _parts(tensor: TensorSlot | Stack, piece: WeightPiece) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows that each slot of ``tensor`` gets of ``piece``, and the first one's number."""
    if isinstance(tensor, TensorSlot):
        yield piece.rows, piece.start_row
        return
    for number, rows in enumerate(piece.rows, piece.start_row):
        start = 0
        for slot in tensor.experts[number]:
            yield rows.narrow(0, start, slot.shape[0]), 0
            start += slot.shape[0]


def _out_of_order(start_row: int, due: int) -> str:
    return f"row {start_row} came when row {due} was due"


def slots_of(tensor: TensorSlot | Stack) -> Sequence[TensorSlot]:
    return tensor.slots if isinstance(tensor, Stack) else (tensor,)


def _component(name: str) -> str:
    return name.partition(".")[0]
