"""Stages a delta of the weights on the host, and writes it in place at a step boundary.

Invariants:
- Staging changes no weight. It finds where in storage each element lies, casts values as a cold load does,
  and drops those that this rank does not hold: only :meth:`DeltaLoader.swap` is left for the pause.
- A swap exchanges what is staged with what is in place. So the staged memory holds the version before, and a
  second swap returns to it, bit for bit. One that fails is undone by :meth:`DeltaLoader.restore`.
- No tensor is staged twice before a commit, nor more bytes than the weights have.
"""

from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ...transfer.words import as_words, scatter, threads
from ..layers.parameters import HalfSlot, TensorSlot, WeightSlot, differ
from ..layers.sharding import parts_with
from ..models.causal_lm import Weights
from ..runtime.dtypes import DTYPES
from .changes import UpdateChanges
from .coverage import Coverage
from .digests import WeightDigests
from .loader import WeightLoader, slots_of
from .mapper import Stack
from .mismatches import Mismatches
from .source import WeightPiece
from .write_plan import PlannedWrite


@dataclass(slots=True)
class _Elements:
    name: str
    storage: Tensor
    places: Tensor
    values: Tensor
    is_in_place: bool = False
    """True from before the first write of a swap on."""

    @staticmethod
    def at(name: str, storage: Tensor, places: Tensor, values: Tensor) -> "_Elements":
        narrow = torch.int32 if storage.numel() <= torch.iinfo(torch.int32).max else torch.int64
        return _Elements(name, storage, places.to(narrow, copy=True), values.clone())

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes

    def swap(self) -> tuple[Tensor, Tensor]:
        """Exchange it with what is in place; return the values that are, and were, in place."""
        new = self.values
        if self.storage.device.type == "cpu":
            self.values = scatter(self.storage, self.places, new)  # one that fails has written nothing
            self.is_in_place = not self.is_in_place
        else:
            where, there = self.places.to(self.storage.device, torch.int64), new.to(self.storage.device)
            self.values = elements(self.storage, self.places)
            self.is_in_place = not self.is_in_place
            self.storage[where] = there
        return new, self.values


@dataclass(slots=True)
class _Rows:
    name: str
    slot: WeightSlot
    rows: Tensor
    start: int
    is_in_place: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def swap(self) -> tuple[Tensor, Tensor]:
        end = self.start + len(self.rows) if self.rows.dim() else None
        new, old = self.rows, self.slot.read(self.start, end).cpu().clone()
        self.rows, self.is_in_place = old, not self.is_in_place
        self.slot.write(new, self.start)
        return new, old


@dataclass(slots=True)
class Delta:
    """Values that are staged, or after a swap the version before them."""

    staged: list[_Elements | _Rows] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    nbytes: int = 0
    digests: WeightDigests | None = None
    """Digests of the version before, after a commit."""

    def add(self, staged: _Elements | _Rows) -> None:
        self.staged.append(staged)
        self.names.add(staged.name)
        self.nbytes += staged.nbytes

    def swap(self) -> set[str]:
        """Swap all of it; return the names of the tensors that differed."""
        for each in self.staged:
            each.is_in_place = False
        swaps = [threads().submit(each.swap) for each in self.staged]  # memory is what takes the time
        wait(swaps)
        pairs = zip(self.staged, swaps, strict=True)
        return {each.name for each, swap in pairs if differ(*swap.result())}

    def restore(self) -> None:
        """Undo a swap, also one that has failed within a tensor."""
        for each in reversed(self.staged):
            if each.is_in_place:
                each.swap()


