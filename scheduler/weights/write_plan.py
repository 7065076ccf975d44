"""Plans of writes: where the tensors of a message go, made once and kept for messages with equal specs.

- A plan holds what follows from specs and model alone; what a write records is recorded anew each time.
- Only whole tensors are planned, stored as they come (scales: once for each output) within the host, and
  without partners in the model. The loader writes all others one by one.
- A plan is made again if storage has moved since.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ...transfer import words
from ...transfer.weight_digest import LANES, Copy, TensorDigest
from ..layers.parameters import WeightSlot
from ..memory import moves
from ..runtime.dtypes import DTYPES, NAMES

GROUP_BYTES = 8 << 20
"""Bytes that one call writes, a few milliseconds' work; larger tensors are not planned."""

_Find = Callable[[str], tuple[str, Any]]
_PLANNED = np.dtype(
    [(name, "i8") for name in ("offset", "rows", "width", "target", "row", "pack", "equal", "changed")]
    + [("lanes", "u4", (LANES,))]
)
"""``Planned`` of ``transfer/weight_digest.cpp``."""


class PlannedWrite:
    """Tensors of one buffer that are compared, written and digested by one call."""

    def __init__(self, tensors: Sequence[tuple[WeightSlot, Copy, TensorSpec]]) -> None:
        self.slots = [slot for slot, _, _ in tensors]
        self.names = {slot.name for slot in self.slots}
        self.nbytes = sum(spec.nbytes for _, _, spec in tensors)
        self.buffer: Tensor | None = None
        """Bytes of the message, from when it has come until it is written."""
        self._moves = moves.count
        self._copies = [copy for _, copy, _ in tensors]
        """Storage stays as long as its address is known."""
        self._digested = [(slot.name, slot.owned[0], NAMES[slot.dtype], slot.shape) for slot in self.slots]
        self._tensors = np.zeros(len(tensors), _PLANNED)
        self._address = self._tensors.ctypes.data
        for number, (_, copy, spec) in enumerate(tensors):
            rows = spec.shape[0] if len(spec.shape) == 2 else 1
            place = copy.target.data_ptr(), copy.row, copy.pack or 0, copy.equal or 0
            self._tensors[number] = spec.offset, rows, spec.nbytes // rows // 2, *place, False, 0

    @property
    def holds(self) -> bool:
        """True if storage is where it was."""
        return self._moves == moves.count

    def write(self) -> tuple[dict[str, dict[range, TensorDigest]], list[str]]:
        """Write, and return all digests, and the names of the tensors of which a byte has changed."""
        compiled, count, buffer = words.library(), len(self.slots), self.buffer
        assert compiled is not None and buffer is not None, "it is planned with both"
        share = -(-count // torch.get_num_threads())

        def take(first: int) -> None:
            tensors = self._address + first * _PLANNED.itemsize
            compiled.caesura_words_write(tensors, min(share, count - first), buffer.data_ptr())

        starts = range(0, count, share)
        if len(starts) > 1:
            list(words.threads().map(take, starts))
        else:
            take(0)
        lanes = map(tuple, self._tensors["lanes"].tolist())
        digests = {
            name: {held: TensorDigest(dtype, shape, each)}
            for (name, held, dtype, shape), each in zip(self._digested, lanes, strict=True)
        }
        return digests, [self.slots[number].name for number in self._tensors["changed"].nonzero()[0]]


Step = PlannedWrite | TensorSpec
"""The next to be written: several tensors by a plan, or one without."""


def steps(specs: Sequence[TensorSpec], find: _Find, buffer: memoryview) -> Iterator[Step]:
    """Yield the steps of a message of ``specs`` in ``buffer``."""
    group: list[tuple[WeightSlot, Copy, TensorSpec]] = []
    nbytes = 0
    for spec in specs:
        found = _copied(spec, find, buffer)
        if group and (found is None or nbytes + spec.nbytes > GROUP_BYTES):
            yield PlannedWrite(group)
            group, nbytes = [], 0
        if found is None:
            yield spec
        else:
            group.append((*found, spec))
            nbytes += spec.nbytes
    if group:
        yield PlannedWrite(group)


def _copied(spec: TensorSpec, find: _Find, buffer: memoryview) -> tuple[WeightSlot, Copy] | None:
    """Return where a tensor is copied to, or None if it is not planned."""
    _, slot = find(spec.name)
    dtype, shape = DTYPES[spec.dtype], tuple(spec.shape)
    is_whole = spec.count is None and spec.nbytes == prod(shape) * dtype.itemsize and spec.nbytes > 0
    if not (is_whole and spec.nbytes <= GROUP_BYTES and isinstance(slot, WeightSlot) and slot.is_whole):
        return None
    if slot.shape != shape or slot.halves or slot.fills(dtype) is not None:
        return None
    values = torch.frombuffer(buffer, dtype=dtype, count=prod(shape), offset=spec.offset)
    copy = slot.copy_of(values.view(shape if len(shape) == 2 else (1, -1)), 0)
    return None if copy is None else (slot, copy)
