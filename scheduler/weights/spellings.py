"""Other names under which a model's tensors come: those of trainers that hold them otherwise than its checkpoint does.

transformers 5 has the experts of a layer in two parameters, ``experts.gate_up_proj`` [experts, gate and up, in] and
``experts.down_proj`` [experts, out, in], whose names a trainer sends that walks over ``state_dict``; some checkpoints have them
so, too. The model's own names are those of one tensor per expert and projection. What else a model's tensors are called, it says
itself (:meth:`~..models.base.Weights.own_name`).

Invariants:
- Everything behind the loader knows the model's own names alone: what is written, missing, sent and compared goes by them.
- A tensor of all experts is written expert by expert. From its first rows on all of them are due, and its rows come in order as
  those of any other tensor.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layers.parameters import TensorSlot
from .pieces import WeightPiece

_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?")
_STACKED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}
"""Of an expert's projections: the tensor of all experts, and which part of its rows they are there."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a tensor of all experts is made of."""

    name: str
    """The model's own, as :meth:`Spellings.own` says it."""
    experts: Sequence[Sequence[TensorSlot]]
    """Of each expert its slots, one after the other along dimension 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        parts = self.experts[0]
        return len(self.experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:]

    @property
    def owned(self) -> tuple[range, ...]:
        """All experts: of each, every rank holds some."""
        return (range(len(self.experts)),)

    @property
    def slots(self) -> list[TensorSlot]:
        """Of all experts."""
        return self.of(range(len(self.experts)))

    def of(self, experts: range) -> list[TensorSlot]:
        """Those of some experts."""
        return [slot for expert in self.experts[experts.start : experts.stop] for slot in expert]

    def pieces(self, piece: WeightPiece) -> Iterator[WeightPiece]:
        """The same rows, which are whole experts, as those of each."""
        for number, rows in enumerate(piece.rows, piece.start_row):
            start = 0
            for slot in self.experts[number]:
                part = rows.narrow(0, start, slot.shape[0])
                yield WeightPiece(slot.name, slot.shape, piece.dtype, 0, part)
                start += slot.shape[0]


class Spellings:
    """Of the tensors of one model."""

    def __init__(self, slots: Mapping[str, TensorSlot], own_name: Callable[[str], str]) -> None:
        self._slots, self._own_name = slots, own_name

    def own(self, name: str) -> str:
        """The model's name of what came as ``name``; of a tensor of all experts, what it is called here."""
        return name if name in self._slots else self._own_name(name)

    def stack(self, name: str) -> Stack | None:
        """Of the own ``name`` of a tensor of all experts. None: it is none, or the model has it so itself."""
        return self._stacks.get(name)

    @cached_property
    def _stacks(self) -> dict[str, Stack]:
        return _stacks_of(self._slots)  # nobody asks where all names are the model's own


def _stacks_of(slots: Mapping[str, TensorSlot]) -> dict[str, Stack]:
    found: dict[str, dict[tuple[int, int], TensorSlot]] = {}
    for name, slot in slots.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is not None and match[3] in _STACKED:
            tensor, place = _STACKED[match[3]]
            found.setdefault(f"{match[1]}.{tensor}{match[4] or ''}", {})[int(match[2]), place] = slot
    stacks = {}
    for name, parts in found.items():
        count = 1 + max(expert for expert, _ in parts)
        width = 1 + max(place for _, place in parts)
        experts = [[parts[expert, place] for place in range(width)] for expert in range(count)]
        stacks[name] = Stack(name, experts)
    return stacks
