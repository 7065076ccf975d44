"""Weights of a language model that is made of layers.

Invariant: every parameter, and every derived tensor, belongs to one layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from ..layers.parameters import DerivingLayer, Layer, WeightSlot
from . import multimodal
from .config import ModelConfig


class LayeredModel(ABC):
    """The weights part of :class:`~.base.CausalLM` for a model of one piece, whose layers own all weights."""

    @abstractmethod
    def owners(self) -> Iterator[Layer]:
        pass

    config: ModelConfig

    @property
    def components(self) -> tuple[str, ...]:
        return ()

    @property
    def kept_components(self) -> frozenset[str]:
        return frozenset()

    @property
    def optional_names(self) -> frozenset[str]:
        """None: every slot needs its tensor, and a tied tensor has no slot."""
        return frozenset()

    def own_name(self, name: str) -> str:
        return multimodal.own_name(self.config.architecture, name)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {slot.name: slot for layer in self.owners() for slot in layer.slots()}

    def finalize_weights(self) -> None:
        for layer in self._deriving:
            layer.finalize()

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self._deriving:
            yield from layer.derived()

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self.owners():
            for parameter in layer.parameters():
                yield parameter.name, parameter.data
        yield from self.derived()

    @cached_property
    def _deriving(self) -> list[DerivingLayer]:
        return [layer for layer in self.owners() if isinstance(layer, DerivingLayer)]
