"""Plans of writes: where the tensors of a message go, made once and kept for messages with equal specs.

- A plan holds what follows from specs and model alone; what a write records is recorded anew each time.
- Only whole tensors are planned, copied as they are within the host, and without partners in the model. The
  loader writes all others one by one.
- A plan is made again if storage has moved since.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...io_struct import TensorSpec
from ...transfer import words
from ...transfer.weight_digest import LANES, Copy
from ..kernels import linear
from ..layers.parameters import WeightSlot
from ..runtime.dtypes import DTYPES

GROUP_BYTES = 8 << 20
"""Bytes that one call writes, a few milliseconds' work; larger tensors are not planned."""
_KEPT = 1 << 15
"""Most tensors of all plans that are kept."""

_Find = Callable[[str], tuple[str, Any]]


class _Tensor(ctypes.Structure):
    """``Planned`` of ``transfer/weight_digest.cpp``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("offset", "rows", "width")),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row", "packed", "changed")),
        ("lanes", ctypes.c_uint32 * LANES),
    ]


class PlannedWrite:
    """Tensors of one buffer that are compared, written and digested by one call."""

    def __init__(self, tensors: Sequence[tuple[WeightSlot, Copy, TensorSpec]]) -> None:
        self.slots = [slot for slot, _, _ in tensors]
        self.names = {slot.name for slot in self.slots}
        self.nbytes = sum(spec.nbytes for _, _, spec in tensors)
        self.buffer: Tensor | None = None
        """Bytes of the message, from when it has come until it is written."""
        self._copies = [copy for _, copy, _ in tensors]
        self._tensors = (_Tensor * len(tensors))()
        for tensor, (_, copy, spec) in zip(self._tensors, tensors, strict=True):
            rows = spec.shape[0] if len(spec.shape) == 2 else 1
            tensor.offset, tensor.rows, tensor.width = spec.offset, rows, spec.nbytes // rows // 2
            tensor.target, tensor.row, tensor.packed = copy.target.data_ptr(), copy.row, copy.pack is not None

    @property
    def holds(self) -> bool:
        """True if storage is where it was."""
        pairs = zip(self._tensors, self._copies, strict=True)
        return all(tensor.target == copy.target.data_ptr() for tensor, copy in pairs)

    def write(self) -> list[tuple[tuple[int, ...], bool]]:
        """Write, and return of each tensor the lanes of its digest, and True if a byte has changed."""
        compiled, count, buffer = words.library(), len(self.slots), self.buffer
        assert compiled is not None and buffer is not None, "it is planned with both"
        walkers = linear.walkers()
        share = -(-count // torch.get_num_threads())

        def take(first: int) -> None:
            tensors = ctypes.byref(self._tensors, first * ctypes.sizeof(_Tensor))
            compiled.caesura_words_write(tensors, min(share, count - first), buffer.data_ptr(), *walkers)

        starts = range(0, count, share)
        if len(starts) > 1:
            list(words.threads().map(take, starts))
        else:
            take(0)
        return [(tuple(tensor.lanes), bool(tensor.changed)) for tensor in self._tensors]


Step = PlannedWrite | TensorSpec
"""The next to be written: several tensors by a plan, or one without."""


@dataclass(slots=True)
class WritePlans:
    """Plans by the specs that they are for."""

    _plans: dict[tuple[str, int, int], tuple[list[TensorSpec], list[Step]]] = field(default_factory=dict)
    _count: int = 0

    def steps(self, specs: list[TensorSpec], find: _Find, buffer: memoryview) -> Sequence[Step]:
        """Return the steps of a message of ``specs`` in ``buffer``."""
        key = specs[0].name, specs[0].start_row, len(specs)
        known = self._plans.get(key)
        if known is not None and known[0] == specs:
            planned = [step for step in known[1] if isinstance(step, PlannedWrite)]
            if all(step.holds for step in planned):
                return known[1]
        elif self._count + len(specs) > _KEPT:
            self._plans.clear()
            self._count = 0
        self._count += len(specs)
        self._plans[key] = specs, list(_steps(specs, find, buffer))
        return self._plans[key][1]


def _steps(specs: Sequence[TensorSpec], find: _Find, buffer: memoryview) -> Iterator[Step]:
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
