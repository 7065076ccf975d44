"""Storage of weights, and the only way to write them.

Invariants:
- A parameter is allocated once, 64-byte aligned, and never re-assigned: while it is resident its address
  stays, for graphs and packed kernels. A release that moves it says so (``memory/residency.py``).
- A :class:`WeightSlot` maps one checkpoint tensor, in checkpoint layout, to its rows of one parameter.
  Outside of the layer that owns it, storage is touched in no other way.
- Each rank takes a whole tensor and keeps the part that it computes with (``sharding.py``).
- A value is cast exactly as a cold load casts it, so writing the same checkpoint twice changes no byte.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ...transfer.weight_digest import Copy
from ..kernels.linear import INT8_COLUMNS, Codes
from ..memory import residency
from ..memory.offload import OffloadableComponent
from ..memory.workspace import ALIGNMENT, Workspace
from ..parallel.group import SINGLE, TensorParallel

if TYPE_CHECKING:
    from .lora import AdapterSlots
    from .rank_rows import RankRows

_PROBE_ELEMENTS = 1024
_COMPARE_ELEMENTS = 1 << 20  # bounds the transient of a cast comparison to a few megabytes

CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

Written = tuple[Tensor, Tensor, Tensor]
"""Flat storage, places in it, and the values that come there."""


class Place(NamedTuple):
    """Location of some elements of a tensor."""

    storage: Tensor
    """Flat storage."""
    places: Tensor
    """Places of the elements in it."""
    which: Tensor | None
    """Numbers of these elements, or None if they are all, in order."""
    follows: "Callable[[Tensor], Iterator[Written]] | None" = None
    """Returns what else changes, given the elements' values: whole rows of blocks of a quantised weight."""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ScaleBlocks:
    """Weights stored as float8_e4m3fn, int8 or codes, a float32 scale per block (``scaled_blocks.py``)."""

    rows: int = 128
    columns: int = 128
    skipped: frozenset[str] = field(default=frozenset(), compare=False)
    """Modules that keep the model's dtype, and those below, by whole components of their names. Not compared:
    checkpoints of one model differ."""
    dtype: torch.dtype = torch.float8_e4m3fn
    codes: Codes | None = None
    """Codes of four bits that int8 elements are stored as where they are packed."""
    keeps_originals: bool = field(default=False, compare=False)
    """True: the values that weights are quantised of are kept, too, in the dtype of the placement."""

    @property
    def of_head(self) -> "ScaleBlocks":
        """Blocks of the output head: int8 where others have four bits, which would double the error."""
        return self if self.codes is None else replace(self, columns=INT8_COLUMNS, codes=None)

    def converts(self, module: str) -> bool:
        return not is_within(module, self.skipped | _NEVER_CONVERTED[self.dtype])


