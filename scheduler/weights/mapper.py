"""The weights mapper: which tensors of a model an incoming name stands for.

transformers 5 keeps the experts of a layer in two parameters, ``experts.gate_up_proj`` [experts, gate and
up, in] and ``experts.down_proj`` [experts, out, in]; trainers that walk over ``state_dict`` send these names.
The model's own names are one per expert and projection. Only the loader sees other names than those.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layers.parameters import TensorSlot

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?")
_STACKED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}
"""Maps a projection of an expert to a stacked tensor and its position in dimension 1."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of all experts of a layer, and the slots that it fills."""

    name: str
    experts: Sequence[Sequence[TensorSlot]]
    """Slots of each expert, in order along dimension 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        parts = self.experts[0]
        return len(self.experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:]

    @property
    def owned(self) -> tuple[range, ...]:
        """All experts: every rank holds some rows of each."""
        return (range(len(self.experts)),)

    @property
    def slots(self) -> list[TensorSlot]:
        return [slot for expert in self.experts for slot in expert]


class WeightsMapper:
    def __init__(self, slots: Mapping[str, TensorSlot], own_name: Callable[[str], str]) -> None:
        self._slots, self._own_name = slots, own_name

    def find(self, name: str) -> tuple[str, TensorSlot | Stack | None]:
        """Return the model's own name for ``name`` and what it is written to, or None if it has neither."""
        if name in self._slots:
            return name, self._slots[name]
        name = self._own_name(name)
        return name, self._stacks.get(name) or self._slots.get(name)

    @cached_property
    def _stacks(self) -> dict[str, Stack]:
        parts: dict[str, dict[tuple[int, int], TensorSlot]] = {}
        for name, slot in self._slots.items():
            match = _EXPERT.fullmatch(name)
            if match is not None and match[3] in _STACKED:
                tensor, position = _STACKED[match[3]]
                stack = parts.setdefault(f"{match[1]}.{tensor}{match[4] or ''}", {})
                stack[int(match[2]), position] = slot
        stacks = {}
        for name, found in parts.items():
            count, width = (1 + max(numbers) for numbers in zip(*found, strict=True))
            experts = [[found[expert, position] for position in range(width)] for expert in range(count)]
            stacks[name] = Stack(name, experts)
        return stacks