class DeltaLoader(WeightLoader):
    """Stages the pieces of a delta, and keeps what the last one has replaced."""

    is_staging = True

    def __init__(self, model: Weights, loader: WeightLoader) -> None:
        """``loader`` writes all else, and has the digests of what is in place."""
        super().__init__(model)
        self._loader = loader
        self._limit = sum(tensor.nbytes for _, tensor in model.named_storage())
        scales = {slot.fills(torch.float32): slot for slot in self._slots.values()}
        self._quantized = {name: slot for each, slot in scales.items() if each for name in (each, slot.name)}
        """Tensors that are quantised on writing, by their names and those of their scales."""
        self._staged = Delta()
        self._is_in_place = False
        self.before: Delta | None = None
        """Values that the last commit replaced, if it was a delta's and nothing has changed weights since."""

    def write(self, piece: WeightPiece | PlannedWrite) -> None:
        """Stage one piece; a refused one stages nothing."""
        assert isinstance(piece, WeightPiece), "what is staged is not planned"
        if self.digests is None and self._loader.digests is not None:
            self.digests = self._loader.digests.copy()
        if piece.positions is None:
            super().write(piece)
            return
        _, tensor = self._mapper.find(piece.name)
        assert tensor is not None, "only what was checked is written"
        for slot, positions, values in _in_slots(tensor, piece.positions, piece.rows):
            assert isinstance(slot, WeightSlot), "halves are refused"
            self._stage_elements(slot, positions, values.to(slot.kept_dtype(piece.dtype)).cpu())
            self.counts.cast_tensors += piece.is_last and slot.dtype != piece.dtype
        self.counts.written_bytes += piece.positions.nbytes + piece.rows.nbytes
        if piece.is_last:
            names = {slot.name for slot in slots_of(tensor)}
            self.counts.written_tensors += len(names)
            self._coverage.written |= names
            self._coverage.written |= {*filter(None, (slot.fills(piece.dtype) for slot in slots_of(tensor)))}

    @property
    def staged_bytes(self) -> int:
        """Host memory that staged elements take on this rank."""
        return self._staged.nbytes

    def swap(self) -> set[str]:
        """Exchange what is staged with what is in place; return the names of the tensors that differed."""
        self._is_in_place = True
        return self._staged.swap()

    def restore(self) -> bool:
        """Undo a swap that was not committed; return True if there was one."""
        if not self._is_in_place:
            return False
        self._staged.restore()
        self._is_in_place = False
        return True

    def commit(self, *, keep: bool) -> None:
        """Keep the version before a swap, if ``keep``, or forget it."""
        self._staged.digests = self._loader.digests
        self._loader.digests = self.digests or self._loader.digests
        self.before = self._staged if keep else None
        self.forget_written()

    def take_back(self) -> None:
        """Stage the version before the last commit, which is kept until this one commits."""
        assert self.before is not None, "rank 0 has looked"
        self._staged = self.before
        self.digests = self._staged.digests
        self._coverage.written |= self._staged.names
        self.counts.written_tensors = len(self._staged.names)
        self.counts.written_bytes = self._staged.nbytes

    def forget(self) -> None:
        """Forget the version before, because something else has changed the weights."""
        self.before = None

    def add_untouched(self, changes: UpdateChanges) -> None:
        """Add the tensors that are not staged to what a delta changes."""
        for name, slot in self._slots.items():
            if name in self._quantized or name in self._staged.names:
                continue
            if isinstance(slot, WeightSlot):
                nothing = torch.empty(0, dtype=slot.dtype)
                changes.add_elements(slot, torch.empty(0, dtype=torch.int64), nothing, nothing)

    def _put(self, slot: TensorSlot, rows: Tensor, start: int, *, compare: bool, begins: bool) -> bool:
        assert isinstance(slot, WeightSlot), "halves are refused"
        for part, own, first in slot.parts(rows, start):
            self._stage(_Rows(slot.name, part, torch.empty(own.shape, dtype=part.dtype).copy_(own), first))
        if self.digests is not None:
            self.digests.add(slot, rows, start, begins=begins)
        return False

    def _stage_elements(self, slot: WeightSlot, positions: Tensor, values: Tensor) -> None:
        held = torch.zeros(len(positions), dtype=torch.bool)
        old = torch.empty_like(values)
        for storage, places, which, follows in slot.places(positions):
            chosen = slice(None) if which is None else which
            self._stage(_Elements.at(slot.name, storage, places, values[chosen]))
            if follows is not None:
                for written in follows(values[chosen]):
                    self._stage(_Elements.at(slot.name, *written))
            if self.digests is not None or self.changes is not None:
                held[chosen] = True
                old[chosen] = elements(storage, places)
        if self.changes is not None and slot.name not in self._quantized:
            self.changes.add_elements(slot, positions[held], old[held], values[held])
        if self.digests is not None:
            self.digests.change(slot, positions[held], old[held], values[held])

    def _stage(self, staged: _Elements | _Rows) -> None:
        if self._staged.nbytes + staged.nbytes > self._limit:
            reason = f"the delta takes more memory than the weights, {self._limit} bytes: send a full update"
            raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed_bytes=self._limit)
        self._staged.add(staged)

    def _walk(
        self, spec: TensorSpec, tensor: TensorSlot | Stack, coverage: Coverage, disorder: Mismatches
    ) -> None:
        continues = spec.start_row > 0 and coverage.open is not None and coverage.open[0] == tensor.name
        for slot in slots_of(tensor):
            names = {slot.name, slot.fills(DTYPES[spec.dtype])}
            if reason := self._refusal(slot, spec):
                disorder.add(slot.name, reason=reason)
            elif not continues and names & (self._staged.names | self.written):
                disorder.add(slot.name, reason="comes twice")
        if spec.count is None and not disorder.any:
            super()._walk(spec, tensor, coverage, disorder)

    def _refusal(self, slot: TensorSlot, spec: TensorSpec) -> str | None:
        """Return why a delta cannot have ``slot`` as ``spec`` brings it, or None."""
        if isinstance(slot, HalfSlot):
            return "is read into another tensor: a delta has that one"
        quantized = self._quantized.get(slot.name)
        kept = None if quantized is None else quantized.original_dtype
        if slot.fills(DTYPES[spec.dtype]) is None:
            if kept is not None:
                return "is quantised here: a delta has the values before"
            if quantized is not None and spec.count is not None and self._came_otherwise(slot, spec):
                return "came in another data type: its digest is of the values that came"
            return None
        if kept is None and spec.count is not None:
            return "is quantised here, and the values before are not kept (quantization_originals)"
        return None

    def _came_otherwise(self, slot: TensorSlot, spec: TensorSpec) -> bool:
        """Return True if the digest of ``slot`` is not of values in the dtype of ``spec``."""
        digests = self.digests or self._loader.digests
        return digests is not None and not digests.have(slot.name, spec.dtype)

    def _restart(self) -> None:
        super()._restart()
        self._staged, self._is_in_place, self.digests = Delta(), False, None


def elements(storage: Tensor, places: Tensor) -> Tensor:
    """Return elements of flat ``storage`` on the host."""
    bits = as_words(storage)
    return bits.index_select(0, places.to(storage.device)).cpu().view(storage.dtype)


def _in_slots(
    tensor: TensorSlot | Stack, positions: Tensor, values: Tensor
) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
    """Yield each slot of ``tensor`` with its elements: their positions in it, and their values."""
    if isinstance(tensor, TensorSlot):
        yield tensor, positions, values
        return
    slots = tensor.slots
    for number, chosen, own in parts_with(positions, [prod(slot.shape) for slot in slots]):
        yield slots[number], own, values[chosen]