_NEVER_CONVERTED: dict[torch.dtype, frozenset[str]] = {  # FP8: output head, routers: in no format in use
    torch.float8_e4m3fn: frozenset({"lm_head", "mlp.gate", "block_sparse_moe.gate"}),
    # kv_b_proj is absorbed into what attends, in the model's dtype: quantised it would only take more memory.
    torch.int8: frozenset(
        {"mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "self_attn.kv_b_proj"}
    ),
}


def is_within(module: str, names: frozenset[str]) -> bool:
    """Return True if ``module`` is below a module of these names, or its own name ends with one of them.

    Components between dots count as a whole: ``proj`` is no end of ``mlp.up_proj``.
    """
    ends, starts = _dotted(names)
    return f".{module}".endswith(ends) or module.startswith(starts)


@cache
def _dotted(names: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(f".{name}" for name in names), tuple(f"{name}." for name in names)


@dataclass(frozen=True, slots=True)
class Placement:
    """Place and dtypes of a model's weights; every layer passes it on to its parts."""

    dtype: torch.dtype
    """Dtype of activations, and of weights that are not quantised."""
    device: torch.device
    blocks: ScaleBlocks | None = None
    workspace: Workspace = field(default_factory=Workspace, compare=False, repr=False)
    parallel: TensorParallel = SINGLE
    ep: int = 1
    """Groups of ranks; each holds whole experts of its own, whose width its ranks divide."""
    adapters: "AdapterSlots | None" = field(default=None, compare=False, repr=False)
    """Slots for adapters of the products, or None if the model serves none."""
    rank_rows: "RankRows | None" = field(default=None, compare=False, repr=False)
    """Rows of data-parallel attention, or None if every rank has all rows."""

    @property
    def of_own_rows(self) -> "Placement":
        """Return the place of attention's weights: ranks that have rows of their own have them whole."""
        return self if self.rank_rows is None else replace(self, parallel=SINGLE)

    def sends_rows(self, top_k: int) -> bool:
        """Return True if rows go to the ranks of their experts: to fewer than all others, wherever these are.

        A row of a token goes to all ranks of a group that has one of its ``top_k`` experts.
        """
        ranks = self.parallel.size
        return self.rank_rows is not None and top_k * (ranks // self.ep) < ranks - 1


class TensorSlot(ABC):
    """Destination of one checkpoint tensor: its name and shape there, and the parameter that it is a part of.

    ``dtype``: that of storage; other dtypes that it accepts are cast on writing.
    """

    __slots__ = ("dtype", "name", "parameter", "shape")

    def __init__(self, name: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = shape
        self.dtype = dtype

    @property
    def owned(self) -> tuple[range, ...]:
        """Rows that this rank holds, ascending; the others are dropped if they come."""
        return (range(self.shape[0] if self.shape else 1),)

    @property
    def digested_by(self) -> int | None:
        """Rank that digests the rows that this rank holds; None: each rank does that holds some."""
        return 0 if sum(map(len, self.owned)) == prod(self.shape[:1]) else None

    @property
    def halves(self) -> tuple["HalfSlot", ...]:
        """Two tensors that a checkpoint may have in the place of this one, if any."""
        return ()

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype or (dtype in CASTABLE and self.dtype in CASTABLE)

    def fills(self, dtype: torch.dtype) -> str | None:
        """Return the name of another tensor that writing this one in ``dtype`` writes, too, or None."""
        return None

    @property
    def original_dtype(self) -> torch.dtype | None:
        """Dtype of the values that are kept of a tensor that is quantised on writing, or None."""
        return None

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values that come in ``dtype`` are stored, or kept before quantising."""
        return self.dtype if self.fills(dtype) is None else self.original_dtype or dtype

    def copy_of(self, rows: Tensor, start: int) -> Copy | None:
        """Return what a write of ``rows`` does, if it copies whole words on the CPU, or None."""
        return None

    def takes_as_is(self, rows: Tensor) -> bool:
        if not (rows.dim() == 2 and rows.numel() and rows.is_contiguous() and rows.device.type == "cpu"):
            return False
        return rows.dtype == self.dtype and rows[0].nbytes % 2 == 0

    @abstractmethod
    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        """Write rows, which come in order, where bytes differ; return True if one did, or not ``compare``."""


class HalfSlot(TensorSlot):
    """One of two tensors that may come in the place of ``whole``: their product exists when both are whole.

    ``forget`` drops the data that waits for ``other``; ``make_room`` keeps a small share of it at most.
    """

    __slots__ = ("_held", "_take", "forget", "make_room", "other", "whole")

    def __init__(
        self,
        names: tuple[str, str, str],
        parameter: str,
        shape: tuple[int, ...],
        take: Callable[..., bool],
        forget: Callable[[], None],
        make_room: Callable[[], None],
        held: range,
    ) -> None:
        """``names``: its own, the other's, and that of the whole; ``take`` updates ``held`` rows."""
        name, self.other, self.whole = names
        super().__init__(name, parameter, shape, torch.uint8)
        self._take, self.forget, self.make_room, self._held = take, forget, make_room, held

    @property
    def owned(self) -> tuple[range, ...]:
        return (self._held,)

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        held = self._held
        first, last = max(start, held.start), min(start + len(rows), held.stop)
        if first >= last:
            return not compare
        return self._take(rows[first - start : last - start], first - held.start, compare=compare)


class WeightSlot(TensorSlot):
    """Destination of one checkpoint tensor that the model holds."""

    __slots__ = ()

    @property
    def owned_columns(self) -> range | None:
        """Columns that this rank holds, or None if it holds all."""
        return None

    @property
    def is_whole(self) -> bool:
        """True if this rank holds every element."""
        return self.owned_columns is None and sum(map(len, self.owned)) == prod(self.shape[:1])

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        if compare and not self.differs(rows, start):
            return False
        self.write(rows, start)
        return True

    @abstractmethod
    def write(self, rows: Tensor, start: int) -> None:
        """Overwrite rows from ``start`` in place, casting if needed.

        ``rows`` must not alias the parameter; on the CPU it has been read when this returns.
        """

    def differs(self, rows: Tensor, start: int) -> bool:
        """Return True if writing would change a byte; stops at the first difference."""
        return differ(rows, self.read(start, start + len(rows)))

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return held rows ``[start, stop)`` in checkpoint layout, viewed if possible; scalars whole."""

    def parts(self, rows: Tensor, start: int) -> Iterator[tuple["WeightSlot", Tensor, int]]:
        """Yield what this rank holds of ``rows``, as slots whose :meth:`read` returns what was written."""
        yield self, rows, start

    def places(self, positions: Tensor) -> Iterator[Place]:
        """Yield the places of the elements at flat ``positions`` in checkpoint layout that this rank holds.

        An element may have several. Raises ``unsupported`` where elements have no place of their own.
        """
        raise CaesuraError(
            ErrorCode.UNSUPPORTED, f"elements of {self.name} cannot be written one by one", name=self.name
        )


class DelegatingSlot(WeightSlot):
    """A checkpoint tensor whose rows go to other slots, those of its parts."""

    __slots__ = ()

    @abstractmethod
    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        """Yield each slot that takes some of ``rows``, what it takes, and the first row there."""

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        changed = not compare
        for slot, part, first in self.targets(rows, start):
            changed |= slot.update(part, first, compare=not changed)
        return changed

    def write(self, rows: Tensor, start: int) -> None:
        self.update(rows, start, compare=False)

    def differs(self, rows: Tensor, start: int) -> bool:
        return any(slot.differs(part, first) for slot, part, first in self.targets(rows, start))

    def parts(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        for slot, part, first in self.targets(rows, start):
            yield from slot.parts(part, first)


class PlainSlot(WeightSlot):
    """Rows of a parameter that is stored as the checkpoint has it."""

    __slots__ = ("_rows",)

    def __init__(self, name: str, parameter: str, rows: Tensor) -> None:
        super().__init__(name, parameter, tuple(rows.shape), rows.dtype)
        self._rows = rows

    def update(self, rows: Tensor, start: int, *, compare: bool = True) -> bool:
        target = self._target(rows, start)
        if compare and not differ(rows, target):
            return False
        target.copy_(rows)
        return True

    def write(self, rows: Tensor, start: int) -> None:
        self._target(rows, start).copy_(rows)

    def copy_of(self, rows: Tensor, start: int) -> Copy | None:
        is_copied = self._rows.device.type == "cpu" and self._rows.is_contiguous() and self.takes_as_is(rows)
        return Copy(self._rows, start) if is_copied else None

    def differs(self, rows: Tensor, start: int) -> bool:
        return differ(rows, self._target(rows, start))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._rows[start:stop] if self.shape else self._rows

    def places(self, positions: Tensor) -> Iterator[Place]:
        yield Place(self._rows.view(-1), positions, None)

    def _target(self, rows: Tensor, start: int) -> Tensor:
        if rows.shape == self.shape:  # all of it
            return self._rows
        return self._rows.narrow(0, start, rows.shape[0])


def differ(rows: Tensor, target: Tensor) -> bool:
    """Return True if a copy of ``rows`` to ``target``, contiguous, of the same shape, would change a byte."""
    new, old = rows.contiguous().view(-1), target.view(-1)
    if new.shape[0] <= _PROBE_ELEMENTS:
        return not _same_bits(new, old)
    if not _same_bits(new[:_PROBE_ELEMENTS], old[:_PROBE_ELEMENTS]):
        return True
    pairs = zip(
        new[_PROBE_ELEMENTS:].split(_COMPARE_ELEMENTS), old[_PROBE_ELEMENTS:].split(_COMPARE_ELEMENTS)
    )
    return not all(_same_bits(a, b) for a, b in pairs)


def _same_bits(new: Tensor, old: Tensor) -> bool:
    # As integers: NaN equals itself and -0.0 is not 0.0, as "the same bytes" demands. As the widest that fit,
    # because torch compares by element.
    cast = new.to(device=old.device, dtype=old.dtype)
    size = old.itemsize
    starts = cast.storage_offset() * size, old.storage_offset() * size
    wide = old.nbytes % 8 == starts[0] % 8 == starts[1] % 8 == 0
    bits = torch.int64 if wide else _BITS[size]
    return torch.equal(cast.view(bits), old.view(bits))


class Parameter:
    """One allocation: a whole engine parameter, which may be fused from several checkpoint tensors."""

    __slots__ = ("data", "name")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.data = residency.allocate(shape, dtype, device)
        assert self.data.data_ptr() % ALIGNMENT == 0, f"{name} is not {ALIGNMENT}-byte aligned"

    def slot(self, checkpoint_name: str, start: int = 0, length: int | None = None) -> WeightSlot:
        """Return the slot of a checkpoint tensor, rows ``[start, start + length)`` or to the end."""
        if self.data.dim() == 0:
            return PlainSlot(checkpoint_name, self.name, self.data)
        length = self.data.shape[0] - start if length is None else length
        return PlainSlot(checkpoint_name, self.name, self.data.narrow(0, start, length))


class OffloadableSlot(WeightSlot):
    """One checkpoint tensor that is one whole parameter of ``movable``."""

    __slots__ = ("_movable", "_tensor")

    def __init__(self, parameter: Parameter, movable: OffloadableComponent) -> None:
        tensor = parameter.data
        super().__init__(parameter.name, parameter.name, tuple(tensor.shape), tensor.dtype)
        self._movable = movable
        self._tensor = tensor

    def write(self, rows: Tensor, start: int) -> None:
        """Write rows. Raises OSError if the copy on the host cannot be written."""
        self._movable.write(self._tensor, start * prod(self.shape[1:]), rows)

    def differs(self, rows: Tensor, start: int) -> bool:
        values = self._movable.values(self._tensor)
        return differ(rows, values if rows.shape == self.shape else values.narrow(0, start, rows.shape[0]))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a view, of host memory once the parameter has been offloaded."""
        values = self._movable.values(self._tensor)
        return values[start:stop] if self.shape else values


class Layer(Protocol):
    def slots(self) -> Iterator[WeightSlot]: ...

    def parameters(self) -> Iterator[Parameter]: ...


class CompositeLayer(ABC):
    """A layer that is made of layers, and owns nothing beside them."""

    @abstractmethod
    def parts(self) -> Iterator[Layer]:
        """Yield the parts in the order of the checkpoint's modules."""

    def slots(self) -> Iterator[WeightSlot]:
        for part in self.parts():
            yield from part.slots()

    def parameters(self) -> Iterator[Parameter]:
        for part in self.parts():
            yield from part.parameters()


@runtime_checkable
class DerivingLayer(Layer, Protocol):
    """A layer with tensors that are derived from several of its parameters."""

    def finalize(self) -> None:
        """Derive the tensors of :meth:`derived` from the current parameters, in place; once, at commit."""
        ...

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every derived tensor by engine name; preallocated, the same storage for ever."""
        ...
