"""The table of faults by name; `campaign.py` imports the modules that fill it."""

from collections.abc import Callable
from dataclasses import dataclass

from .scene import Scene

Happen = Callable[[Scene], None]
"""Happens in a scene and leaves it cleared; what must be true afterwards is the campaign's to check."""


@dataclass(frozen=True)
class Kind:
    name: str
    happen: Happen
    weight: int
    """Weight in the draw among all kinds; expensive ones are drawn seldom."""


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: int = 8) -> Callable[[Happen], Happen]:
    def register(happen: Happen) -> Happen:
        KINDS[name] = Kind(name, happen, weight)
        return happen

    return register
